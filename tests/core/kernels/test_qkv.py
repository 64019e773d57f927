"""Queries, keys and values out of one tensor: the parts, and gradients that are or are not parts of
one tensor."""

import pytest
import torch

from megatron.kernels import qkv as module
from megatron.kernels.qkv import gradients_like, split_qkv


def parts(qkv, r):
    """As torch splits it."""
    q, k, v = qkv.split((r, 1, 1), dim=3)
    return q.flatten(2, 3), k.squeeze(3), v.squeeze(3)


@pytest.mark.parametrize("r", [1, 3])
@pytest.mark.parametrize("placed", [True, False])
def test_split_and_its_gradient(monkeypatch, r, placed):
    monkeypatch.setattr(module, "FEW", 0)
    qkv = torch.randn(5, 2, 3, r + 2, 4, dtype=torch.float64, requires_grad=True)
    found = split_qkv(qkv, r)
    expected = parts(qkv, r)
    grads = [torch.randn_like(t) for t in expected]
    if placed:
        memory = gradients_like(*found)
        for place, grad in zip(memory, grads, strict=True):
            place.copy_(grad)
        given = memory
    else:
        given = grads
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    [mine] = torch.autograd.grad(found, qkv, given)
    [right] = torch.autograd.grad(expected, qkv, grads)
    assert torch.equal(mine, right)
    assert (mine.data_ptr() == given[0].data_ptr()) == (placed and r == 1)


def test_a_part_that_is_not_used_has_no_gradient():
    qkv = torch.randn(3, 1, 2, 3, 4, requires_grad=True)
    q, _, v = split_qkv(qkv, 1)
    (q.sum() + 2 * v.sum()).backward()
    assert qkv.grad.sum((0, 1, 2, 4)).tolist() == [24.0, 0.0, 48.0]


def test_parts_of_other_tensors_do_not_get_one_tensor():
    q, k, v = (torch.randn(3, 2, 2, 4) for _ in range(3))
    assert all(t.is_contiguous() for t in gradients_like(q, k, v))
    q, k, v = torch.randn(3, 2, 2, 3, 4).unbind(3)
    assert all(t.is_contiguous() for t in gradients_like(q, v, k))
    assert all(t.is_contiguous() for t in gradients_like(q[..., :2], k[..., :2], v[..., :2]))
