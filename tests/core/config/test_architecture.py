"""Two spellings of one model are no difference; another model always is."""

import pytest

from megatron.config.architecture import differences
from megatron.config.model import ModelConfig

BASE = dict(
    num_layers=2, hidden_size=64, num_attention_heads=4, seq_length=32, max_position_embeddings=32
)
ROPE = dict(position_embedding_type="rope")
EXPERTS = dict(num_experts=4, add_bias_linear=False)
SINKHORN = EXPERTS | dict(moe_router_load_balancing_type=("sinkhorn",))
ROUTER = "router_function"


def found(saved: dict, now: dict) -> list[str]:
    return [one.name for one in differences(ModelConfig(**BASE | saved), ModelConfig(**BASE | now))]


@pytest.mark.parametrize(
    "saved, now",
    [
        ({}, {}),
        ({}, dict(ffn_hidden_size=256, kv_channels=16)),
        ({}, dict(group_query_attention=True, num_query_groups=4)),
        ({}, dict(seq_length=16, hidden_dropout=0.0, make_vocab_size_divisible_by=8)),
        ({}, dict(openai_gelu=True)),
        (dict(swiglu=True), dict(swiglu=True, bias_gelu_fusion=False)),
        (dict(add_bias_linear=False), dict(add_bias_linear=False, bias_gelu_fusion=False)),
        (ROPE, dict(use_rotary_position_embeddings=True)),
        (ROPE, ROPE | dict(max_position_embeddings=64)),
        (SINKHORN, EXPERTS | dict(moe_router_pre_softmax=True)),
        ({}, dict(moe_per_layer_logging=True)),
    ],
)
def test_another_spelling_is_no_difference(saved, now):
    assert found(saved, now) == []


@pytest.mark.parametrize(
    "saved, now, names",
    [
        ({}, dict(num_layers=3), ["num_layers"]),
        ({}, dict(max_position_embeddings=64), ["max_position_embeddings"]),
        ({}, ROPE, ["max_position_embeddings", "positions"]),
        ({}, dict(bias_gelu_fusion=False), ["activation"]),
        ({}, dict(add_bias_linear=False), ["activation", "biases"]),
        (dict(swiglu=True), dict(geglu=True), ["activation"]),
        (dict(swiglu=True), dict(swiglu=True, ffn_hidden_size=256), ["ffn"]),
        (dict(group_query_attention=True, num_query_groups=2), {}, ["query_groups"]),
        (ROPE, ROPE | dict(rotary_base=500000), ["rotary_base"]),
        (ROPE, ROPE | dict(use_rope_scaling=True), ["rope_scaling"]),
        (SINKHORN, EXPERTS, [ROUTER]),
        (SINKHORN | dict(moe_router_topk=1), EXPERTS, ["moe_router_topk", ROUTER]),
    ],
)
def test_another_model_is_a_difference(saved, now, names):
    assert found(saved, now) == names
