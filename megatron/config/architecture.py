"""Compares two configurations: whether they describe the same trained model, with whichever
flags."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megatron.config.model import ModelConfig

# What neither the shape nor the function of trained weights depends on.
FREE = {
    "seq_length",
    "attention_dropout",
    "hidden_dropout",
    "init_method_std",
    "init_method_xavier_uniform",
    "init_scheme",
    "embed_grad_scale",
    "label_smoothing",
    "fp32_residual_connection",
    "attention_softmax_in_fp32",
    "apply_query_key_layer_scaling",
    "make_vocab_size_divisible_by",
    "moe_aux_loss_coeff",
    "moe_expert_capacity_factor",
    "moe_input_jitter_eps",
    "moe_per_layer_logging",
    "moe_router_bias_update_rate",
    "moe_router_dtype",
    "moe_token_dispatcher_type",
    "moe_token_drop_policy",
    "moe_z_loss_coeff",
}
_ACTIVATIONS = ("swiglu", "geglu", "squared_relu", "xielu", "bias_gelu_fusion", "openai_gelu")
_ROUTER = (
    *("moe_router_score_function", "moe_router_pre_softmax"),
    "moe_router_load_balancing_type",
)
# Fields that say one thing together: (name in messages, all of them, what they say).
_TOGETHER: tuple[tuple[str, tuple[str, ...], Callable[[ModelConfig], Any]], ...] = (
    ("ffn_hidden_size", ("ffn_hidden_size", "ffn_multiple_of"), lambda m: m.ffn),
    (
        "moe_ffn_hidden_size",
        ("moe_ffn_hidden_size",),
        lambda m: m.expert_ffn if m.num_experts else None,
    ),
    (
        "moe_layer_freq",
        ("moe_layer_freq",),
        lambda m: m.num_experts and [m.is_moe_layer(layer) for layer in range(m.num_layers)],
    ),
    ("kv_channels", ("kv_channels",), lambda m: m.head_dim),
    ("softmax_scale", ("softmax_scale",), lambda m: m.attention_scale),
    (
        "no_rope_freq",
        ("no_rope_freq",),
        lambda m: [
            layer for layer in range(m.num_layers) if m.positions == "rope" and not m.rotates(layer)
        ],
    ),
    ("num_query_groups", ("num_query_groups", "group_query_attention"), lambda m: m.query_groups),
    (
        "position_embedding_type",
        ("position_embedding_type", "use_rotary_position_embeddings", "add_position_embedding"),
        lambda m: m.positions,
    ),
    (
        "max_position_embeddings",
        ("max_position_embeddings",),
        lambda m: m.max_position_embeddings if m.positions == "learned_absolute" else None,
    ),
    (
        "add_bias_linear",
        ("add_bias_linear", "add_qkv_bias", "add_attention_output_bias", "add_mlp_bias"),
        lambda m: (m.qkv_bias, m.attention_output_bias, m.mlp_bias),
    ),
    (
        "rope_scaling_factor",
        ("rope_scaling_factor", "use_rope_scaling"),
        lambda m: m.rope_scaling_factor if m.use_rope_scaling else None,
    ),
    ("activation", _ACTIVATIONS, lambda m: m.activation),
    (", ".join(_ROUTER), _ROUTER, lambda m: m.router_probabilities if m.num_experts else None),
)


class Difference(NamedTuple):
    """One thing that two models do not share: its name in messages, the fields that spell it, both
    values."""

    name: str
    fields: tuple[str, ...]
    saved: Any
    now: Any


def _fields(model: ModelConfig) -> dict[str, tuple[str, ...]]:
    """The fields that spell each thing that determines the function, by its name."""
    together = {name: names for name, names, _ in _TOGETHER}
    spelled = {name for names in together.values() for name in names}
    return {name: (name,) for name in vars(model) if name not in FREE | spelled} | together


def values(model: ModelConfig) -> dict[str, Any]:
    """What the shapes and the function of trained weights depend on, by its name in messages."""
    together = {name: value for name, _, value in _TOGETHER}
    return {
        name: together[name](model) if name in together else getattr(model, name)
        for name in _fields(model)
    }


def differences(saved: ModelConfig, now: ModelConfig) -> list[Difference]:
    """Everything in which weights of the one are not a model of the other; empty if they are the
    same."""
    before, after = values(saved), values(now)
    return [
        Difference(name, fields, before[name], after[name])
        for name, fields in _fields(saved).items()
        if before[name] != after[name]
    ]


@dataclass
class FromCheckpoint:
    """What --use-checkpoint-args brings. `lost`: flags of files that the checkpoint names and that
    are not there."""

    values: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    lost: set[str] = field(default_factory=set)
    # those of the values that differ from their defaults
    taken: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
