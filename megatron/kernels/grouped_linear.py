"""Matrix products of experts: consecutive rows of one tensor, each group with its own matrix."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.kernels.linear import input_grad, linear_weight_grad, product


class _GroupedLinear(torch.autograd.Function):
    """A loop over groups; a group without rows costs nothing."""

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, counts: Sequence[int], accumulate_into: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.counts = counts
        ctx.accumulate_into = accumulate_into
        out = x.new_empty(len(x), weight.shape[1])
        for rows, matrix, result in zip(x.split(counts), weight, out.split(counts), strict=True):
            if len(rows):
                result.copy_(product(rows, matrix, None))
        return out

    @staticmethod
    def backward(ctx, grad_out: Tensor):
        x, weight = ctx.saved_tensors
        total = ctx.accumulate_into
        grad_x = torch.empty_like(x)
        grad_weight = torch.zeros_like(weight) if total is None else None
        groups = zip(x.split(ctx.counts), grad_out.split(ctx.counts), strict=True)
        parts = grad_x.split(ctx.counts)
        for number, (rows, grads) in enumerate(groups):
            if not len(rows):
                continue
            parts[number].copy_(input_grad(grads, weight[number]))
            if total is None:
                grad_weight[number] = linear_weight_grad(grads, rows)
            else:
                linear_weight_grad(grads, rows, total[number])
        return grad_x, grad_weight, None, None


def grouped_linear(
    x: Tensor, weight: Tensor, counts: Sequence[int], accumulate_into: Tensor | None = None
) -> Tensor:
    """x [n, in], weight [groups, out, in] -> [n, out]: the first counts[0] rows times weight[0]^T,
    and so on.

    `counts` are numbers on the host whose sum is n. With `accumulate_into` [groups, out, in]
    backward adds the weight gradient there, as in `linear`.
    """
    return _GroupedLinear.apply(x, weight, counts, accumulate_into)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, order: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.copies = copies
        return x[order // copies]

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _gather_copies(grad, *ctx.saved_tensors, ctx.copies), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, order: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.copies = copies
        return _gather_copies(x, order, copies)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (order,) = ctx.saved_tensors
        return grad[order // ctx.copies], None, None


def _gather_copies(x: Tensor, order: Tensor, copies: int) -> Tensor:
    """Each row's copies, added up in their own order."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return x[inverse].view(-1, copies, x.shape[1]).sum(1)


def dispatch(x: Tensor, order: Tensor, copies: int) -> Tensor:
    """`copies` copies of each row of x [n, h], in a given order [n copies], where copy c of row r
    has the number r copies + c. -> [n copies, h]. Adjoint: combine. Deterministic on every
    device."""
    return _Dispatch.apply(x, order, copies)


def combine(x: Tensor, order: Tensor, copies: int) -> Tensor:
    """Sum of each row's copies: x [n copies, h] as `dispatch` made it -> [n, h]."""
    return _Combine.apply(x, order, copies)
