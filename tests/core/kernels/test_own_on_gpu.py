"""This suite's own kernels on a CUDA device against float64 on the CPU. On a CPU the bodies pass with
DEVICE = "cpu", or are skipped."""

import pytest
import torch

from megatron.config.parallel import ParallelConfig
from megatron.config.precision import PrecisionConfig
from megatron.kernels.cross_entropy import cross_entropy
from megatron.kernels.cu_seqlens import with_lengths
from megatron.kernels.fp8 import (
    grouped_linear_fp8,
    linear_fp8,
    native_gemm,
    quantize,
    scale_of,
)
from megatron.kernels.kernels import Kernels
from megatron.parallel.attention_blocks import block_attention, block_attention_grads
from megatron.parallel.context import ParallelContext
from megatron.parallel.fp8 import LayerScaling, delayed_scaling
from tests.core.kernels import functional
from tests.core.kernels.attend import attention
from tests.core.kernels.attend import block as make_block
from tests.core.kernels.attention_formula import documents, formula, inputs
from tests.core.model.tiny import MODELS, SEEDS, tiny_model, tokens

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}
SHAPE = {"s": 256, "n": 8, "g": 2, "d": 64}


def close(got: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    """Up to what `dtype` allows, relative to the largest number."""
    apart = (got.detach().cpu().double() - wanted.detach()).abs().max()
    assert apart <= TOLERANCE[dtype] * max(1.0, wanted.abs().max().item())


def on_device(tensors, dtype: torch.dtype) -> list[torch.Tensor]:
    """Copies of float64 tensors, k and v of them views of one tensor with larger strides."""
    q, k, v = (t.detach().to(DEVICE, dtype) for t in tensors)
    both = torch.stack((k, v), dim=3).requires_grad_()
    return [q.requires_grad_(), *both.unbind(3)]


@pytest.mark.parametrize("with_documents", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_attention_of_split_views(dtype, with_documents):
    """Grouped queries; documents are runs here, as flash kernels need them."""
    q, k, v, grad = inputs(**SHAPE)
    ids = documents(256)[:1].expand(2, -1).contiguous() if with_documents else None
    wanted = formula(q, k, v, ids)
    grads = torch.autograd.grad(wanted, (q, k, v), grad)
    ours = on_device((q, k, v), dtype)
    device_ids = None if ids is None else with_lengths(ids.to(DEVICE), ids)
    got = attention(*ours, scale=0.3, document_ids=device_ids)
    close(got, wanted, dtype)
    for one, expected in zip(
        torch.autograd.grad(got, ours, grad.to(DEVICE, dtype)), grads, strict=True
    ):
        close(one, expected, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_dropout_is_a_function_of_its_seed(dtype):
    q, k, v, grad = inputs(**SHAPE)
    ours = on_device((q, k, v), dtype)

    def call(seed: int) -> torch.Tensor:
        return attention(*ours, scale=0.3, dropout_p=0.2, dropout_seed=seed)

    first, again, other = call(1), call(1), call(2)
    assert torch.equal(first, again) and not torch.equal(first, other)
    # linear in v, with the same mask in backward
    grad = grad.to(DEVICE, dtype)
    (grad_v,) = torch.autograd.grad(first, ours[2], grad)
    forward = (first.double() * grad.double()).sum()
    backward = (ours[2].double() * grad_v.double()).sum()
    assert abs(forward - backward) <= 0.02 * (first.double() * grad.double()).abs().sum() ** 0.5 + 1
    mean = torch.stack([call(seed).double() for seed in range(64)]).mean(0).cpu()
    wanted = formula(q, k, v).detach()
    assert (mean - wanted).abs().mean() < 0.15 * wanted.abs().mean()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_block_of_ring_attention(dtype, causal):
    q, k, v, grad = (t.detach() for t in inputs(**SHAPE))
    exact = make_block(q, k, v, 0.3, causal=causal)
    wanted, wanted_lse = block_attention(q, k, v, exact)
    ours = [t.to(DEVICE, dtype) for t in (q, k, v)]
    block = make_block(*ours, 0.3, causal=causal)
    out, lse = block_attention(*ours, block)
    close(out, wanted, dtype)
    close(lse, wanted_lse, dtype)
    delta = (wanted * grad).sum(-1)
    expected = block_attention_grads((q, k, v), grad, wanted, wanted_lse, delta, exact)
    device_delta = (out.float() * grad.to(DEVICE)).sum(-1).to(lse.dtype)
    found = block_attention_grads(
        tuple(ours), grad.to(DEVICE, dtype), out, lse, device_delta, block
    )
    for one, each in zip(found, expected, strict=True):
        close(one, each, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_cross_entropy(dtype):
    generator = torch.Generator().manual_seed(1)
    logits = (3 * torch.randn(300, 1040, generator=generator)).to(dtype)
    labels = torch.randint(1000, (300,), generator=generator)
    reference = logits.double()[:, :1000].requires_grad_()
    wanted = torch.nn.functional.cross_entropy(reference, labels, reduction="none")
    wanted.sum().backward()
    leaf = logits.to(DEVICE).requires_grad_()
    got = cross_entropy(leaf * 1, labels.to(DEVICE), vocab_size=1000)
    close(got, wanted, torch.float32)
    got.sum().backward()
    close(leaf.grad[:, :1000], reference.grad, dtype)
    assert leaf.grad[:, 1000:].count_nonzero() == 0


def test_hidden_dropout():
    x = torch.ones(1 << 20, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    y, again, other = (functional.dropout(x, 0.1, seed) for seed in (1, 1, 2))
    assert torch.equal(y, again) and not torch.equal(y, other)
    assert (y != 0).double().mean().item() == pytest.approx(0.9, abs=2e-3)
    y.backward(torch.ones_like(y))
    assert torch.equal(x.grad, y.detach())


def test_masks_are_philox():
    """As by the interpreter on a CPU, which cannot run the instruction that multiplies here."""
    from tests.core.kernels.cuda.interpreted import philox

    if DEVICE == "cpu":
        pytest.skip("needs a GPU")  # masks of our CUDA kernel
    x = torch.ones(100_000, device=DEVICE, dtype=torch.bfloat16)
    for seed in (7, 2**62 + 5, 2**33):
        got = functional.dropout(x, 0.1, seed, torch.zeros_like(x)).cpu()
        assert torch.equal(got != 0, philox(seed, torch.arange(len(x))) >= 0.1)


def of_a_sum(call, tensors: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """The result and the gradients of its sum with weights, for tensors of this dtype."""
    leaves = [t.detach().to(dtype).requires_grad_() for t in tensors]
    out = call(*leaves)
    weights = torch.rand(out.shape, generator=torch.Generator().manual_seed(2)).bfloat16()
    return [out, *torch.autograd.grad(out, leaves, weights.to(out))]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm", "linear"])
@pytest.mark.parametrize("width", [128, 768, 5120])
def test_sums_of_many_rows(width, name, dtype):
    call = {
        "LayerNorm": lambda x, w, b: functional.layer_norm(x, w, b, 1e-5),
        "RMSNorm": lambda x, w, b: functional.rms_norm(x, w, 1e-5) + b,
        "linear": lambda x, w, b: functional.linear(x[:, :8], w[:, None].repeat(1, 8), b),
    }[name]
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(4099, width, generator=generator).to(dtype)]
    tensors += [torch.randn(width, generator=generator).to(dtype) for _ in range(2)]
    wanted = of_a_sum(call, tensors, torch.float64)
    got = of_a_sum(call, [t.to(DEVICE) for t in tensors], dtype)
    for one, two in zip(got, wanted, strict=True):
        close(one, two, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dim, batch_first", [(64, False), (24, True)])
def test_rotary_positions(dim, batch_first, interleaved, dtype):
    """Of a view of queries, keys and values, all of a head or a part of it."""
    tables = functional.rotary_tables(300, dim)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(300, 3, 4, 192, generator=generator).to(dtype)

    def call(x: torch.Tensor) -> torch.Tensor:
        cos, sin = (t.to(x.device) for t in tables)
        part = x[..., 64:128]
        return functional.apply_rotary(part, cos, sin, interleaved, batch_first=batch_first)

    wanted = of_a_sum(call, [x], torch.float64)
    for one, two in zip(of_a_sum(call, [x.to(DEVICE)], dtype), wanted, strict=True):
        close(one, two, dtype)


@pytest.mark.parametrize("formats", [("e4m3fn", "e4m3fn"), ("e5m2", "e4m3fn")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fp8_gemm(dtype, formats):
    generator = torch.Generator().manual_seed(1)
    one = scale_of(torch.tensor(448.0, device=DEVICE), None, 448.0).inverse
    a, b = (
        quantize(
            torch.randn(rows, 64, generator=generator).to(DEVICE),
            getattr(torch, f"float8_{name}"),
            one,
        )
        for rows, name in zip((32, 48), formats, strict=True)
    )
    wanted = a.cpu().double() @ b.cpu().double().t()
    got = native_gemm(a, b, one, one, dtype).cpu().double()
    # Hopper's FP8 units sum with about 14 bits: 1.5e-4 of the largest on an H200
    share = 2.0**-11 if dtype == torch.float32 else TOLERANCE[dtype]
    assert (got - wanted).abs().max() <= share * wanted.abs().max()


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "tensorwise, compiled"])
@pytest.mark.parametrize("grouped", [False, True])
def test_fp8_layers(grouped, recipe):
    """Two steps against the same casts on a CPU, with another history in the second."""
    precision = PrecisionConfig(fp8="hybrid", fp8_recipe=recipe.partition(",")[0])
    found = [fp8_steps(torch.device(d), precision, grouped, recipe) for d in (DEVICE, "cpu")]
    for got, wanted in zip(*found, strict=True):
        close(got, wanted.double(), torch.bfloat16)


def fp8_steps(
    device: torch.device, precision: PrecisionConfig, grouped: bool, recipe: str
) -> list[torch.Tensor]:
    """Results and gradients of two steps of a layer."""
    layer = torch.nn.Module()
    layer.scaling = LayerScaling("one", precision, ParallelContext(ParallelConfig()), device)
    delayed = delayed_scaling(layer, precision, ParallelContext(ParallelConfig()))
    call = grouped_linear_fp8 if grouped else linear_fp8
    if "compiled" in recipe and device.type != "cpu":
        call = torch.compile(call)
    more = ([40, 0, 56],) if grouped else ()
    generator = torch.Generator().manual_seed(1)
    found = []
    for step in (1, 2):
        x, weight, grad = (
            (step * torch.randn(shape, generator=generator)).to(device, torch.bfloat16)
            for shape in ((96, 64), (3, 32, 64) if grouped else (32, 64), (96, 32))
        )
        x.requires_grad_()
        weight.requires_grad_()
        out = call(x, weight, *more, scaling=layer.scaling)
        found += [out, *torch.autograd.grad(out, (x, weight), grad)]
        if delayed:
            delayed.step(updated=True)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weight_gradients_add_up_in_fp32(dtype):
    generator = torch.Generator().manual_seed(1)
    x, grad = (torch.randn(64, n, generator=generator).to(DEVICE, dtype) for n in (48, 32))
    weight = torch.randn(32, 48, generator=generator).to(DEVICE, dtype).requires_grad_()
    total = torch.full((32, 48), 2.0**-10, device=DEVICE)
    for _ in range(2):
        functional.linear(x, weight, accumulate_into=total).backward(grad)
    close(total, 2 * grad.cpu().double().t() @ x.cpu().double() + 2.0**-10, dtype)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("flags", MODELS.values(), ids=MODELS)
def test_a_model(flags, dtype, compiled):
    """Fused kernels of RoPE, SwiGLU and norms, and the compiler's, with hidden dropout off."""
    shape = {"hidden_size": 256, "num_attention_heads": 4, **flags}
    model = tiny_model(dtype, kernels=Kernels(), scramble=True, **shape)
    reference = tiny_model(torch.float64, **shape)
    with torch.no_grad():
        for p, q in zip(reference.parameters(), model.parameters(), strict=True):
            p.copy_(q)
    ids, labels = tokens()
    wanted = reference(ids, labels=labels)[0]
    wanted.mean().backward()
    model = model.to(DEVICE)
    if compiled:
        for layer in model.decoder.layers.values():
            layer.compile(dynamic=False)
    losses = model(ids.to(DEVICE), labels=labels.to(DEVICE))[0]
    close(losses, wanted, dtype)
    losses.mean().backward()
    # a bias of keys changes nothing: its gradient is 0
    least = 0.01 * torch.stack([q.grad.norm() for q in reference.parameters()]).max()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        apart = (p.grad.cpu().double() - q.grad).norm() / torch.maximum(q.grad.norm(), least)
        assert apart < 5 * TOLERANCE[dtype], p.sharding.name


def test_hidden_dropout_of_a_model_repeats():
    model = tiny_model(torch.bfloat16, hidden_dropout=0.2, attention_dropout=0.2).to(DEVICE)
    ids, labels = (t.to(DEVICE) for t in tokens())
    found = [model(ids, labels=labels, dropout_seeds=SEEDS)[0] for _ in range(2)]
    assert torch.equal(*found)
