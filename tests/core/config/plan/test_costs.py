"""Formulas for activations against the memory that real models hold between forward and backward;
cases done by hand."""

import gc

import pytest
import torch

from megatron import host
from megatron.arguments import config_from
from megatron.config.plan import costs
from megatron.config.plan.plan import make_plan
from megatron.config.tree import Config
from megatron.kernels import cross_entropy
from megatron.kernels.cpu import experts
from megatron.model.blocks.module import RouterStep
from megatron.model.blocks.mtp.module import Depths, rolled
from megatron.parallel.context import ParallelContext
from megatron.parallel.zigzag import my_chunks
from megatron.training.build import build_model
from megatron.training.launch.initialize import Runtime
from tests.forkrun import run_ranks
from tests.live_memory import LiveMemory

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
MLA = LLAMA | dict(
    group_query_attention=False,
    num_query_groups=1,
    multi_latent_attention=True,
    q_lora_rank=48,
    kv_lora_rank=32,
    qk_head_dim=16,
    qk_pos_emb_head_dim=8,
    v_head_dim=12,
    qk_layernorm=True,
)
DELTA = LLAMA | dict(
    experimental_attention_variant="gated_delta_net",
    linear_attention_freq="[1,1,1,1]",
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=24,
    linear_value_head_dim=16,
)
FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
WITHIN = 0.02  # of the measured bytes


def planned(world: int = 1, **flags):
    config = config_from(Config, BASE | flags)
    return config, make_plan(config, world, 500)


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
    positions = torch.arange(64).expand(2, -1)
    cut = (my_chunks(part, runtime.ctx.cp) for part in (ids[:, :-1], ids[:, 1:], positions))
    tokens, labels, positions = (part.contiguous() for part in cut)
    # a capacity drops tokens where there is a step
    dropping = RouterStep(None, None) if config.model.moe_expert_capacity_factor else None
    depths = None
    if config.model.mtp_num_layers:
        rows_of_depths = rolled(tokens, labels, None, None, config.model.mtp_num_layers)
        depths = Depths([(row, 0.1) for row in rows_of_depths])
    told = {} if runtime.ctx.cp.size == 1 else {"position_ids": positions}
    gc.disable()  # all that is made stays young: nothing older need be searched
    try:
        with LiveMemory() as memory:
            loss = model(tokens, labels=labels, router_step=dropping, depths=depths, **told)
    finally:
        gc.enable()
    assert loss.requires_grad
    gc.collect(1)
    return memory.live()


def formula(world: int = 1, **flags) -> int:
    return costs.activations(*planned(world, **flags), 0).after_forward


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
    "norms of rotated queries and keys": LLAMA
    | dict(qk_layernorm=True, qk_layernorm_after_rope=True),
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
    "sinks": dict(softmax_type="learnable"),
    "sinks, bf16": LLAMA | dict(softmax_type="learnable", bf16=True),
    "sinks, fp64": dict(softmax_type="off-by-one", fp64=True),
    "caps": LLAMA | dict(attn_logit_softcapping=5.0, final_logit_softcapping=3.0),
    "caps, bf16": dict(attn_logit_softcapping=5.0, final_logit_softcapping=3.0, bf16=True),
    "sinks and caps, one matrix of scores": dict(
        softmax_type="learnable", attn_logit_softcapping=5.0, attention_backend="unfused"
    ),
    "one matrix of scores": dict(attention_backend="unfused"),
    "one matrix of scores, GQA": LLAMA | dict(masked_softmax_fusion=False),
    "nothing fused": LLAMA
    | dict(attention_backend="local", bias_swiglu_fusion=False, apply_rope_fusion=False),
    "gpt-oss' MLP": dict(quick_geglu=True, activation_func_clamp_value=7.0, bf16=True),
    "a clamp": LLAMA | dict(activation_func_clamp_value=7.0, add_bias_linear=False),
    "norms around blocks": LLAMA
    | dict(post_self_attn_layernorm=True, post_mlp_layernorm=True, apply_layernorm_1p=True)
    | dict(embedding_multiplier=8.0),
    "norm weights minus one": dict(apply_layernorm_1p=True, bf16=True),
    "latent attention": MLA,
    "latent attention, bf16": MLA | dict(bf16=True),
    "latent attention, LayerNorm, queries of hidden states": MLA
    | dict(q_lora_rank=None, normalization="LayerNorm"),
    "latent attention without norms": MLA | dict(qk_layernorm=False),
    "gated delta nets": DELTA,
    "gated delta nets, bf16": DELTA | dict(bf16=True, linear_attention_freq="[1,0,1,1]"),
    "output gates": LLAMA | dict(attention_output_gate=True),
    "output gates, norms, bf16": LLAMA
    | dict(attention_output_gate=True, qk_layernorm=True, bf16=True),
    "output gates, no positions": dict(attention_output_gate=True),
    "a pattern of blocks": LLAMA | dict(hybrid_layer_pattern="*--*"),
    "multi-token prediction": LLAMA | dict(mtp_num_layers=2),
    "multi-token prediction, LayerNorm, bf16": dict(
        mtp_num_layers=1, position_embedding_type="rope", bf16=True
    ),
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
    "experts, biases": MOE
    | dict(quick_geglu=True, swiglu=False, add_mlp_bias=True, glu_linear_offset=1.0),
    "experts, biases, bf16": MOE
    | dict(quick_geglu=True, swiglu=False, add_mlp_bias=True, bf16=True),
    "experts, 8 bits": MOE | dict(bf16=True, fp8="hybrid"),
    "a pattern of blocks with experts": MOE
    | dict(hybrid_layer_pattern="*E-E", moe_shared_expert_gate=True),
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
    "latents": MLA | SELECTIVE | dict(recompute_modules=("mla_up_proj",)),
    "latents and core": MLA | SELECTIVE | dict(recompute_modules=("mla_up_proj", "core_attn")),
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
def test_a_model_holds_what_the_formula_says(flags, monkeypatch):
    """The plan is that of any processor: with the copies of tokens in bf16, which the C++ of those
    with AVX512_BF16 does without."""
    multiplies = experts.multiplies
    monkeypatch.setattr(
        experts, "multiplies", lambda x, *more: x.dtype == torch.float32 and multiplies(x, *more)
    )
    reason = experts.unavailable_reason(torch.device("cpu"), torch.float32)
    if "num_experts" in flags and reason:
        pytest.skip(reason)
    held = measured(0, 1, flags)
    assert formula(**flags) == pytest.approx(held, rel=WITHIN)
    if "recompute_modules" in flags:
        kept = {name: value for name, value in flags.items() if "recompute" not in name}
        assert held < measured(0, 1, kept)


FROZEN = [
    ({}, "decoder.layers.*.self_attention.*"),
    ({}, "decoder.layers.2.*"),
    ({}, "embedding.*"),
    ({}, "decoder.final_layernorm.*"),
    (LLAMA, "decoder.layers.*.mlp.*"),
    (LLAMA, "embedding.*"),
    (LLAMA | dict(bf16=True), "decoder.layers.2.*"),
    (LLAMA | dict(bf16=True), "embedding.*"),
    (MLA, "decoder.layers.*.self_attention.*"),
    (DELTA, "decoder.layers.2.*"),
    (MOE, "decoder.layers.1.*"),
    (LLAMA | dict(mtp_num_layers=2), "decoder.layers.2.*"),
    (RECOMPUTE["full"], "decoder.layers.2.*"),
    (RECOMPUTE["full, block"], "decoder.layers.2.*"),
]


@pytest.mark.parametrize(("flags", "glob"), FROZEN)
def test_a_model_with_frozen_parts_holds_less(flags, glob):
    """Nothing of what comes before all that is trained, and no input of a frozen matrix."""
    reason = experts.unavailable_reason(torch.device("cpu"), torch.float32)
    if "num_experts" in flags and reason:
        pytest.skip(reason)
    some = flags | dict(train_only=(glob,))
    held = measured(0, 1, some)
    assert formula(**some) == pytest.approx(held, rel=0.03)
    assert formula(**some) < 0.95 * formula(**flags) or "recompute_method" in flags


def test_a_stage_whose_input_has_a_gradient_holds_all():
    """What is frozen on the first of two stages holds nothing, on the second all but inputs."""
    flags = dict(pipeline_model_parallel_size=2, train_only=("decoder.layers.3.*",))
    first, second = (
        costs.activations(*planned(2, **flags), stage).after_forward for stage in range(2)
    )
    full = dict(pipeline_model_parallel_size=2)
    assert first < 0.1 * costs.activations(*planned(2, **full), 0).after_forward
    assert second > 0.8 * costs.activations(*planned(2, **full), 1).after_forward


@pytest.mark.parametrize(
    "flags",
    [LLAMA | dict(normalization="LayerNorm", bias_swiglu_fusion=False), dict(geglu=True)],
    ids=["swiglu, rope", "geglu"],
)
def test_torchs_own_kernels_hold_more(flags):
    """The formula of another device than the CPU, whose kernels these are (but for RMSNorm, which
    torch fuses there, and SwiGLU, which is one kernel of Triton there unless disabled)."""
    (held,) = run_ranks(1, measured, flags, False)
    assert formula(**flags | dict(device="cuda")) == pytest.approx(held, rel=WITHIN)
    fused = flags | dict(bias_swiglu_fusion=True)
    assert formula(**flags | dict(device="cuda")) > formula(**fused) or "geglu" in flags


@pytest.mark.parametrize(
    ("flags", "gpu", "on_cpu"),
    [
        ({}, False, True),
        ({}, True, False),
        (dict(device="cpu"), True, True),
        (dict(world_size=8), False, False),
        (dict(device_memory=80.0), False, False),
    ],
)
def test_a_plan_is_of_the_device_that_a_run_here_would_have(monkeypatch, flags, gpu, on_cpu):
    monkeypatch.setattr(host, "shows_accelerator", lambda: gpu)
    assert config_from(Config, flags).training.on_cpu == on_cpu


@pytest.mark.parametrize(
    ("flags", "sequence_parallel"),
    [
        ({}, False),
        (LLAMA, True),
        (LLAMA | FULL, True),
        (LLAMA | dict(attention_output_gate=True), True),
        (RECOMPUTE["selective"], False),
        (MLA, True),
        (DELTA, True),
        (MLA, False),
        (RECOMPUTE["latents"], True),
        (LLAMA | dict(mtp_num_layers=2), False),
        (LLAMA | FULL | dict(mtp_num_layers=2), True),
    ],
)
def test_tensor_parallel_ranks_hold_what_the_formula_says(flags, sequence_parallel):
    flags = flags | dict(tensor_model_parallel_size=2, sequence_parallel=sequence_parallel)
    for held in run_ranks(2, measured, flags):
        assert formula(2, **flags) == pytest.approx(held, rel=WITHIN)


BY_HEADS = {
    name: MODELS[name]
    for name in ("gelu", "norms of queries and keys", "norms of rotated queries and keys")
} | {
    "sinks, fp64": MODELS["sinks, fp64"],
    "one group, rope": LLAMA | dict(num_query_groups=1),
    "windows": LLAMA | dict(window_size=(7, 0)),
    "bf16": LLAMA | dict(bf16=True),
    "selective": LLAMA | RECOMPUTE["selective"],
    "full": FULL,
    "output gates": LLAMA | dict(attention_output_gate=True),
    "mla": MLA,
    "latents and core": RECOMPUTE["latents and core"],
}


@pytest.mark.parametrize("comm_type", ["a2a", "p2p"])
@pytest.mark.parametrize(
    "name",
    [
        name if name == "mla" else pytest.param(name, marks=pytest.mark.campaign)
        for name in BY_HEADS
    ],
)
def test_context_parallel_ranks_hold_what_the_formula_says(name, comm_type):
    flags = BY_HEADS[name] | dict(context_parallel_size=2, cp_comm_type=(comm_type,))
    for held in run_ranks(2, measured, flags):
        assert formula(2, **flags) == pytest.approx(held, rel=WITHIN)


def test_the_loss_takes_blocks_of_the_planned_size():
    assert costs.LOSS_BLOCKS == (cross_entropy.CHUNK_ELEMENTS, cross_entropy.LAUNCH_ELEMENTS)
