"""Queries, keys and values as parts of one tensor, the output of one linear layer, and their
gradients likewise."""

import torch
from torch import Tensor

from megatron.kernels.cpu.blocking import FEW
from megatron.kernels.cuda.availability import arranged


def split_qkv(qkv: Tensor, queries_per_group: int) -> tuple[Tensor, Tensor, Tensor]:
    """qkv [s, b, g, queries_per_group + 2, d] -> queries [s, b, n, d], keys and values [s, b, g,
    d], as views if it can be.

    Gradients that `gradients_like` has placed next to each other are taken as they are; others are
    copied together.
    """
    if queries_per_group == 1 and not torch.compiler.is_compiling():
        few = qkv.device.type == "cpu" and qkv.numel() < FEW
        q, k, v = qkv.unbind(3) if few else _Split.apply(qkv)
        return q, k, v
    q, k, v = qkv.split((queries_per_group, 1, 1), dim=3)
    return q.flatten(2, 3), k.squeeze(3), v.squeeze(3)


class _Split(torch.autograd.Function):
    """[s, b, n, 3, d] -> three of [s, b, n, d]."""

    @staticmethod
    def forward(ctx, qkv: Tensor) -> tuple[Tensor, ...]:
        return qkv.unbind(3)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> Tensor:
        if _neighbours(*grads):
            s, b, n, d = grads[0].shape
            return grads[0].as_strided((s, b, n, 3, d), (b * n * 3 * d, n * 3 * d, 3 * d, d, 1))
        return torch.stack([arranged(grad, False) for grad in grads], 3)


def _neighbours(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Are they the three parts of one contiguous tensor [s, b, n, 3, d]?"""
    _, b, n, d = q.shape
    step = d * q.element_size()
    return (
        q.shape == k.shape == v.shape
        and q.dtype == k.dtype == v.dtype
        and q.stride() == k.stride() == v.stride() == (b * n * 3 * d, n * 3 * d, 3 * d, 1)
        and q.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
        and k.data_ptr() - q.data_ptr() == v.data_ptr() - k.data_ptr() == step
    )


def gradients_like(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Memory for the gradients of q [s, b, n, d], k and v [s, b, g, d]: parts of one tensor where
    these are."""
    if not _neighbours(q, k, v):
        return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v)]
    s, b, n, d = q.shape
    return list(q.new_empty(s, b, n, 3, d).unbind(3))


def contiguous_vectors(t: Tensor) -> Tensor:
    """`t` with the elements of each head's vector next to each other, as the C++ reads them."""
    return t if t.stride(-1) == 1 or t.numel() == 0 else t.contiguous()


def sizes(q: Tensor, k: Tensor) -> tuple[int, ...]:
    """s, b, n, g, d of q [s, b, n, d] and k [s, b, g, d]."""
    s, b, n, d = q.shape
    return s, b, n, k.shape[2], d
