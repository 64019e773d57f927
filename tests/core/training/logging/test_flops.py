"""FLOP counts against formulas of the papers."""

import pytest

from megatron.config.model import ModelConfig
from megatron.training.logging.flops import count_flops

GPT2_345M = dict(
    num_layers=24,
    hidden_size=1024,
    num_attention_heads=16,
    seq_length=1024,
    max_position_embeddings=1024,
)
VOCABULARY = 50304


def flops_per_iteration(batch_size: int, **flags) -> int:
    model = ModelConfig(**GPT2_345M | flags)
    return count_flops(model, VOCABULARY).model * batch_size * model.seq_length


def test_gpt2_equals_megatrons_paper_formula():
    """72 B s L h^2 (1 + s / 6h + V / 12Lh), of Efficient Large-Scale Language Model Training
    (2021), no recompute."""
    b = 8
    s = 1024
    layers = 24
    h = 1024
    v = 50304
    # the paper's 96 counts a recomputed forward; without it 72, and the output layer is 6 B s h V
    expected = 72 * b * s * layers * h * h + 12 * b * s * s * layers * h + 6 * b * s * h * v
    assert flops_per_iteration(b) == expected


@pytest.mark.parametrize("groups", [1, 2, 4, 8, 16])
def test_grouped_queries_follow_megatrons_formula(groups):
    """60 B s L h^2 (1 + g / 5a + s / 5h + V / 10Lh), Megatron-LM's of January 2024."""
    b = 8
    s = 2048
    layers = 24
    h = 1024
    v = 50304
    a = 16
    formula = (
        60 * b * s * layers * h**2 * (1 + groups / (5 * a) + s / (5 * h) + v / (10 * layers * h))
    )
    grouped = dict(group_query_attention=True, num_query_groups=groups)
    counted = flops_per_iteration(b, seq_length=s, max_position_embeddings=s, **grouped)
    assert counted == pytest.approx(formula, rel=1e-14)


def test_ffn_gate_and_head_width_count():
    small = dict(num_layers=2, hidden_size=64, num_attention_heads=4, seq_length=128)

    def counted(**flags):
        return count_flops(ModelConfig(**small, max_position_embeddings=128, **flags), 512)

    wide = counted(ffn_hidden_size=1000)
    narrow = counted(ffn_hidden_size=256)
    gated = counted(ffn_hidden_size=1000, swiglu=True)
    assert wide.linear - narrow.linear == 2 * 2 * 2 * 64 * (1000 - 256)
    assert gated.linear - wide.linear == 2 * 2 * 64 * 1000
    grouped = dict(group_query_attention=True, num_query_groups=2, kv_channels=32)
    heads = counted(ffn_hidden_size=256, **grouped)
    assert heads.linear - narrow.linear == 2 * 2 * 64 * ((128 + 2 * 64 + 128) - 4 * 64)
    assert heads.core == 2 * 2 * (2 * 128 * 128)


def test_the_count_equals_the_matrix_products_of_one_layer():
    """Every product of one Llama-like layer and the output, written out as (rows, inner,
    columns)."""
    s = 32
    h = 48
    f = 100
    a = 6
    g = 2
    d = 8
    v = 300
    products = [(s, h, (a + 2 * g) * d), (s, a * d, h), (s, h, f), (s, h, f), (s, f, h), (s, h, v)]
    products += a * [(s, d, s), (s, s, d)]
    forward = sum(2 * rows * inner * columns for rows, inner, columns in products)
    model = ModelConfig(
        num_layers=1,
        hidden_size=h,
        ffn_hidden_size=f,
        num_attention_heads=a,
        group_query_attention=True,
        num_query_groups=g,
        kv_channels=d,
        swiglu=True,
        seq_length=s,
        max_position_embeddings=s,
    )
    count = count_flops(model, v)
    assert count.forward * s == forward
    assert count.model == 3 * count.forward
