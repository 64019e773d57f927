"""GEMMs of experts: consecutive rows of one tensor, each group with its own matrix; copies of
tokens, and the SwiGLU between the GEMMs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.kernels.activations import swiglu
from megatron.kernels.cpu import experts
from megatron.kernels.linear import input_grad, linear_weight_grad, product


def _in_one_call(x: Tensor, weight: Tensor) -> bool:
    """Whether torch multiplies all groups in one kernel: bf16 on CUDA, rows of 16 bytes."""
    return (
        x.device.type == "cuda"
        and x.dtype == weight.dtype == torch.bfloat16
        and len(x) > 0
        and all(size % 8 == 0 for size in weight.shape[1:])
    )


def _products(x: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """x [n, k], weight [groups, k, m] -> [n, m], in one call."""
    ends = torch.tensor(counts).cumsum(0).to(torch.int32).to(x.device)
    return torch.nn.functional.grouped_mm(x.contiguous(), weight, offs=ends)


class _GroupedLinear(torch.autograd.Function):
    """A loop over groups; a group without rows costs nothing. Weight gradients, which are added to
    where they belong, are always one."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        weight: Tensor,
        counts: Sequence[int],
        accumulate_into: Tensor | None,
        is_first: Callable[[], bool],
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.counts = counts
        ctx.accumulate_into = accumulate_into
        ctx.is_first = is_first
        if _in_one_call(x, weight):
            return _products(x, weight.transpose(1, 2), counts)
        out = x.new_empty(len(x), weight.shape[1])
        for rows, matrix, result in zip(x.split(counts), weight, out.split(counts), strict=True):
            if len(rows):
                result.copy_(product(rows, matrix, None))
        return out

    @staticmethod
    def backward(ctx, grad_out: Tensor):
        x, weight = ctx.saved_tensors
        total = ctx.accumulate_into
        together = _in_one_call(grad_out, weight)
        grad_x = _products(grad_out, weight, ctx.counts) if together else torch.empty_like(x)
        grad_weight = torch.zeros_like(weight) if total is None else None
        if total is not None and ctx.is_first():
            total.zero_()
        groups = zip(x.split(ctx.counts), grad_out.split(ctx.counts), strict=True)
        x_grads = grad_x.split(ctx.counts)
        for number, (rows, grads) in enumerate(groups):
            if not len(rows):
                continue
            if not together:
                x_grads[number].copy_(input_grad(grads, weight[number]))
            group_grad = linear_weight_grad(grads, rows, None if total is None else total[number])
            if grad_weight is not None and group_grad is not None:
                grad_weight[number] = group_grad
        return grad_x, grad_weight, None, None, None


class Copies(NamedTuple):
    """Copies of the rows of a tensor: copy c of row r has the number r per_row + c.

    order [n]: the numbers of those that there are, each at most once. rows: of the tensor.
    """

    order: Tensor
    per_row: int
    rows: int


class _CppGroupedLinear(torch.autograd.Function):
    """`grouped_linear` on a CPU in fp32: no copy of a row is kept or written to memory first."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        weight: Tensor,
        counts: Sequence[int],
        accumulate_into: Tensor | None,
        is_first: Callable[[], bool],
        of: Copies | None,
        to: Copies | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.counts = counts
        ctx.accumulate_into = accumulate_into
        ctx.is_first = is_first
        ctx.copies = of, to
        out = experts.product(x, _sources(of), weight, counts, transposed=True)
        return out if to is None else _add_copies(out, *to)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_out: Tensor):
        x, weight = ctx.saved_tensors
        of, to = ctx.copies
        from_rows = _sources(to)
        grad_x = experts.product(grad_out, from_rows, weight, ctx.counts, transposed=False)
        total = ctx.accumulate_into
        add = total is not None and not ctx.is_first()
        grad_weight = experts.weight_grad(
            grad_out, from_rows, x, _sources(of), ctx.counts, total, add=add
        )
        grad_x = grad_x if of is None else _add_copies(grad_x, *of)
        return grad_x, grad_weight, None, None, None, None, None


def _never() -> bool:
    return False


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    counts: Sequence[int],
    accumulate_into: Tensor | None = None,
    is_first: Callable[[], bool] = _never,
    *,
    of: Copies | None = None,
    to: Copies | None = None,
) -> Tensor:
    """x [n, in], weight [groups, out, in] -> [n, out]: the first counts[0] rows times weight[0]^T,
    and so on.

    `counts` are numbers on the host whose sum is n. With `accumulate_into` [groups, out, in]
    backward adds the weight gradient there, as in `linear`, or replaces what is there if
    `is_first()`. `of`: the rows are these copies of
    x [rows, in] (`dispatch`). `to`: the results of a row's copies are added up, [rows, out]
    (`combine`).
    """
    if experts.multiplies(x, weight, accumulate_into):
        return _CppGroupedLinear.apply(x, weight, counts, accumulate_into, is_first, of, to)
    rows = x if of is None else dispatch(x, of.order, of.per_row)
    y = _GroupedLinear.apply(rows, weight, counts, accumulate_into, is_first)
    return y if to is None else combine(y, *to)


class _WeightedSwiGlu(torch.autograd.Function):
    """Keeps its inputs alone."""

    @staticmethod
    def forward(ctx, gate_up: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up, weights)
        return experts.swiglu(gate_up, weights)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_out: Tensor):
        gate_up, weights = ctx.saved_tensors
        return experts.swiglu_grad(gate_up, weights, grad_out)


def weighted_swiglu(
    gate_up: Tensor,
    weights: Tensor,
    fused: bool = True,
    plain: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """SwiGLU, each row times its weight: gate_up [n, 2, ffn] (gate first), weights [n] -> [n, ffn].

    `fused` False: operation by operation on every device. `plain`: the SwiGLU without weights.
    """
    if fused and weights.dtype == torch.float32 and experts.runs(gate_up):
        return _WeightedSwiGlu.apply(gate_up, weights)
    rows = swiglu(gate_up, fused) if plain is None else plain(gate_up)
    return (rows * weights.unsqueeze(-1)).to(gate_up.dtype)


def _sources(copies: Copies | None) -> Tensor | None:
    """Of each copy the number of its row."""
    return None if copies is None else copies.order // copies.per_row


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, order: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.sizes = copies, len(x)
        return x[order // copies]

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _add_copies(grad, *ctx.saved_tensors, *ctx.sizes), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, order: Tensor, copies: int, rows: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.copies = copies
        return _add_copies(x, order, copies, rows)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (order,) = ctx.saved_tensors
        return grad[order // ctx.copies], None, None, None


def _add_copies(x: Tensor, order: Tensor, copies: int, rows: int) -> Tensor:
    """The copies of each row, added up in their own order; missing ones are 0."""
    total = rows * copies
    cpp = experts.runs(x)
    inverse = torch.full((total,), -1 if cpp else len(order), device=order.device)
    inverse[order] = torch.arange(len(order), device=order.device)
    if cpp:
        return experts.sum_rows(x, inverse.view(rows, copies))
    if len(order) < total:
        x = torch.cat((x, x.new_zeros(1, x.shape[1])))
    return x[inverse].view(rows, copies, x.shape[1]).sum(1)


def dispatch(x: Tensor, order: Tensor, copies: int) -> Tensor:
    """Copies of the rows of x [n, h], in a given order: copy c of row r has the number r copies + c
    and is there at most once. -> [len(order), h]. Adjoint: combine. Deterministic on every
    device."""
    return _Dispatch.apply(x, order, copies)


def combine(x: Tensor, order: Tensor, copies: int, rows: int | None = None) -> Tensor:
    """Sum of each row's copies: x [len(order), h] as `dispatch` made it -> [rows, h], by default of
    all copies."""
    return _Combine.apply(x, order, copies, len(order) // copies if rows is None else rows)
