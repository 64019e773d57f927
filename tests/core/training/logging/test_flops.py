"""FLOP counts against formulas of the papers."""

import pytest

from megatron.training.logging.flops import (
    TransformerShape,
    count_flops,
    flops_per_iteration,
)

GPT2_345M = TransformerShape(24, 1024, 4096, 16, 16, 64, False, 50304, 1024)


def megatron_flops_per_iteration(shape: TransformerShape, batch_size: int) -> int:
    """Megatron-LM's formula of January 2024: as `flops_per_iteration`, but for ffn = 4 h and
    kv_channels = h / heads.

    60 B s L h^2 (1 + g / 5a + s / 5h + V / 10Lh) with g query groups and a heads.
    """
    h = shape.hidden_size
    layers = shape.num_layers
    seq = shape.seq_length
    keys = h * shape.num_query_groups // shape.num_attention_heads
    per_token = (
        60 * layers * h * h
        + 12 * layers * h * keys
        + 12 * layers * h * seq
        + 6 * h * shape.vocab_size
    )
    return per_token * batch_size * seq


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
    assert (
        flops_per_iteration(GPT2_345M, b) == expected == megatron_flops_per_iteration(GPT2_345M, b)
    )


@pytest.mark.parametrize("groups", [1, 2, 4, 8, 16])
def test_grouped_queries_follow_megatrons_formula(groups):
    shape = TransformerShape(24, 1024, 4096, 16, groups, 64, False, 50304, 2048)
    b = 8
    s = 2048
    layers = 24
    h = 1024
    v = 50304
    a = 16
    formula = (
        60 * b * s * layers * h**2 * (1 + groups / (5 * a) + s / (5 * h) + v / (10 * layers * h))
    )
    assert megatron_flops_per_iteration(shape, b) == pytest.approx(formula, rel=1e-14)
    assert flops_per_iteration(shape, b) == megatron_flops_per_iteration(shape, b)


def test_ffn_gate_and_head_width_count_only_in_the_exact_figure():
    wide = TransformerShape(2, 64, 1000, 4, 4, 16, False, 512, 128)
    narrow = TransformerShape(2, 64, 256, 4, 4, 16, False, 512, 128)
    gated = TransformerShape(2, 64, 1000, 4, 4, 16, True, 512, 128)
    assert megatron_flops_per_iteration(wide, 1) == megatron_flops_per_iteration(gated, 1)
    assert count_flops(wide).mlp - count_flops(narrow).mlp == 2 * 2 * 2 * 64 * (1000 - 256)
    assert 2 * count_flops(gated).mlp == 3 * count_flops(wide).mlp
    heads = TransformerShape(2, 64, 256, 4, 2, 32, False, 512, 128)
    assert count_flops(heads).attention_linear == 2 * 2 * 64 * (128 + 2 * 64 + 128)
    assert count_flops(heads).attention_core == 2 * 2 * (2 * 128 * 128)


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
    count = count_flops(TransformerShape(1, h, f, a, g, d, True, v, s))
    assert count.forward * s == forward
    assert count.model == 3 * count.forward
