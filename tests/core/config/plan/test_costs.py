"""Formulas for activations against the memory that real models hold between forward and backward;
cases done by hand."""

import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.arguments import config_from
from megatron.config.plan import costs
from megatron.config.plan.plan import make_plan
from megatron.config.tree import Config
from megatron.kernels import cross_entropy
from megatron.kernels.cpu import experts
from megatron.model.blocks.module import RouterStep
from megatron.parallel.context import ParallelContext
from megatron.training.build import build_model
from megatron.training.launch.initialize import Runtime
from tests.forkrun import run_ranks

BASE = dict(
    num_layers=4,
    hidden_size=64,
    num_attention_heads=4,
    seq_length=64,
    max_position_embeddings=64,
    micro_batch_size=2,
    global_batch_size=16,
    train_iters=10,
    lr=0.01,
    vocab_size=500,
    mock_data=True,
    make_vocab_size_divisible_by=8,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    device="cpu",
)
LLAMA = dict(
    swiglu=True,
    normalization="RMSNorm",
    position_embedding_type="rope",
    add_bias_linear=False,
    group_query_attention=True,
    num_query_groups=2,
    untie_embeddings_and_output_weights=True,
    ffn_hidden_size=176,
)
FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
WITHIN = 0.02  # of the measured bytes


def planned(world: int = 1, **flags):
    config = config_from(Config, BASE | flags)
    return config, make_plan(config, world, 500)


class Live(TorchDispatchMode):
    """Notes every piece of memory that an operation gives back; `nbytes` are those that still
    live."""

    def __init__(self):
        super().__init__()
        self.seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                known = self.seen.get(storage._cdata)
                if known is None or known[0].expired():
                    self.seen[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    def nbytes(self, without: list[torch.Tensor]) -> int:
        """Of live memory that is not that of these tensors."""
        gc.collect()
        known = {tensor.untyped_storage()._cdata for tensor in without}
        return sum(
            size for key, (ref, size) in self.seen.items() if key not in known and not ref.expired()
        )


def measured(rank: int, world: int, flags: dict, steps_of_rows: bool = True) -> int:
    """Bytes that this rank's model holds after forward for one micro-batch, beside weights, tokens
    and labels."""
    from megatron.kernels import rows
    from megatron.kernels.cpu import native

    config, plan = planned(world, **flags)
    if not steps_of_rows:  # torch's own kernels, as on other devices
        rows.pays_off = lambda spec: False
        native.load = lambda capability: "not built"
    runtime = Runtime(
        torch.device("cpu"), ParallelContext(config.parallel, world, rank), world, rank
    )
    (model,), _ = build_model(config, plan, runtime)
    ids = torch.randint(0, 500, (2, 65), generator=torch.Generator().manual_seed(1))
    tokens = ids[:, :-1].contiguous()
    labels = ids[:, 1:].contiguous()
    # a capacity drops tokens where there is a step
    dropping = RouterStep(None, None) if config.model.moe_expert_capacity_factor else None
    with Live() as live:
        loss = model(tokens, labels=labels, router_step=dropping)
    assert loss.requires_grad
    return live.nbytes([tokens, labels, *model.parameters(), *model.buffers()])


def formula(world: int = 1, **flags) -> int:
    config, plan = planned(world, **flags)
    return (
        costs.embedding_activations(config, plan)
        + costs.chunk_activations(config, plan, range(4))
        + costs.Sizes(config, plan).head()
        + costs.fp8_weights(config, plan, 0)
    )


MODELS = {
    "gelu": {},
    "gelu, bf16": dict(bf16=True),
    "relu squared, fp64": dict(squared_relu=True, fp64=True),
    "8 bits": dict(bf16=True, fp8="hybrid"),
    "dropout": dict(hidden_dropout=0.1, attention_dropout=0.1),
    "swiglu, rope, RMSNorm, GQA": LLAMA,
    "the same, bf16, fp32 residual": LLAMA | dict(bf16=True, fp32_residual_connection=True),
    "geglu, GQA": dict(geglu=True, group_query_attention=True, num_query_groups=2),
    "norms of queries and keys": dict(
        qk_layernorm=True, group_query_attention=True, num_query_groups=2
    ),
    "rotary and norms of queries and keys": LLAMA | dict(qk_layernorm=True),
    "xielu": dict(xielu=True),
    "norms of OLMo 2": LLAMA
    | dict(
        no_pre_layernorm=True,
        post_self_attn_layernorm=True,
        post_mlp_layernorm=True,
        qk_layernorm=True,
        qk_layernorm_all_heads=True,
    ),
    "windows": dict(window_size=(7, 0)),
    "windows, bf16": LLAMA | dict(window_size=(7, 0), window_attn_skip_freq="2", bf16=True),
    "windows, fp64": dict(window_size=(7, 0), fp64=True),
    "windows, torch's fused attention": dict(window_size=(7, 0), attention_backend="fused"),
    "one matrix of scores": dict(attention_backend="unfused"),
    "one matrix of scores, GQA": LLAMA | dict(masked_softmax_fusion=False),
    "nothing fused": LLAMA
    | dict(attention_backend="local", bias_swiglu_fusion=False, apply_rope_fusion=False),
    "norm weights minus one": dict(apply_layernorm_1p=True, bf16=True),
}
MOE = LLAMA | dict(
    num_experts=8,
    moe_ffn_hidden_size=64,
    moe_shared_expert_intermediate_size=96,
    add_bias_linear=False,
    moe_aux_loss_coeff=(0.01,),
)
SELECTIVE = dict(recompute_granularity="selective")
EXPERTS = {
    "experts": MOE,
    "experts, 8 bits": MOE | dict(bf16=True, fp8="hybrid"),
    "experts, capacity": MOE | dict(moe_expert_capacity_factor=0.5),
    "experts, moe recomputed": MOE | SELECTIVE | dict(recompute_modules=("moe",)),
    "experts, activation recomputed": MOE | SELECTIVE | dict(recompute_modules=("moe_act",)),
    "experts, shared expert recomputed": MOE
    | SELECTIVE
    | dict(recompute_modules=("shared_experts", "core_attn")),
}
RECOMPUTE = {
    "MLP": SELECTIVE | dict(recompute_modules=("mlp",)),
    "selective": dict(recompute_granularity="selective"),
    "full": FULL,
    "full, 2 layers": FULL | dict(recompute_num_layers=2),
    "full, 3 layers": FULL | dict(recompute_num_layers=3),
    "full, block": FULL | dict(recompute_method="block"),
}


@pytest.mark.parametrize(
    "flags",
    [*MODELS.values(), *RECOMPUTE.values(), *EXPERTS.values()],
    ids=[*MODELS, *RECOMPUTE, *EXPERTS],
)
def test_a_model_holds_what_the_formula_says(flags):
    reason = experts.unavailable_reason(torch.device("cpu"), torch.float32)
    if "num_experts" in flags and reason:
        pytest.skip(reason)
    held = measured(0, 1, flags)
    assert formula(**flags) == pytest.approx(held, rel=WITHIN)
    if "recompute_modules" in flags:
        kept = {name: value for name, value in flags.items() if "recompute" not in name}
        assert held < measured(0, 1, kept)


@pytest.mark.parametrize(
    "flags",
    [LLAMA | dict(normalization="LayerNorm", bias_swiglu_fusion=False), dict(geglu=True)],
    ids=["swiglu, rope", "geglu"],
)
def test_torchs_own_kernels_hold_more(flags):
    """The formula of another device than the CPU, whose kernels these are (but for RMSNorm, which
    torch fuses there, and SwiGLU, which is one kernel of Triton there unless disabled)."""
    (held,) = run_ranks(1, measured, flags, False)
    assert formula(**flags | dict(device="auto")) == pytest.approx(held, rel=WITHIN)
    fused = flags | dict(bias_swiglu_fusion=True)
    assert formula(**flags | dict(device="auto")) > formula(**fused) or "geglu" in flags


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(
    "flags",
    [{}, LLAMA, LLAMA | FULL, RECOMPUTE["selective"]],
    ids=["gelu", "llama", "llama, full recompute", "selective recompute"],
)
def test_tensor_parallel_ranks_hold_what_the_formula_says(flags, sequence_parallel):
    flags = flags | dict(tensor_model_parallel_size=2, sequence_parallel=sequence_parallel)
    for held in run_ranks(2, measured, flags):
        assert formula(2, **flags) == pytest.approx(held, rel=WITHIN)


def test_the_loss_takes_blocks_of_the_planned_size():
    assert costs.LOSS_BLOCKS == (cross_entropy.CHUNK_ELEMENTS, cross_entropy.LAUNCH_ELEMENTS)
