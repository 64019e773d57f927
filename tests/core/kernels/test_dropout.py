"""Dropout: exact rates, masks that are pure functions of the seed, streams that have nothing to do
with each other."""

import pytest
import torch

from megatron.kernels.cpu import native
from megatron.kernels.dropout import CHUNK_ELEMENTS, DropoutBits
from tests.core.kernels.functional import dropout

CPU = torch.device("cpu")
MANY = 3 * CHUNK_ELEMENTS + 17  # several chunks and a short last one that is no multiple of a draw


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_an_element_is_dropped_or_scaled(dtype):
    x = torch.randn(40, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
    y = dropout(x, 0.1, 5)
    assert y.dtype == dtype and y.shape == x.shape
    kept = y != 0
    assert 0 < kept.sum() < kept.numel()
    exact = x.double()[kept] / 0.9
    torch.testing.assert_close(y.double()[kept], exact, rtol=torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 15, 16, 50, MANY])
def test_the_cpp_and_torch_give_the_same_bits(monkeypatch, dtype, n):
    x = torch.randn(n, generator=torch.Generator().manual_seed(0)).to(dtype)
    if reason := native.unavailable_reason(x.device, dtype):
        pytest.skip(reason)
    names = []
    real = native._call
    monkeypatch.setattr(
        native, "_call", lambda name, *arguments: names.append(name) or real(name, *arguments)
    )
    for p in (0.1, 0.5, 1e-5, 1 - 2**-16):
        with monkeypatch.context() as patch:
            patch.setattr(native, "unavailable_reason", lambda *_: "not built")
            wanted = dropout(x, p, 5)
        assert not names
        bits = torch.int16 if dtype == torch.bfloat16 else torch.int32
        assert torch.equal(dropout(x, p, 5).view(bits), wanted.view(bits))  # signs of zeros too
        assert "drop" in names
        names.clear()


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 1 / 3])
def test_the_rate_is_p(p):
    kept = dropout(torch.ones(MANY), p, 11).count_nonzero().item()
    assert abs(kept - MANY * (1 - p)) < 5 * (MANY * p * (1 - p)) ** 0.5


@pytest.mark.parametrize("p", [1e-5, 1 - 1e-4])
def test_the_rate_is_p_also_between_two_steps_of_sixteen_bits(p):
    n = 1 << 24
    kept = DropoutBits(3, p, CPU).keep(n, torch.int16).count_nonzero().item()
    assert abs(kept - n * (1 - p)) < 5 * (n * p * (1 - p)) ** 0.5


def test_every_lane_and_position_of_a_draw_is_used_alike():
    keep = DropoutBits(8, 0.3, CPU).keep(1 << 20, torch.float32).view(-1, 4)
    torch.testing.assert_close(
        keep.mean(0), torch.full((4,), 0.7), rtol=0, atol=5 * (0.21 / (1 << 18)) ** 0.5
    )


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return torch.corrcoef(torch.stack((a, b)))[0, 1].item()


@pytest.mark.parametrize("other", [8, 7 + 2**32, 7 + 2**62, 7 * 2**31])
def test_streams_of_distinct_seeds_are_independent(other):
    one, two = (DropoutBits(seed, 0.5, CPU).keep(MANY, torch.float32) for seed in (7, other))
    assert abs(correlation(one, two)) < 5 / MANY**0.5


def test_neighbours_and_chunks_of_one_stream_are_independent():
    keep = DropoutBits(7, 0.5, CPU).keep(MANY, torch.float32)
    for lag in (1, 2, 3, 4, CHUNK_ELEMENTS):
        assert abs(correlation(keep[lag:], keep[:-lag])) < 5 / (MANY - lag) ** 0.5


def test_the_mask_is_a_pure_function_of_seed_and_shape():
    x = torch.ones(MANY)
    first = dropout(x, 0.1, 5)
    torch.manual_seed(99)
    state = torch.random.get_rng_state()
    dropout(x, 0.1, 6)
    assert torch.equal(dropout(x, 0.1, 5), first)
    assert torch.equal(dropout(x.view(-1, 1).transpose(0, 1), 0.1, 5).flatten(), first)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not torch.equal(dropout(x, 0.1, 6), first)


def test_gradcheck():
    x = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: dropout(x, 0.4, 9), x)


def test_p_of_zero_is_the_identity_and_p_of_one_is_refused():
    x = torch.ones(3)
    assert dropout(x, 0.0, 1) is x
    with pytest.raises(AssertionError, match="1.0"):
        dropout(x, 1.0, 1)
