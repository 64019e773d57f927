"""Norm, clipping and zero count against torch and float64, and the accuracy that layouts rely
on."""

import copy
import math

import pytest
import torch

from megatron.optimizer import clip_grads


def tensors(seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(3,), (), (1024,), (1025,), (7, 13), (2, 40, 33), (300, 77), (2048,)]
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 20.0, 1e4])
def test_norm_and_clipping_equal_torch(dtype, max_norm):
    mine = tensors(dtype=dtype)
    theirs = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in mine]
    for param, grad in zip(theirs, mine, strict=True):
        param.grad = grad.clone()
    before = copy.deepcopy(mine)
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm).item()
    norm = clip_grads.global_norm(mine).item()
    tolerance = 1e-12 if dtype is torch.float64 else 1e-6
    assert norm == pytest.approx(expected, rel=tolerance)
    coefficient = clip_grads.clip_coefficient(norm, max_norm)
    assert (coefficient == 1.0) is (norm + 1e-6 <= max_norm)
    clip_grads.scale_gradients(mine, coefficient)
    for grad, old, param in zip(mine, before, theirs, strict=True):
        torch.testing.assert_close(
            grad, param.grad, rtol=2e-6 if dtype is torch.float32 else 1e-12, atol=0.0
        )
        assert torch.equal(grad, old) is (coefficient == 1.0)


def test_a_norm_over_millions_of_fp32_elements_keeps_its_digits():
    grad = torch.randn(5_000_003, generator=torch.Generator().manual_seed(3)) * 1e-4
    exact = grad.double().square().sum().sqrt().item()
    assert clip_grads.global_norm([grad]).item() == pytest.approx(exact, rel=1e-7)


def test_the_norm_does_not_depend_on_how_tensors_are_cut():
    whole = torch.randn(4096, 33, generator=torch.Generator().manual_seed(4))
    cut = [piece.contiguous() for piece in whole.split([1000, 1, 2000, 1095])]
    assert clip_grads.global_norm(cut).item() == pytest.approx(
        clip_grads.global_norm([whole]).item(), rel=1e-8
    )


def test_the_norm_of_strided_gradients():
    whole = torch.randn(64, 33, generator=torch.Generator().manual_seed(5))
    strided = whole[:, ::2]
    assert clip_grads.global_norm([strided]).item() == pytest.approx(
        clip_grads.global_norm([strided.contiguous()]).item(), rel=1e-7
    )


def test_without_the_cpp_the_norm_is_the_same(monkeypatch):
    grads = tensors()
    expected = clip_grads.global_norm(grads).item()
    monkeypatch.setattr(clip_grads.native, "runs", lambda grad: False)
    monkeypatch.setattr(clip_grads, "BLOCK", 7)
    assert clip_grads.global_norm(grads).item() == pytest.approx(expected, rel=1e-7)


def test_other_ranks_come_in_through_the_reduction():
    parts = [tensors(seed) for seed in range(3)]
    alone = math.sqrt(sum(grad.double().square().sum().item() for part in parts for grad in part))
    total = sum(clip_grads.sum_of_squares(part) for part in parts)
    assert clip_grads.global_norm(parts[0], lambda mine: total).item() == pytest.approx(
        alone, rel=1e-7
    )
    assert clip_grads.global_norm([], lambda mine: mine + total).item() == pytest.approx(
        alone, rel=1e-7
    )
    assert clip_grads.count_zeros([torch.zeros(3), torch.ones(2)], lambda mine: mine + 4) == 7
    assert clip_grads.count_zeros([], lambda mine: mine + 4) == 4


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_element_anywhere_makes_the_sum_not_finite(bad):
    for which in range(8):
        grads = tensors()
        grads[which].view(-1)[-1] = bad
        assert not math.isfinite(clip_grads.sum_of_squares(grads).item()), which


def test_a_nan_norm_does_not_scale():
    assert clip_grads.clip_coefficient(math.nan, 1.0) == 1.0
    assert clip_grads.clip_coefficient(math.inf, 1.0) == 0.0


def test_zeros_are_exact_zeros_of_either_sign():
    assert clip_grads.count_zeros([torch.tensor([0.0, -0.0, 1e-45, 2.0]), torch.zeros(2, 3)]) == 8
