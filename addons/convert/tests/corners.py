"""The rows of the families of Hugging Face models in the tests: tiny models of each, corners of
their configurations, and the published ones. A family needs no other place in the tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

VOCAB = 61
POSITIONS = 32
Config = Mapping[str, Any]
SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=POSITIONS,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=None,
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A family, as keys of config.json.

    sizes: what its tiny model has instead of or beside SIZES; `without`: of SIZES it has none of
        these.
    variants: changes of it, by name: other models that ranks write, too.
    base: what all corners have besides. corners: changes of that, the quick one first.
    refused: keys, and values that make another model of `base`.
    published: by name a config.json and the number of parameters that the model card and
        transformers' own model have, biases of the selection of experts among them.
    wide: its models are compared in float64: what float32 rounds grows with them, transformers' own.
    flags: those of a tiny model, where transformers has the family as remote code alone. like: the
        family as which it computes the same.
    """

    sizes: Config = field(default_factory=dict)
    without: Sequence[str] = ()
    variants: Mapping[str, Config] = field(default_factory=dict)
    base: Config = field(default_factory=dict)
    corners: Sequence[Config] = ()
    refused: Sequence[tuple[str, Any]] = ()
    published: Mapping[str, tuple[Config, int]] = field(default_factory=dict)
    like: str = ""
    wide: bool = False
    flags: Config = field(default_factory=dict)


FULL, WINDOW, LINEAR_KIND = "full_attention", "sliding_attention", "linear_attention"
DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
LINEAR = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=1e4,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
YARN = dict(
    rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16, beta_fast=4.0
)
LONG = dict(
    rope_type="longrope",
    rope_theta=1e4,
    short_factor=[1.0 + 0.1 * channel for channel in range(8)],
    long_factor=[2.0 + channel for channel in range(8)],
)
HALF = dict(
    partial_rotary_factor=0.5, short_factor=[1.0, 1.5, 1.5, 2.0], long_factor=[2.0, 3.0, 5.0, 8.0]
)
ROPE = {"rope_type": "default", "rope_theta": 1e6}
KIMI_YARN = dict(
    rope_type="yarn",
    rope_theta=5e4,
    factor=32.0,
    original_max_position_embeddings=16,
    beta_fast=1.0,
    beta_slow=1.0,
    mscale=1.0,
    mscale_all_dim=1.0,
)
SCALES = YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}
WINDOWS = dict(use_sliding_window=True, sliding_window=7)
ALPHA = {"type": "dynamic", "alpha": 50.0, "rope_theta": 1e3, "factor": 1.0}
GEMMA = dict(head_dim=16, sliding_window=7, query_pre_attn_scalar=24)
GRANITE = dict(
    embedding_multiplier=3.0, residual_multiplier=0.5, attention_multiplier=0.2, logits_scaling=0.7
)
LATENT = dict(
    num_key_value_heads=4,
    q_lora_rank=24,
    kv_lora_rank=20,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=16,
    moe_intermediate_size=40,
    topk_group=1,
)
DELTA = dict(
    head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=12,
    linear_value_head_dim=16,
)
NO_GROUPS = ("num_key_value_heads",)
REMOTE_FLAGS = dict(
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
)
SIGMOID_FLAGS = REMOTE_FLAGS | dict(
    num_experts=6,
    moe_ffn_hidden_size=40,
    moe_shared_expert_intermediate_size=80,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
)
# Of the published config.json; where rope_scaling is, as before transformers 5.
_GEMMA3 = dict(
    model_type="gemma3_text",
    vocab_size=262208,
    rope_theta=1000000,
    rope_local_base_freq=10000,
    sliding_window=1024,
    sliding_window_pattern=6,
    max_position_embeddings=131072,
    head_dim=256,
    query_pre_attn_scalar=256,
    rope_scaling={"factor": 8.0, "rope_type": "linear"},
)
_GPT_OSS = dict(
    model_type="gpt_oss",
    architectures=["GptOssForCausalLM"],
    vocab_size=201088,
    hidden_size=2880,
    intermediate_size=2880,
    head_dim=64,
    num_attention_heads=64,
    num_key_value_heads=8,
    attention_bias=True,
    hidden_act="silu",
    sliding_window=128,
    num_experts_per_tok=4,
    experts_per_token=4,
    initial_context_length=4096,
    max_position_embeddings=131072,
    rope_theta=150000,
    rms_norm_eps=1e-5,
    router_aux_loss_coef=0.9,
    swiglu_limit=7.0,
    tie_word_embeddings=False,
    rope_scaling={
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
)


def gemma3(layers: int, width: int, ffn: int, heads: int, groups: int, **more: Any) -> Config:
    sizes = dict(num_hidden_layers=layers, hidden_size=width, intermediate_size=ffn)
    return _GEMMA3 | sizes | dict(num_attention_heads=heads, num_key_value_heads=groups, **more)


_GLM = dict(
    model_type="glm4_moe",
    vocab_size=151552,
    attention_bias=True,
    head_dim=128,
    num_attention_heads=96,
    num_key_value_heads=8,
    n_routed_experts=128,
    num_experts_per_tok=8,
    partial_rotary_factor=0.5,
    rope_theta=1000000,
    rms_norm_eps=1e-5,
    max_position_embeddings=131072,
    num_nextn_predict_layers=1,
    tie_word_embeddings=False,
)

ROWS: dict[str, Row] = {
    "gpt2": Row(
        without=("num_key_value_heads", "intermediate_size"),
        variants={
            "erf": dict(activation_function="gelu", n_inner=80),
            "untied": dict(tie_word_embeddings=False),
        },
    ),
    "llama": Row(
        sizes=dict(rms_norm_eps=1e-5),
        variants={
            "tied": dict(tie_word_embeddings=True),
            "biases": dict(attention_bias=True, mlp_bias=True),
            "linear": dict(
                rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
            ),
            "3.1": dict(rope_parameters=LLAMA3 | {"factor": 32.0}),
            "heads": dict(num_key_value_heads=4, head_dim=24),
            "yarn": dict(rope_parameters=YARN | {"attention_factor": 1.3}),
        },
        corners=[
            dict(rope_parameters=LONG | {"original_max_position_embeddings": context, **more})
            for context, more in ((16, {}), (40, {}), (16, {"factor": 3.0}))
        ],
        refused=[("rope_parameters", LONG | {"longer": 1})],
    ),
    "qwen2": Row(
        sizes=dict(rope_parameters=ROPE),
        variants={
            "tied": dict(tie_word_embeddings=True),
            "windows": dict(use_sliding_window=True, sliding_window=7, max_window_layers=1),
        },
    ),
    "qwen3": Row(sizes=dict(head_dim=24, rope_parameters=ROPE)),
    "mistral": Row(
        sizes=dict(sliding_window=None, rope_parameters=ROPE),
        variants={"windows": dict(sliding_window=5)},
    ),
    "phi3": Row(
        corners=[
            dict(rope_parameters=LONG, original_max_position_embeddings=16),
            dict(rope_parameters=LONG, original_max_position_embeddings=40),
            dict(rope_parameters=LONG | {"factor": 6.0}, original_max_position_embeddings=16),
            dict(rope_parameters=LONG | {"attention_factor": 1.3}),
            dict(rope_parameters=LONG | HALF, original_max_position_embeddings=16),
        ],
        refused=[("rope_parameters", LONG | {"short_factor": [1.0, -1.0]})],
    ),
    "helium": Row(sizes=dict(head_dim=16)),
    "ministral": Row(
        sizes=dict(head_dim=16, rope_parameters=DEFAULT),
        variants={
            "windows": dict(sliding_window=6, layer_types=[WINDOW, FULL] * 2, rope_parameters=ROPE)
        },
    ),
    "gpt_bigcode": Row(without=("num_key_value_heads", "intermediate_size")),
    "gpt_neox": Row(without=NO_GROUPS),
    "persimmon": Row(without=NO_GROUPS),
    "olmo3": Row(
        variants={
            "windows": dict(
                sliding_window=8,
                rope_parameters={FULL: YARN | {"attention_factor": 1.3}, WINDOW: ROPE},
            )
        }
    ),
    "exaone4": Row(
        variants={
            "windows": dict(sliding_window=9, sliding_window_pattern=2),
            "without windows": dict(sliding_window=None, layer_types=[FULL] * 4),
        }
    ),
    "smollm3": Row(
        corners=[
            WINDOWS,
            WINDOWS | {"no_rope_layers": [0, 1, 0, 1], "sliding_window": 2},
            WINDOWS | {"layer_types": [WINDOW, FULL, WINDOW, FULL]},
            WINDOWS | {"no_rope_layers": [1] * 4},
            WINDOWS | {"layer_types": [WINDOW] * 4, "no_rope_layer_interval": 2},
        ],
        refused=[("layer_types", [WINDOW, FULL, FULL, FULL])],
    ),
    "mixtral": Row(sizes=dict(num_local_experts=6)),
    "olmoe": Row(
        sizes=dict(num_experts=12),
        variants={"normalized": dict(num_experts=6, num_experts_per_tok=3, norm_topk_prob=True)},
        refused=[("sliding_window", 8)],
    ),
    "qwen2_moe": Row(
        sizes=dict(num_experts=6, moe_intermediate_size=40, shared_expert_intermediate_size=48),
        variants={
            "dense layers": dict(num_experts_per_tok=2, decoder_sparse_step=2, norm_topk_prob=True)
        },
        base=dict(num_experts_per_tok=2),
        corners=[
            WINDOWS | {"max_window_layers": 3},
            WINDOWS | {"max_window_layers": 1, "num_hidden_layers": 5},
            WINDOWS | {"layer_types": [FULL, WINDOW, WINDOW, FULL], "norm_topk_prob": True},
            WINDOWS | {"layer_types": [WINDOW] * 4, "sliding_window": 2, "qkv_bias": False},
            WINDOWS | {"sliding_window": 40},
        ],
        refused=[("layer_types", [WINDOW, FULL, FULL, FULL])],
    ),
    "qwen3_moe": Row(
        sizes=dict(num_experts=12, moe_intermediate_size=40),
        variants={
            "dense layer": dict(
                num_experts=6,
                num_experts_per_tok=2,
                head_dim=24,
                norm_topk_prob=True,
                mlp_only_layers=[1],
            )
        },
        base=dict(num_experts=6, num_experts_per_tok=2),
        corners=[
            WINDOWS,
            WINDOWS | {"sliding_window": 2, "mlp_only_layers": [2], "head_dim": 24},
            WINDOWS | {"sliding_window": 40, "norm_topk_prob": True},
        ],
    ),
    "qwen3_next": Row(
        wide=True,
        sizes=DELTA
        | dict(num_experts=12, moe_intermediate_size=40, shared_expert_intermediate_size=48),
        variants={
            "attention alone": dict(
                layer_types=[FULL] * 4, num_experts=6, num_experts_per_tok=2, norm_topk_prob=False
            ),
        },
        base=dict(num_experts=8, num_experts_per_tok=3),
        corners=[
            {},
            dict(rms_norm_eps=1e-3, linear_num_key_heads=1, full_attention_interval=2),
            dict(linear_num_value_heads=2, linear_key_head_dim=24, linear_value_head_dim=8),
            dict(linear_num_key_heads=3, linear_num_value_heads=9, linear_key_head_dim=6),
            dict(layer_types=[LINEAR_KIND] * 4, linear_value_head_dim=20, use_cache=False),
            dict(tie_word_embeddings=True, linear_conv_kernel_dim=2, num_key_value_heads=1),
            dict(norm_topk_prob=False, decoder_sparse_step=2, attention_bias=True),
            dict(mlp_only_layers=[0, 3], num_experts_per_tok=1, linear_conv_kernel_dim=1),
            dict(norm_topk_prob=False, num_experts_per_tok=1, num_hidden_layers=5),
            dict(layer_types=[FULL, LINEAR_KIND, LINEAR_KIND, FULL], head_dim=24, hidden_size=48),
            dict(rope_parameters=YARN | {"partial_rotary_factor": 0.5}, num_key_value_heads=4),
            dict(rope_parameters=LINEAR | {"partial_rotary_factor": 1.0}, num_experts_per_tok=8),
            dict(
                rope_parameters=LLAMA3 | {"partial_rotary_factor": 0.25},
                num_hidden_layers=3,
                full_attention_interval=3,
            ),
        ],
        refused=[
            ("linear_num_value_heads", 3),
            ("layer_types", [WINDOW, FULL, FULL, FULL]),
            ("num_experts", 0),
            ("shared_expert_intermediate_size", 0),
            ("use_sliding_window", True),
            ("linear_conv_bias", True),
        ],
        published={
            "Qwen3-Next-80B-A3B": (
                dict(
                    model_type="qwen3_next",
                    decoder_sparse_step=1,
                    full_attention_interval=4,
                    head_dim=256,
                    hidden_size=2048,
                    intermediate_size=5120,
                    linear_conv_kernel_dim=4,
                    linear_key_head_dim=128,
                    linear_num_key_heads=16,
                    linear_num_value_heads=32,
                    linear_value_head_dim=128,
                    max_position_embeddings=262144,
                    mlp_only_layers=[],
                    moe_intermediate_size=512,
                    norm_topk_prob=True,
                    num_attention_heads=16,
                    num_experts=512,
                    num_experts_per_tok=10,
                    num_hidden_layers=48,
                    num_key_value_heads=2,
                    partial_rotary_factor=0.25,
                    rope_scaling=None,
                    rope_theta=10000000,
                    router_aux_loss_coef=0.001,
                    shared_expert_intermediate_size=512,
                    tie_word_embeddings=False,
                    use_sliding_window=False,
                    vocab_size=151936,
                ),
                79_674_391_296,
            )
        },
    ),
    "granite": Row(sizes=GRANITE),
    "granitemoe": Row(
        sizes=GRANITE | dict(num_local_experts=6),
        corners=[
            {},
            dict(num_experts_per_tok=1, attention_multiplier=1.0),
            dict(num_experts_per_tok=6, embedding_multiplier=1.0),
            dict(attention_bias=True, head_dim=24),
            dict(tie_word_embeddings=True, num_key_value_heads=1),
            dict(num_key_value_heads=None, residual_multiplier=1.0),
            dict(rope_parameters=YARN, logits_scaling=1.0),
            dict(rope_parameters=LINEAR, intermediate_size=40),
            dict(rope_parameters=LLAMA3, num_local_experts=3),
            dict(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
            dict(hidden_size=48, rms_norm_eps=1e-3, num_hidden_layers=3),
        ],
        refused=[("shared_intermediate_size", 8), ("hidden_act", "gelu")],
    ),
    "gemma2": Row(
        base=GEMMA,
        corners=[
            {},
            dict(attn_logit_softcapping=None, final_logit_softcapping=None),
            dict(attn_logit_softcapping=0.7, final_logit_softcapping=0.4),
            dict(attn_logit_softcapping=2.0, final_logit_softcapping=None, sliding_window=1),
            dict(attn_logit_softcapping=None, final_logit_softcapping=1.0, sliding_window=40),
            dict(layer_types=[FULL] * 4, attention_bias=True),
            dict(layer_types=[WINDOW] * 4, sliding_window=13, hidden_activation="gelu_new"),
            dict(query_pre_attn_scalar=7, head_dim=24, tie_word_embeddings=False),
            dict(num_key_value_heads=1, rms_norm_eps=1e-3),
            dict(num_key_value_heads=4, rope_parameters=YARN | {"attention_factor": 1.2}),
            dict(rope_parameters=LINEAR, num_hidden_layers=3),
            dict(rope_parameters=LLAMA3, hidden_size=48),
        ],
        refused=[
            ("use_bidirectional_attention", True),
            ("hidden_activation", "gelu"),
            ("final_logit_softcapping", 0.0),
        ],
    ),
    "gemma3_text": Row(
        base=GEMMA,
        corners=[
            {},
            dict(rope_parameters={FULL: LINEAR, WINDOW: DEFAULT}, layer_types=[WINDOW, FULL] * 2),
            dict(rope_parameters={FULL: LINEAR, WINDOW: LINEAR}),
            dict(rope_parameters={FULL: YARN, WINDOW: DEFAULT | {"rope_theta": 50.0}}),
            dict(rope_parameters={FULL: LLAMA3, WINDOW: DEFAULT}, num_hidden_layers=7),
            dict(sliding_window=2, layer_types=[WINDOW] * 4, query_pre_attn_scalar=7),
            dict(sliding_window=40, layer_types=[WINDOW, WINDOW, FULL, FULL]),
            dict(layer_types=[FULL] * 4, attention_bias=True, head_dim=24),
            dict(final_logit_softcapping=0.5, hidden_activation="gelu_new"),
            dict(num_key_value_heads=1, rms_norm_eps=1e-3, tie_word_embeddings=False),
            dict(num_key_value_heads=4, hidden_size=48, rope_parameters={FULL: DEFAULT}),
            dict(sliding_window_pattern=2),
        ],
        refused=[
            ("attn_logit_softcapping", 50.0),
            ("rope_parameters", {"rope_type": "default"}),
            ("rope_parameters", {WINDOW: LINEAR}),
        ],
        published={
            "gemma-3-1b": (
                gemma3(
                    26, 1152, 6912, 4, 1, sliding_window=512, vocab_size=262144, rope_scaling=None
                )
                | {"max_position_embeddings": 32768},
                999_885_952,
            ),
            "gemma-3-4b text": (gemma3(34, 2560, 10240, 8, 4), 3_880_263_168),
            "gemma-3-12b text": (gemma3(48, 3840, 15360, 16, 8), 11_766_034_176),
            "gemma-3-27b text": (
                gemma3(62, 5376, 21504, 32, 16, query_pre_attn_scalar=168) | {"head_dim": 128},
                27_009_346_304,
            ),
        },
    ),
    "gpt_oss": Row(
        sizes=dict(num_local_experts=6),
        base=dict(head_dim=16, sliding_window=7, num_experts_per_tok=3, swiglu_limit=1.0),
        corners=[
            {},
            dict(swiglu_limit=0.1, num_experts_per_tok=1),
            dict(num_local_experts=3, num_experts_per_tok=3, attention_bias=False),
            dict(sliding_window=1, layer_types=[WINDOW] * 4),
            dict(layer_types=[FULL] * 4, head_dim=24, num_key_value_heads=4),
            dict(layer_types=[FULL, WINDOW, WINDOW, FULL], sliding_window=13),
            dict(sliding_window=40, rope_parameters=YARN | {"truncate": False}),
            dict(rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}),
            dict(rope_parameters=DEFAULT, tie_word_embeddings=True),
            dict(rope_parameters=LINEAR, intermediate_size=40, num_key_value_heads=1),
            dict(rms_norm_eps=1e-3, swiglu_limit=100.0, num_hidden_layers=3),
            dict(hidden_size=48, rope_parameters=LLAMA3),
        ],
        refused=[
            ("swiglu_alpha", 1.0),
            ("hidden_act", "gelu"),
            ("experts_per_token", 2),
            ("initial_context_length", 8),
            ("rope_parameters", YARN | {"rope_type": "longer"}),
            ("quantization_config", {"quant_method": "mxfp4"}),
        ],
        published={
            "gpt-oss-20b": (
                _GPT_OSS | dict(num_hidden_layers=24, num_local_experts=32),
                20_914_757_184,
            ),
            "gpt-oss-120b": (
                _GPT_OSS | dict(num_hidden_layers=36, num_local_experts=128),
                116_829_156_672,
            ),
        },
    ),
    "glm4_moe": Row(
        sizes=dict(n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=40),
        base=dict(n_routed_experts=8, num_experts_per_tok=3, routed_scaling_factor=1.5),
        corners=[
            {},
            dict(use_qk_norm=True, head_dim=24, attention_bias=True),
            dict(n_group=4, topk_group=2, num_experts_per_tok=4),
            dict(n_group=2, topk_group=1, norm_topk_prob=False),
            dict(n_group=2, topk_group=2, routed_scaling_factor=0.5, use_qk_norm=True),
            dict(num_experts_per_tok=1, n_shared_experts=3),
            dict(num_experts_per_tok=1, norm_topk_prob=False),
            dict(num_experts_per_tok=8, first_k_dense_replace=0),
            dict(first_k_dense_replace=3, num_key_value_heads=1, num_mtp_layers=0),
            dict(rope_parameters=YARN | {"partial_rotary_factor": 0.25}, head_dim=32),
            dict(rope_parameters=LLAMA3, tie_word_embeddings=True, num_key_value_heads=4),
            dict(rope_parameters=LINEAR | {"partial_rotary_factor": 1.0}, hidden_size=48),
            dict(rms_norm_eps=1e-3, num_hidden_layers=3, intermediate_size=72),
        ],
        refused=[
            ("n_group", 3),
            ("first_k_dense_replace", 4),
            ("routed_scaling_factor", 0.0),
            ("n_shared_experts", 0),
            ("scoring_func", "softmax"),
            ("num_local_experts", 9),
        ],
        published={
            "GLM-4.5-Air": (
                _GLM
                | dict(num_hidden_layers=46, hidden_size=4096, intermediate_size=10944)
                | dict(moe_intermediate_size=1408, first_k_dense_replace=1),
                106_852_251_264,
            ),
            "GLM-4.5": (
                _GLM
                | dict(
                    num_hidden_layers=92,
                    hidden_size=5120,
                    intermediate_size=12288,
                    use_qk_norm=True,
                )
                | dict(moe_intermediate_size=1536, first_k_dense_replace=3, n_routed_experts=160)
                | dict(routed_scaling_factor=2.5),
                352_797_829_024,
            ),
        },
    ),
    "minimax_m2": Row(
        sizes=dict(head_dim=16, num_local_experts=6, num_experts_per_tok=2),
        base=dict(num_local_experts=8, num_experts_per_tok=3, intermediate_size=40),
        corners=[
            {},
            dict(num_experts_per_tok=1),
            dict(num_experts_per_tok=8, num_key_value_heads=1),
            dict(head_dim=24, rotary_dim=12),
            dict(head_dim=24, rope_parameters=DEFAULT | {"partial_rotary_factor": 0.25}),
            dict(num_key_value_heads=4, tie_word_embeddings=True),
            dict(rope_parameters=YARN | {"partial_rotary_factor": 0.5}, head_dim=32),
            dict(rope_parameters=LINEAR, rotary_dim=8),
            dict(rope_parameters=LLAMA3, num_local_experts=3),
            dict(hidden_size=48, rms_norm_eps=1e-3),
            dict(num_hidden_layers=3, router_jitter_noise=0.1, intermediate_size=56),
        ],
        refused=[
            ("scoring_func", "softmax"),
            ("use_routing_bias", False),
            ("qk_norm_type", "per_head"),
            ("shared_intermediate_size", 8),
            ("attn_type_list", [1, 0, 1, 1]),
            ("sliding_window", 8),
        ],
        published={
            "MiniMax-M2": (
                dict(
                    model_type="minimax_m2",
                    attn_type_list=[1] * 62,
                    head_dim=128,
                    hidden_size=3072,
                    intermediate_size=1536,
                    layernorm_full_attention_beta=1.0,
                    max_position_embeddings=196608,
                    mlp_intermediate_size=8192,
                    mtp_transformer_layers=1,
                    num_attention_heads=48,
                    num_experts_per_tok=8,
                    num_hidden_layers=62,
                    num_key_value_heads=8,
                    num_local_experts=256,
                    num_mtp_modules=3,
                    qk_norm_type="per_layer",
                    quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]},
                    rope_theta=5000000,
                    rotary_dim=64,
                    scoring_func="sigmoid",
                    shared_intermediate_size=0,
                    use_mtp=True,
                    use_qk_norm=True,
                    use_routing_bias=True,
                    vocab_size=200064,
                ),
                228_689_764_864,
            )
        },
    ),
    "ernie4_5_moe": Row(
        sizes=dict(moe_num_experts=6, moe_k=2, moe_intermediate_size=40),
        base=dict(moe_num_experts=8, moe_k=3),
        corners=[
            {},
            dict(moe_num_shared_experts=0),
            dict(moe_num_shared_experts=3, moe_k=1),
            dict(moe_layer_interval=2),
            dict(moe_layer_start_index=0, moe_layer_end_index=1),
            dict(moe_layer_start_index=2, moe_layer_end_index=2, moe_k=8),
            dict(head_dim=24, num_key_value_heads=1),
            dict(tie_word_embeddings=False, num_key_value_heads=4),
            dict(rope_parameters=YARN, moe_intermediate_size=56),
            dict(rope_parameters=LINEAR, moe_layer_start_index=0),
            dict(rope_parameters=LLAMA3, hidden_size=48),
            dict(rms_norm_eps=1e-3, num_hidden_layers=6, moe_layer_interval=3),
        ],
        refused=[
            ("use_bias", True),
            ("moe_norm_min", 0.5),
            ("moe_layer_start_index", 7),
            ("moe_gate", "switch"),
        ],
        published={
            "ERNIE-4.5-21B-A3B": (
                dict(
                    model_type="ernie4_5_moe",
                    hidden_size=2560,
                    intermediate_size=12288,
                    max_position_embeddings=131072,
                    moe_capacity=[64, 64, 64],
                    moe_gate="topk",
                    moe_intermediate_size=1536,
                    moe_k=6,
                    moe_layer_start_index=1,
                    moe_num_experts=64,
                    moe_num_shared_experts=2,
                    moe_use_aux_free=True,
                    num_attention_heads=20,
                    num_hidden_layers=28,
                    num_key_value_heads=4,
                    rope_theta=500000,
                    tie_word_embeddings=True,
                    vocab_size=103424,
                ),
                21_825_437_888,
            )
        },
    ),
    "hunyuan_v1_moe": Row(
        sizes=dict(head_dim=16, num_experts=6, moe_topk=2),
        corners=[
            {},
            dict(moe_topk=1),
            dict(num_experts=1, moe_topk=1),
            dict(moe_topk=[3] * 4, attention_bias=True),
            dict(head_dim=24, num_key_value_heads=1),
            dict(tie_word_embeddings=True, num_key_value_heads=None),
            dict(rope_parameters=ALPHA),
            dict(rope_parameters=ALPHA | {"alpha": 1.5, "mscale": 1.0, "mscale_all_dim": 0.0}),
            dict(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
            dict(rope_parameters=YARN, num_experts=3),
            dict(rope_parameters=LINEAR, intermediate_size=40),
            dict(rope_parameters=LLAMA3, hidden_size=48, rms_norm_eps=1e-3),
        ],
        refused=[
            ("moe_topk", [1, 2, 2, 2]),
            ("moe_intermediate_size", [96, 96, 96, 40]),
            ("num_shared_expert", 2),
            ("use_cla", True),
            ("rope_parameters", ALPHA | {"type": "linear"}),
            ("attention_head_dim", 32),
        ],
        published={
            "Hunyuan-A13B": (
                dict(
                    model_type="hunyuan_v1_moe",
                    attention_head_dim=128,
                    head_dim=128,
                    hidden_size=4096,
                    intermediate_size=3072,
                    max_position_embeddings=32768,
                    moe_intermediate_size=[3072] * 32,
                    moe_topk=[8] * 32,
                    num_attention_heads=32,
                    num_experts=64,
                    num_hidden_layers=32,
                    num_key_value_heads=8,
                    num_shared_expert=[1] * 32,
                    rope_scaling=dict(
                        alpha=1000.0,
                        beta_fast=32,
                        beta_slow=1,
                        factor=1.0,
                        mscale=1.0,
                        mscale_all_dim=0.0,
                    )
                    | {"type": "dynamic"},
                    tie_word_embeddings=True,
                    use_cla=False,
                    use_mixed_mlp_moe=True,
                    use_qk_norm=True,
                    vocab_size=128167,
                ),
                80_393_183_232,
            )
        },
    ),
    "deepseek_v2": Row(
        sizes=LATENT | dict(n_routed_experts=6, num_experts_per_tok=2),
        base=dict(n_routed_experts=8, num_experts_per_tok=3, first_k_dense_replace=1),
        corners=[
            {},
            dict(q_lora_rank=None, first_k_dense_replace=0),
            dict(topk_method="group_limited_greedy", n_group=4, topk_group=2),
            dict(topk_method="group_limited_greedy", n_group=2, num_experts_per_tok=2),
            dict(num_experts_per_tok=1, routed_scaling_factor=2.5),
            dict(n_shared_experts=1, v_head_dim=24, rms_norm_eps=1e-3),
            dict(qk_nope_head_dim=20, qk_rope_head_dim=4, kv_lora_rank=28),
            dict(rope_parameters=SCALES),
            dict(rope_parameters=YARN | {"mscale_all_dim": 0.5}, tie_word_embeddings=True),
            dict(rope_parameters=YARN),
            dict(hidden_size=48, num_hidden_layers=3, first_k_dense_replace=2),
        ],
        refused=[("norm_topk_prob", True), ("topk_method", "noaux_tc"), ("mlp_bias", True)],
    ),
    "deepseek_v3": Row(
        sizes=LATENT | dict(n_routed_experts=8, num_experts_per_tok=2, n_group=2),
        base=dict(num_experts_per_tok=3, first_k_dense_replace=1),
        corners=[
            {},
            dict(q_lora_rank=None, norm_topk_prob=False),
            dict(n_group=4, topk_group=2, num_experts_per_tok=4),
            dict(n_group=1, topk_group=1, rms_norm_eps=1e-5),
            dict(num_experts_per_tok=1, norm_topk_prob=False, n_shared_experts=3),
            dict(routed_scaling_factor=1.0, v_head_dim=24, first_k_dense_replace=0),
            dict(qk_nope_head_dim=20, qk_rope_head_dim=4, kv_lora_rank=28),
            dict(rope_parameters=SCALES),
            dict(rope_parameters=SCALES | {"mscale": 1.0, "mscale_all_dim": 1.0}),
            dict(rope_parameters=YARN | {"mscale_all_dim": 0.5}, tie_word_embeddings=True),
            dict(rope_parameters=YARN | {"attention_factor": 1.2, "mscale_all_dim": 0.4}),
            dict(hidden_size=48, num_hidden_layers=3, first_k_dense_replace=2, num_mtp_layers=0),
        ],
        refused=[
            ("attention_bias", True),
            ("rope_interleave", False),
            ("num_key_value_heads", 2),
            ("head_dim", 16),
            ("scoring_func", "softmax"),
            ("rope_parameters", LINEAR),
            ("rope_parameters", LLAMA3),
            ("index_topk", 8),
        ],
    ),
    "glm4_moe_lite": Row(
        sizes=LATENT | dict(n_routed_experts=6, num_experts_per_tok=2),
        base=dict(n_routed_experts=8, num_experts_per_tok=3, n_group=2),
        corners=[
            {},
            dict(q_lora_rank=None, norm_topk_prob=False),
            dict(n_group=4, topk_group=2, num_experts_per_tok=4),
            dict(n_group=2, topk_group=1),
            dict(num_experts_per_tok=1, norm_topk_prob=False, n_shared_experts=2),
            dict(mlp_layer_types=["sparse", "dense", "sparse", "sparse"]),
            dict(mlp_layer_types=["sparse"] * 4, routed_scaling_factor=1.0),
            dict(qk_nope_head_dim=20, qk_rope_head_dim=4, v_head_dim=24),
            dict(rope_parameters=SCALES, rms_norm_eps=1e-3),
            dict(rope_parameters=YARN, tie_word_embeddings=True),
            dict(hidden_size=48, num_hidden_layers=3),
        ],
        refused=[("mlp_layer_types", ["dense"] * 4), ("first_k_dense_replace", 2)],
    ),
    "kimi_k2": Row(
        like="deepseek_v3",
        flags=SIGMOID_FLAGS
        | dict(
            multi_latent_attention=True,
            rope_type="rope",
            qk_layernorm=True,
            latent_norm_epsilon=1e-6,
            q_lora_rank=24,
            kv_lora_rank=20,
            qk_head_dim=12,
            qk_pos_emb_head_dim=8,
            v_head_dim=16,
        ),
        sizes=LATENT | dict(n_routed_experts=8, n_group=1),
        base=dict(num_experts_per_tok=3, first_k_dense_replace=1),
        corners=[
            dict(rope_parameters=KIMI_YARN, routed_scaling_factor=2.827),
            dict(rope_parameters=KIMI_YARN | {"factor": 64.0}, rms_norm_eps=1e-5),
            dict(rope_parameters=KIMI_YARN, q_lora_rank=None, num_experts_per_tok=8),
            dict(rope_parameters=KIMI_YARN, num_key_value_heads=2, num_attention_heads=2),
            dict(
                rope_parameters=KIMI_YARN,
                num_experts_per_tok=1,
                norm_topk_prob=False,
                routed_scaling_factor=1.0,
            ),
            dict(rope_parameters=KIMI_YARN | {"mscale": 0.7}, routed_scaling_factor=2.446),
            dict(rope_parameters=DEFAULT | {"rope_theta": 5e4}, n_shared_experts=2),
            dict(rope_parameters=KIMI_YARN | {"mscale_all_dim": 0.3}, v_head_dim=24),
            dict(n_group=2, topk_group=1, first_k_dense_replace=0, tie_word_embeddings=True),
            dict(hidden_size=48, num_hidden_layers=5, first_k_dense_replace=3, kv_lora_rank=28),
        ],
    ),
    "bailing_moe": Row(flags=SIGMOID_FLAGS),
    "bailing_moe_v2": Row(flags=SIGMOID_FLAGS),
    "internlm": Row(flags=REMOTE_FLAGS),
    "internlm2": Row(flags=REMOTE_FLAGS),
    "internlm3": Row(flags=REMOTE_FLAGS),
}
