"""Muon's update against torch.optim.Muon and against singular values in float64, NorMuon's also
against Emerging-Optimizers'; which weights Muon updates; the ranks that own them."""

import math
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from megatron.config.model import ModelConfig
from megatron.config.muon import COEFFICIENTS, MuonConfig
from megatron.config.optimizer import OptimizerConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.plan.muon_matrices import Stack, stacks
from megatron.config.plan.parameter_spec import Matrices
from megatron.config.plan.parameters import parameter_table
from megatron.optimizer.muon import Muon, neuron_moments, normalized, orthogonalize
from megatron.optimizer.optimizer import MixedPrecisionOptimizer
from megatron.parallel.context import ParallelContext
from megatron.parallel.sharding import Sharding
from tests.forkrun import ROOT

LAYER = "decoder.layers.0."
MODEL = ModelConfig(
    num_layers=1,
    hidden_size=24,
    num_attention_heads=4,
    group_query_attention=True,
    num_query_groups=2,
    kv_channels=6,
    untie_embeddings_and_output_weights=True,
)
SHAPES = {
    "embedding.word_embeddings.weight": (40, 24),
    LAYER + "input_layernorm.weight": (24,),
    LAYER + "self_attention.linear_qkv.weight": (48, 24),
    LAYER + "self_attention.linear_qkv.bias": (48,),
    LAYER + "self_attention.linear_proj.weight": (24, 24),
    LAYER + "mlp.linear_fc1.weight": (2, 13, 24),
    LAYER + "mlp.linear_fc1.bias": (2, 13),
    LAYER + "mlp.linear_fc2.weight": (24, 13),
    LAYER + "mlp.router.weight": (3, 24),
    LAYER + "mlp.experts.linear_fc1.weight": (3, 2, 5, 24),
    LAYER + "mlp.experts.linear_fc2.weight": (3, 24, 5),
    LAYER + "mlp.shared_experts.gate_weight": (1, 24),
    "output_layer.weight": (40, 24),
}
MATRICES = {
    spec.name: spec.matrices
    for model in (MODEL, replace(MODEL, num_experts=3, moe_shared_expert_intermediate_size=8))
    for spec in parameter_table(replace(model, moe_shared_expert_gate=True), 40)
}
BY_MUON = {name for name in SHAPES if ".linear_" in name and name.endswith(".weight")}
GOLDEN = ROOT / "tests/golden/normuon.txt"
LR = 0.02
DECAY = 0.1
STEPS = 5


def parameters(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    params = []
    for name, shape in SHAPES.items():
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        params.append(torch.nn.Parameter(values.to(dtype)))
        params[-1].sharding = Sharding(name, shape, matrices=MATRICES[name])
    return params


def gradients(step: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step + 1)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for name, shape in SHAPES.items()
    }


def built(params: list[torch.nn.Parameter], **flags: object) -> MixedPrecisionOptimizer:
    config = MuonConfig(**{"muon_momentum": 0.95, **flags})
    muon = Muon(config, ParallelContext(ParallelConfig()))
    optimizer = OptimizerConfig(optimizer="muon", clip_grad=0.0)
    return MixedPrecisionOptimizer(params, optimizer, muon=muon)


def trained(dtype: torch.dtype, **flags: object) -> dict[str, torch.Tensor]:
    """The weights after some steps."""
    params = parameters(dtype)
    optimizer = built(params, **flags)
    for group in optimizer.param_groups:
        group["lr"] = LR
        group["weight_decay"] = DECAY * group["wd_mult"]
    for step in range(STEPS):
        for param, grad in zip(params, gradients(step, dtype).values(), strict=True):
            param.main_grad = grad.clone()
        optimizer.step()
    return {param.sharding.name: param.detach() for param in params}


def as_matrices(name: str, tensor: torch.Tensor, split: bool = True) -> list[torch.Tensor]:
    """The matrices of a weight, copied: of QKV two groups of two queries' heads, key and value."""
    if ".experts." in name:
        return [expert.reshape(-1, tensor.shape[-1]) for expert in tensor]
    if split and ".linear_qkv." in name:
        heads = tensor.view(2, 4, 6, 24)
        return [part.reshape(-1, 24) for part in (heads[:, :2], heads[:, 2], heads[:, 3])]
    return [tensor.reshape(-1, tensor.shape[-1])]


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(
    ("scale_mode", "extra", "adjust"),
    [("spectral", 0.2, "match_rms_adamw"), ("shape_scaling", 1.0, "original")],
)
def test_torch_updates_each_matrix_alike(nesterov, scale_mode, extra, adjust):
    """In bf16, as torch always does, and one matrix at a time, which torch's class wants."""
    found = trained(
        torch.float32,
        muon_use_nesterov=nesterov,
        muon_scale_mode=scale_mode,
        muon_extra_scale_factor=extra,
        muon_coefficient_type="simple",
        muon_fp32_matmul_prec="medium",
    )
    for param in parameters(torch.float32):
        name = param.sharding.name
        if name not in BY_MUON:
            continue
        expected = [torch.nn.Parameter(m.clone()) for m in as_matrices(name, param.detach())]
        theirs = torch.optim.Muon(
            expected,
            lr=LR,
            weight_decay=DECAY,
            momentum=0.95,
            nesterov=nesterov,
            adjust_lr_fn=adjust,
        )
        for step in range(STEPS):
            for matrix, grad in zip(
                expected, as_matrices(name, gradients(step, torch.float32)[name]), strict=True
            ):
                matrix.grad = grad.clone()
            theirs.step()
        firsts = as_matrices(name, param.detach())
        for ours, matrix, first in zip(
            as_matrices(name, found[name]), expected, firsts, strict=True
        ):
            # of five steps, each off by about 2^-6: torch rounds the norm to bf16, too
            assert torch.dist(ours, matrix) < 2.0**-5 * torch.dist(matrix, first)


MODES = {
    "spectral": lambda out, columns: max(out, columns),
    "unit_rms_norm": lambda out, columns: out / columns,
    "shape_scaling": lambda out, columns: max(1.0, out / columns),
}


def adapted(direction: torch.Tensor, moment: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """NorMuon's (direction of the norm that it had, moment [rows, 1] or [1, columns])."""
    longer = 1 if direction.shape[0] >= direction.shape[1] else 0
    moment = 0.9 * moment + 0.1 * (direction * direction).mean(longer, keepdim=True)
    divided = direction / moment.sqrt()
    return divided * (direction.norm() / divided.norm()), moment


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(
    ("mode", "neurons"), [*((mode, False) for mode in MODES), ("spectral", True)]
)
def test_an_update_of_singular_values_in_float64(mode, neurons, nesterov, split):
    """Newton-Schulz steps are a polynomial of the singular values; here it is evaluated on them.
    With NorMuon neurons have a second moment each: of tall, wide and square matrices, the experts'
    and those of QKV each by itself."""
    options = {"muon_neuron_beta2": 0.9} if neurons else {}
    options |= {"muon_use_nesterov": nesterov, "muon_scale_mode": mode, "muon_split_qkv": split}
    found = trained(torch.float64, **options)
    for param in parameters(torch.float64):
        name = param.sharding.name
        if name not in BY_MUON:
            continue
        weights = as_matrices(name, param.detach().clone(), split)
        momenta = [torch.zeros_like(weight) for weight in weights]
        moments = [torch.zeros(()).double()] * len(weights)
        for step in range(STEPS):
            grads = as_matrices(name, gradients(step, torch.float64)[name], split)
            for number, grad in enumerate(grads):
                momenta[number] = 0.95 * momenta[number] + 0.05 * grad
                update = 0.05 * grad + 0.95 * momenta[number] if nesterov else momenta[number]
                u, s, vh = torch.linalg.svd(update, full_matrices=False)
                s = s / s.square().sum().sqrt()
                for a, b, c in COEFFICIENTS["quintic"]:
                    s = a * s + b * s**3 + c * s**5
                direction = (u * s) @ vh
                if neurons:
                    direction, moments[number] = adapted(direction, moments[number])
                size = LR * math.sqrt(MODES[mode](*grad.shape))
                weights[number] = weights[number] * (1 - LR * DECAY) - size * direction
        for ours, weight in zip(as_matrices(name, found[name], split), weights, strict=True):
            torch.testing.assert_close(ours, weight, rtol=1e-10, atol=1e-10)


def values(shape: tuple[int, int], step: int) -> torch.Tensor:
    """Numbers of float32, the same on every machine."""
    n = torch.arange(math.prod(shape), dtype=torch.float64)
    return torch.sin(0.7 * n * n + 3 * step + shape[0]).view(shape).float().double()


@pytest.mark.parametrize("nesterov", [False, True])
def test_normuon_is_that_of_emerging_optimizers(nesterov):
    """A tall, a wide and a square matrix, which it updated in float32 (GOLDEN)."""
    lines = [line.split() for line in GOLDEN.read_text("utf-8").splitlines() if line[0] != "#"]
    expected = {
        tuple(map(int, shape.split("x"))): torch.tensor([float(word) for word in words]).double()
        for kind, shape, *words in lines
        if kind == ("nesterov" if nesterov else "momentum")
    }
    assert len(expected) == 3
    params = [torch.nn.Parameter(values(shape, 0)) for shape in expected]
    for number, (param, shape) in enumerate(zip(params, expected, strict=True)):
        param.sharding = Sharding(
            f"decoder.layers.{number}.mlp.linear_fc2.weight", shape, matrices=Matrices()
        )
    norm = torch.nn.Parameter(torch.ones(4, dtype=torch.float64))  # Adam needs something, too
    norm.sharding = Sharding("decoder.final_layernorm.weight", (4,))
    flags = {"muon_use_nesterov": nesterov, "muon_extra_scale_factor": 0.2}
    optimizer = built([*params, norm], muon_neuron_beta2=0.9, **flags)
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = LR, DECAY
    for step in range(1, STEPS + 1):
        for param, shape in zip(params, expected, strict=True):
            param.main_grad = values(shape, step)
        norm.main_grad = torch.zeros_like(norm)
        optimizer.step()
    for param, weights in zip(params, expected.values(), strict=True):
        torch.testing.assert_close(param.detach().flatten(), weights, rtol=0.0, atol=1e-6)


def test_a_neuron_without_gradients_stays():
    weights = torch.zeros(2, 4, 3)
    weights[0] = torch.eye(4)[:, :3]
    still = normalized(weights, neuron_moments(weights, torch.zeros(2, 4, 3), 0.9))
    assert torch.isfinite(still).all() and not still[0, 3].any() and not still[1].any()


def test_adam_updates_the_rest_as_by_itself():
    found = trained(torch.float64)
    params = [p for p in parameters(torch.float64) if p.sharding.name not in BY_MUON]
    decayed = {"embedding", "output_layer", "mlp.router", "shared_experts.gate"}
    groups = [
        {"params": [p], "weight_decay": DECAY * any(word in p.sharding.name for word in decayed)}
        for p in params
    ]
    adam = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.999), eps=1e-8)
    for step in range(STEPS):
        for param in params:
            param.grad = gradients(step, torch.float64)[param.sharding.name].clone()
        adam.step()
    for param in params:
        torch.testing.assert_close(found[param.sharding.name], param.detach(), rtol=1e-12, atol=0)


def test_the_state_of_a_matrix_is_its_momentum_and_adams_two_of_the_rest():
    tensors = built(parameters(torch.float32)).tensors()
    kinds = {
        kind: {name.split(".", 2)[2] for name in tensors if name.startswith(f"optimizer.{kind}.")}
        for kind in ("momentum_buffer", "exp_avg", "exp_avg_sq")
    }
    assert kinds["momentum_buffer"] == BY_MUON
    assert kinds["exp_avg"] == kinds["exp_avg_sq"] == SHAPES.keys() - BY_MUON


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_gradient_is_no_update(dtype):
    assert not orthogonalize(torch.zeros(2, 3, 4), COEFFICIENTS["simple"] * 5, dtype).any()


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("shape", [(48, 48), (32, 80), (80, 32)])
def test_in_bf16_a_matrix_is_as_orthogonal_as_in_float64(shape, size):
    """The five steps end with singular values from 0.69 to 1.14; bf16 has eight bits."""
    steps = COEFFICIENTS["quintic"]
    generator = torch.Generator().manual_seed(2)
    stack = torch.randn(3, *shape, generator=generator, dtype=torch.float64).float() * size
    found = orthogonalize(stack, steps, torch.bfloat16)
    exact = orthogonalize(stack.double(), steps, torch.float64)
    assert found.dtype == torch.bfloat16
    values = torch.linalg.svdvals(found.double())
    assert values.min() > 0.65 and values.max() < 1.18
    apart = torch.linalg.matrix_norm(found.double() - exact) / torch.linalg.matrix_norm(exact)
    assert 2.0**-12 < apart.max() < 2.0**-5


class Products(TorchDispatchMode):
    """Counts the matrix products, and the dtypes that they have."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func._overloadpacket in (torch.ops.aten.bmm, torch.ops.aten.baddbmm):
            self.calls += 1
            self.dtypes.add(result.dtype)
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("groups", "batches"), [(4, 1), (2, 2), (1, 2)])
def test_queries_keys_and_values_of_one_shape_are_one_batch(groups, batches, dtype):
    """Three products in a step, of one batch where there are as many keys as queries, of two
    elsewhere; the numbers are those of each matrix by itself."""
    muon = Muon(MuonConfig(), ParallelContext(ParallelConfig()))
    per_group = 4 // groups
    shape = (groups * (per_group + 2) * 6, 24)
    generator = torch.Generator().manual_seed(3)
    updates = [torch.randn(shape, generator=generator, dtype=dtype) for _ in range(2)]
    matrices = Matrices(parts=(per_group * 6, 6, 6))
    name = LAYER + "self_attention.linear_qkv.weight"
    kind = muon.kind(Sharding(name, shape, matrices=matrices), shape[0] * 24)
    with Products() as products:
        (found,) = muon.directions(kind, updates)
    assert products.calls == 3 * 5 * batches
    for update, direction in zip(updates, found, strict=True):
        split = [tensor.view(groups, per_group + 2, 6, 24) for tensor in (update, direction)]
        for heads in (slice(per_group), slice(per_group, per_group + 1), slice(-1, None)):
            alone, together = (tensor[:, heads].reshape(1, -1, 24) for tensor in split)
            expected = orthogonalize(alone, COEFFICIENTS["quintic"], dtype)
            expected = expected * math.sqrt(max(expected.shape[-2:]))
            torch.testing.assert_close(together, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("device", "dtype", "flag", "expected"),
    [
        ("cuda:0", torch.float32, None, torch.bfloat16),
        ("cuda:0", torch.float32, "highest", torch.float32),
        ("cuda:0", torch.float32, "high", torch.float32),
        ("cuda:0", torch.float64, None, torch.float64),
        ("cpu", torch.float32, None, torch.float32),
        ("cpu", torch.float32, "medium", torch.bfloat16),
    ],
)
def test_products_are_in_bf16_on_cuda(device, dtype, flag, expected):
    """Of tensors without memory, which any machine has; what they compute in is seen on a CPU."""
    config = MuonConfig(muon_fp32_matmul_prec=flag)
    muon = Muon(config, ParallelContext(ParallelConfig()))
    with FakeTensorMode():
        assert muon.product_dtype(torch.empty(2, 4, 6, device=device, dtype=dtype)) == expected
    if device == "cpu":
        with Products() as products:
            muon.scaled(torch.empty(2, 4, 6, dtype=dtype))
        assert products.calls == 15 and products.dtypes == {expected}


@pytest.mark.parametrize("shape", [(16, 16), (8, 40), (40, 8), (24, 32)])
def test_costs_are_the_multiplications_of_a_step(shape):
    with FlopCounterMode(display=False) as counter:
        orthogonalize(torch.randn(3, *shape), [(1.0, 1.0, 1.0)], torch.float32)
    assert counter.get_total_flops() == 2 * Stack(3, *shape).cost


def test_the_matrices_of_a_weight():
    for name, shape in SHAPES.items():
        each = stacks(MuonConfig(), MATRICES[name], shape)
        assert bool(each) == (name in BY_MUON)
        expected = [m.shape for m in as_matrices(name, torch.empty(shape))] if each else []
        assert [(s.rows, s.columns) for s in each for _ in range(s.number)] == expected
