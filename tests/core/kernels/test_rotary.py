"""Rotary embedding against complex numbers in fp64, and its promise: scores depend on distances
alone."""

import pytest
import torch

from megatron.kernels.cpu import blocking, native
from megatron.kernels.rotary import slowed
from tests.core.kernels.functional import apply_rotary, rotary_tables

S = 9
B = 2
N = 3
D = 8


@pytest.fixture(autouse=True, params=[1 << 18, 100, None], ids=["one run", "many runs", "C++"])
def run_of_rows(request, monkeypatch):
    if request.param:
        monkeypatch.setattr(blocking, "BLOCK_ELEMENTS", request.param)
        monkeypatch.setattr(native, "unavailable_reason", lambda *_: "not built")


def formula(
    x: torch.Tensor, positions: torch.Tensor, dim: int, base: float, interleaved: bool
) -> torch.Tensor:
    """Pairs as complex numbers times exp(i position base^(-2 j / dim)); positions [b, s]."""
    x, out = x.double(), x.double().clone()
    for pair in range(dim // 2):
        i, j = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + dim // 2)
        angle = positions.t().double()[..., None] * base ** (-2 * pair / dim)
        turned = torch.complex(x[..., i], x[..., j]) * torch.polar(torch.ones_like(angle), angle)
        out[..., i], out[..., j] = turned.real, turned.imag
    return out


@pytest.mark.parametrize("runs_pay_off", [True, False])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dim", [D, D // 2])
@pytest.mark.parametrize("per_sample", [False, True])
def test_rotation_is_the_formula(monkeypatch, per_sample, dim, interleaved, runs_pay_off):
    monkeypatch.setattr("megatron.kernels.rows.pays_off", lambda _: runs_pay_off)
    x = torch.randn(S, B, N, D, dtype=torch.float64)
    positions = torch.randint(0, 5000, (B, S)) if per_sample else torch.arange(S).expand(B, S)
    tables = rotary_tables(positions if per_sample else S, dim, base=500.0, dtype=torch.float64)
    assert tables[0].shape == ((S, B, dim // 2) if per_sample else (S, dim // 2))
    torch.testing.assert_close(
        apply_rotary(x, *tables, interleaved),
        formula(x, positions, dim, 500.0, interleaved),
        rtol=1e-12,
        atol=1e-12,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_low_precision_is_rotated_in_fp32_and_rounded_once(dtype, interleaved):
    x = torch.randn(S, B, N, D).to(dtype)
    out = apply_rotary(x, *rotary_tables(S, D), interleaved)
    assert out.dtype == dtype
    exact = formula(x, torch.arange(S).expand(B, S), D, 10000.0, interleaved)
    torch.testing.assert_close(out.double(), exact, rtol=torch.finfo(dtype).eps * 0.501, atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradcheck_and_views_of_a_fused_tensor(interleaved):
    tables = rotary_tables(4, 4, dtype=torch.float64)
    x = torch.randn(4, 1, 2, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: apply_rotary(x, *tables, interleaved), x)
    fused = torch.randn(4, 1, 2, 18, dtype=torch.float64)
    assert torch.equal(
        apply_rotary(fused[..., 6:12], *tables, interleaved),
        apply_rotary(fused[..., 6:12].contiguous(), *tables, interleaved),
    )


def test_scores_depend_on_the_distance_alone():
    q, k = torch.randn(2, 1, 1, 1, D, dtype=torch.float64)
    tables = lambda p: rotary_tables(torch.tensor([p]), D, dtype=torch.float64)  # noqa: E731
    score = lambda i, j: (apply_rotary(q, *tables(i)) * apply_rotary(k, *tables(j))).sum()  # noqa: E731
    torch.testing.assert_close(score(3, 1), score(1003, 1001))
    assert (score(3, 1) - score(3, 2)).abs() > 1e-6


def test_positions_one_by_one_are_the_length():
    for one, other in zip(rotary_tables(S, D), rotary_tables(torch.arange(S), D), strict=True):
        assert torch.equal(one, other)


def test_positions_are_divided_by_the_interpolation_factor():
    for one, other in zip(
        rotary_tables(S, D, interpolation_factor=4),
        rotary_tables(torch.arange(S) / 4, D),
        strict=True,
    ):
        assert torch.equal(one, other)


def test_tables_of_far_positions_are_exact():
    """In fp32 an angle near 10^4 is off by up to 5e-4."""
    cos, sin = rotary_tables(torch.tensor([1_000_003]), 4)
    exact = torch.tensor([1_000_003, 10_000.03], dtype=torch.float64)
    torch.testing.assert_close(cos[0].double(), exact.cos(), rtol=0, atol=6e-8)
    torch.testing.assert_close(sin[0].double(), exact.sin(), rtol=0, atol=6e-8)


def test_an_odd_number_of_dimensions_is_refused():
    with pytest.raises(AssertionError, match="even"):
        rotary_tables(S, 3)


def test_slow_frequencies_are_slowed_and_fast_ones_kept():
    """By turns in 8,192 positions: under 1 a factor of 8 slower, over 4 as they were, between them
    linear in the turns."""
    turns = torch.tensor([0.1, 0.99, 1.0, 2.5, 4.0, 4.01, 900.0], dtype=torch.float64)
    frequencies = turns * 2 * torch.pi / 8192
    wanted = torch.tensor([1 / 8, 1 / 8, 1 / 8, (1 / 8 + 1) / 2, 1, 1, 1], dtype=torch.float64)
    torch.testing.assert_close(slowed(frequencies, 8.0) / frequencies, wanted, rtol=1e-12, atol=0)
    plain, scaled = (
        rotary_tables(torch.tensor([1000]), 8, scaling_factor=factor) for factor in (None, 8.0)
    )
    assert torch.equal(plain[0][:, :2], scaled[0][:, :2]) and not torch.equal(
        plain[0][:, -1], scaled[0][:, -1]
    )
