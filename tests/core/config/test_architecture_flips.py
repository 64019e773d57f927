"""What changes the evaluated logits of the same weights is architecture: every flag of the model
and of the kernels gets its other values, in double precision.

Flags of other groups do not reach an evaluation of trained weights: it is one process, and its
dtype is that of the weights."""

from dataclasses import fields
from functools import cache
from typing import Any

import pytest
import torch

from megatron.arguments import config_from, flags_of, flags_of_group
from megatron.config import architecture
from megatron.config.checks import rules
from megatron.config.kernels import KernelsConfig
from megatron.config.model import ModelConfig, TransformerConfig
from megatron.config.moe import MoEConfig
from megatron.config.mup import MupConfig
from megatron.config.tree import Config
from megatron.kernels.select import choose_kernels
from tests.core.model.tiny import tiny_config, tiny_model, tokens

SIZES = dict(num_layers=2, hidden_size=16, num_attention_heads=4, ffn_hidden_size=24)
LLAMA = dict(
    swiglu=True,
    normalization="RMSNorm",
    add_bias_linear=False,
    position_embedding_type="rope",
    group_query_attention=True,
    num_query_groups=2,
    qk_layernorm=True,
    rotary_base=1000000,
    use_rope_scaling=True,
    untie_embeddings_and_output_weights=True,
)
EXPERTS = dict(add_bias_linear=False, num_experts=8, moe_router_topk=4, moe_ffn_hidden_size=8)
LONGROPE = dict(
    use_rope_scaling=False,
    rope_type="longrope",
    kv_channels=8,
    rotary_base=100,
    longrope_short_factor=(1.0, 2.0, 3.0, 4.0),
    longrope_long_factor=(9.0, 8.0, 7.0, 6.0),
)
DENSE: dict[str, dict[str, Any]] = {
    "gpt": dict(bias_gelu_fusion=False),
    "muP": dict(bias_gelu_fusion=False, use_mup=True, mup_base_hidden_size=8),
    "llama": LLAMA,
    "windows, yarn": LLAMA
    | dict(
        use_rope_scaling=False,
        window_size=(3, 0),
        window_attn_skip_freq="2",
        rope_type="yarn",
        rotary_scaling_factor=8.0,
        # so that the bounds of the correction are inside of a head
        rotary_base=4,
        kv_channels=16,
        original_max_position_embeddings=64,
        mscale_all_dim=0.5,
    ),
    "sinks, caps": LLAMA
    | dict(
        softmax_type="learnable",
        attn_logit_softcapping=0.5,
        final_logit_softcapping=0.5,
        window_size=(3, 0),
    ),
    "longrope": LLAMA | LONGROPE,
    "longrope, long": LLAMA | LONGROPE | dict(original_max_position_embeddings=4),
    "latent attention": LLAMA
    | dict(group_query_attention=False, num_query_groups=1, use_rope_scaling=False, rotary_base=4)
    | dict(multi_latent_attention=True, q_lora_rank=8, kv_lora_rank=8, qk_head_dim=8)
    | dict(qk_pos_emb_head_dim=16, v_head_dim=8, rotary_scaling_factor=8.0)
    | dict(original_max_position_embeddings=64, mscale_all_dim=0.5),
    "gated delta nets": LLAMA
    | dict(experimental_attention_variant="gated_delta_net", linear_attention_freq="2")
    | dict(linear_num_key_heads=2, linear_num_value_heads=4)
    | dict(linear_key_head_dim=8, linear_value_head_dim=4),
    "quick_geglu": LLAMA | dict(swiglu=False, quick_geglu=True, activation_func_clamp_value=0.05),
    "olmo": LLAMA
    | dict(no_pre_layernorm=True, post_self_attn_layernorm=True, post_mlp_layernorm=True),
}
MOE: dict[str, dict[str, Any]] = {
    "softmax": EXPERTS
    | dict(moe_shared_expert_intermediate_size=8, moe_expert_capacity_factor=0.5, swiglu=True),
    "sigmoid, groups": EXPERTS
    | dict(
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_topk=2,
        moe_router_num_groups=4,
        moe_router_group_topk=2,
    ),
    "gpt-oss": EXPERTS
    | dict(add_mlp_bias=True, quick_geglu=True, activation_func_clamp_value=0.05)
    | dict(glu_linear_offset=1.0),
    "sinkhorn": EXPERTS | dict(moe_router_load_balancing_type=("sinkhorn",)),
    "sinkhorn, top 1": EXPERTS
    | dict(moe_router_load_balancing_type=("sinkhorn",), moe_router_topk=1),
}
# Other values of what is neither a switch nor has choices.
OTHER: dict[str, Any] = dict(
    mtp_num_layers=1,
    mtp_loss_scaling_factor=0.7,
    num_layers=1,
    hybrid_layer_pattern="*-",
    hidden_size=32,
    mup_base_hidden_size=4,
    mup_embedding_mult=2.0,
    mup_output_mult=0.7,
    mup_base_head_dim=2.0,
    mup_attn_scale_power=0.7,
    ffn_hidden_size=32,
    ffn_multiple_of=64,
    num_attention_heads=2,
    kv_channels=8,
    num_query_groups=1,
    seq_length=12,
    max_position_embeddings=32,
    rotary_base=500,
    rotary_percent=0.5,
    rotary_ntk_alpha=4.0,
    rotary_seq_len_interpolation_factor=4,
    rope_scaling_factor=2.0,
    no_rope_freq="2",
    window_size=(3, 0),
    window_attn_skip_freq="[1,1]",
    window_rotary_base=500,
    cuda_graph_warmup_steps=1,
    rotary_scaling_factor=4.0,
    original_max_position_embeddings=8,
    beta_fast=2.0,
    beta_slow=0.5,
    longrope_short_factor=(1.0, 1.0, 1.0, 2.0),
    longrope_long_factor=(3.0, 2.0, 2.0, 2.0),
    longrope_attention_factor=1.5,
    mscale=2.0,
    mscale_all_dim=1.0,
    q_lora_rank=4,
    kv_lora_rank=4,
    qk_head_dim=4,
    qk_pos_emb_head_dim=8,
    v_head_dim=4,
    latent_norm_epsilon=0.1,
    linear_attention_freq="[0,1]",
    linear_conv_kernel_dim=3,
    linear_key_head_dim=4,
    linear_value_head_dim=8,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    make_vocab_size_divisible_by=8,
    norm_epsilon=1e-2,
    embedding_multiplier=2.0,
    residual_multiplier=0.5,
    activation_func_clamp_value=0.03,
    glu_linear_offset=0.5,
    softmax_scale=0.1,
    attn_logit_softcapping=0.2,
    final_logit_softcapping=0.2,
    logits_scaling=2.0,
    attention_dropout=0.5,
    hidden_dropout=0.5,
    init_method_std=0.1,
    embed_grad_scale=0.1,
    label_smoothing=0.1,
    z_loss_coeff=0.1,
    num_experts=4,
    moe_layer_freq="[0,1]",
    moe_ffn_hidden_size=16,
    moe_shared_expert_intermediate_size=16,
    moe_router_topk=2,
    moe_router_topk_scaling_factor=2.0,
    moe_router_num_groups=2,
    moe_router_group_topk=1,
    moe_router_group_score_topk=2,
    moe_router_bias_update_rate=0.1,
    moe_input_jitter_eps=0.1,
    moe_expert_capacity_factor=1.0,
    moe_aux_loss_coeff=(0.1,),
    moe_z_loss_coeff=0.1,
)
# Flags without which no run accepts another one.
NEEDED: dict[str, dict[str, Any]] = {
    "ffn_multiple_of": {"ffn_hidden_size": None},
    "use_mup": {"mup_base_hidden_size": None},
    "moe_router_num_groups": {"moe_router_group_topk": 1},
}
BF16 = {"fp32_residual_connection": {"bf16": True}}
BASES = DENSE | MOE
RUN = dict(lr=1e-3, train_iters=1, micro_batch_size=1, mock_data=True, vocab_size=61, device="cpu")
IDS = tokens()[0][:, :12]
SAME = 1e-6  # largest difference of the logits of one function


DEFAULTS = {f.name: getattr(tiny_config(), f.name) for f in fields(TransformerConfig)}


def config_of(flags: dict[str, Any]) -> Config:
    return config_from(Config, DEFAULTS | SIZES | RUN | flags)


def others(config: Config, name: str) -> list[Any]:
    """Other values of a flag."""
    flag = flags_of(Config)[name]
    value = getattr(getattr(config, flag.group), name)
    if flag.kind in ("switch", "off"):
        return [not value]
    values = (OTHER[name],) if flag.choices is None else flag.choices
    if isinstance(value, tuple) and flag.choices:
        values = tuple((one,) for one in values)
    return [one for one in values if one != value]


def built(config: Config) -> torch.nn.Module:
    kernels = choose_kernels(torch.device("cpu"), torch.float64, config)
    return tiny_model(torch.float64, scramble=True, kernels=kernels, **vars(config.model)).eval()


@torch.no_grad()
def logits(config: Config, weights: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """Those of the model with these weights, None if they are not of its shapes."""
    model = built(config)
    own = {p.sharding.name: p for p in model.parameters()}
    # logits are without multi-token prediction
    own = {name: p for name, p in own.items() if not name.startswith("mtp.")}
    if {name: p.shape for name, p in own.items()} != {n: w.shape for n, w in weights.items()}:
        return None
    for name, p in own.items():
        p.copy_(weights[name])
    return model(IDS)


@cache
def flips(base: str) -> list[tuple[str, Config, bool]]:
    """(flag, configuration with another value of it, do the shapes or the logits of the same
    weights change with it?) without what no run accepts."""
    config = config_of(BASES[base])
    weights = {p.sharding.name: p.detach() for p in built(config).parameters()}
    expected = logits(config, weights)
    found = []
    groups = (MoEConfig,) if base in MOE else (TransformerConfig, MupConfig)
    for name in (field.name for group in (*groups, KernelsConfig) for field in fields(group)):
        for value in others(config, name):
            flags = BASES[base] | NEEDED.get(name, {}) | {name: value}
            accepted = config_of(flags | BF16.get(name, {}))
            if rules.problems(accepted, 1, flags):
                continue
            other = config_of(flags)
            try:
                found_logits = logits(other, weights)
            except ValueError:
                assert name in ("attention_backend", "use_flash_attn")  # not in float64
                continue
            same = found_logits is not None and torch.allclose(
                found_logits, expected, rtol=0, atol=SAME
            )
            found.append((name, other, not same))
    return found


def overlooked(base: str) -> set[str]:
    """Flags that change the function, of which `architecture` does not know it."""
    model = config_of(BASES[base]).model
    return {
        name
        for name, other, changes in flips(base)
        if changes and not architecture.differences(model, other.model)
    }


# of each kind one; the others are a campaign
QUICK = ("sinks, caps", "softmax")


@pytest.mark.parametrize(
    "base",
    [pytest.param(name, marks=[pytest.mark.campaign] * (name not in QUICK)) for name in BASES],
)
def test_what_changes_the_function_is_architecture(base, monkeypatch):
    assert overlooked(base) == set()
    model = config_of(BASES[base]).model
    planted = set()
    for name, other, changes in flips(base):
        differing = [one.name for one in architecture.differences(model, other.model)]
        if changes and differing == [name]:
            with monkeypatch.context() as patch:
                spelled = dict(architecture._spelled())
                del spelled[name]
                patch.setattr(architecture, "_spelled", lambda spelled=spelled: spelled)
                assert overlooked(base) == {name}
                planted.add(name)
    assert len(planted) >= 2


@pytest.mark.campaign
def test_every_other_flag_is_declared_as_free():
    changing = {name for base in BASES for name, _, changes in flips(base) if changes}
    flipped = {name for base in BASES for name, *_ in flips(base)}
    # a flag whose other values are those of features cannot be flipped here
    flags = {
        name: flag
        for name, flag in flags_of_group(ModelConfig, "").items()
        if not flag.choices or len(flag.choices) > 1
    }
    free = {name for name, flag in flags.items() if not flag.trained}
    assert flipped - changing - {f.name for f in fields(KernelsConfig)} == free
    assert flipped >= flags.keys()
    assert not changing & {f.name for f in fields(KernelsConfig)}


@pytest.mark.parametrize(
    "saved, now",
    [
        (MOE["sinkhorn"], EXPERTS | dict(moe_router_pre_softmax=True)),
        (
            MOE["sinkhorn, top 1"],
            EXPERTS | dict(moe_router_topk=1, moe_router_score_function="sigmoid"),
        ),
    ],
)
def test_sinkhorn_evaluates_as_a_router_without_it(saved, now):
    saved, now = config_of(saved), config_of(now)
    assert architecture.differences(saved.model, now.model) == []
    weights = {p.sharding.name: p.detach() for p in built(saved).parameters()}
    torch.testing.assert_close(logits(saved, weights), logits(now, weights), rtol=0, atol=1e-12)
