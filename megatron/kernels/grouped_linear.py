"""GEMMs of experts: consecutive rows of one tensor, each group with its own matrix; copies of
tokens, and the SwiGLU between the GEMMs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from megatron.cuda import has_grouped_gemm
from megatron.kernels.cpu import experts
from megatron.kernels.cuda.availability import fused_ops
from megatron.kernels.gated_activations import swiglu
from megatron.kernels.linear import input_grad, linear_weight_grad, product


def in_one_call(weight: Tensor) -> bool:
    """Whether all groups of weight [groups, ..., in] are one kernel, which reads their sizes on the
    device: in bf16, with rows of 16 bytes."""
    return (
        has_grouped_gemm(weight.device)
        and weight.dtype == torch.bfloat16
        and all(size % 8 == 0 for size in weight.flatten(1, -2).shape[1:])
        and fused_ops(weight.device, weight.dtype) is not None
    )


class _InOneCall(torch.autograd.Function):
    """A kernel for all groups, and one for their weight gradients: `ends` is on the device. Rows
    behind the last group have undefined results."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        weight: Tensor,
        ends: Tensor,
        accumulate_into: Tensor | None,
        is_first: Callable[[], bool],
    ) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, weight, ends)
        ctx.accumulate_into = accumulate_into
        ctx.is_first = is_first
        return grouped_mm(x, weight.transpose(1, 2), offs=ends)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_out: Tensor):
        x, weight, ends = ctx.saved_tensors
        grad_out = grad_out.contiguous()
        total = ctx.accumulate_into
        grad_x = grouped_mm(grad_out, weight, offs=ends)
        if not ctx.needs_input_grad[1]:
            return grad_x, None, None, None, None
        if total is None:
            return grad_x, grouped_mm(grad_out.t(), x, offs=ends), None, None, None
        add = not ctx.is_first()
        torch.ops.megatron.add_grouped_product_(total, grad_out, x, ends, add)
        return grad_x, None, None, None, None


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
        needs_weight = ctx.needs_input_grad[1]
        grad_weight = torch.zeros_like(weight) if total is None and needs_weight else None
        if total is not None and ctx.is_first():
            total.zero_()
        groups = zip(x.split(ctx.counts), grad_out.split(ctx.counts), strict=True)
        x_grads = grad_x.split(ctx.counts)
        for number, (rows, grads) in enumerate(groups):
            if not len(rows):
                continue
            x_grads[number].copy_(input_grad(grads, weight[number]))
            if not needs_weight:
                continue
            group_grad = linear_weight_grad(grads, rows, None if total is None else total[number])
            if grad_weight is not None and group_grad is not None:
                grad_weight[number] = group_grad
        return grad_x, grad_weight, None, None, None


Counts = Sequence[int] | Tensor  # of rows in each group, or where groups end (grouped_linear)


class Copies(NamedTuple):
    """Copies of the rows of a tensor: copy c of row r has the number r per_row + c.

    sources [n]: of each copy that there is, in their order, its row. places [rows, per_row]: where
    each is, -1 where it is missing. complete: none is missing.
    """

    sources: Tensor
    places: Tensor
    complete: bool

    @classmethod
    def of(cls, order: Tensor, per_row: int, rows: int, count: Tensor | None = None) -> Copies:
        """Those with the numbers `order` [n], each at most once, of so many rows; with `count` (on
        the device) only so many of them."""
        places = torch.arange(len(order), device=order.device)
        if count is not None:
            places = places.where(places < count, -1)
        all_places = torch.full((rows * per_row,), -1, device=order.device)
        all_places[order] = places
        complete = count is None and len(order) == len(all_places)
        return cls(order // per_row, all_places.view(rows, per_row), complete)

    def single(self, order: Tensor) -> Copies:
        """The same copies of a tensor that has a row for each."""
        return Copies(order, self.places.view(-1, 1), self.complete)


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
        sources = None if of is None else of.sources
        out = experts.product(x, sources, weight, counts, transposed=True)
        return out if to is None else _add_copies(out, to)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_out: Tensor):
        x, weight = ctx.saved_tensors
        of, to = ctx.copies
        sources, from_rows = (None if copies is None else copies.sources for copies in (of, to))
        grad_x = experts.product(grad_out, from_rows, weight, ctx.counts, transposed=False)
        total = ctx.accumulate_into
        grad_weight = None
        if ctx.needs_input_grad[1]:
            add = total is not None and not ctx.is_first()
            grad_weight = experts.weight_grad(
                grad_out, from_rows, x, sources, ctx.counts, total, add=add
            )
        grad_x = grad_x if of is None else _add_copies(grad_x, of)
        return grad_x, grad_weight, None, None, None, None, None


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    counts: Counts,
    accumulate_into: Tensor | None = None,
    is_first: Callable[[], bool] = lambda: False,
    *,
    of: Copies | None = None,
    to: Copies | None = None,
) -> Tensor:
    """x [n, in], weight [groups, out, in] -> [n, out]: the first counts[0] rows times weight[0]^T,
    and so on.

    `counts` are numbers on the host whose sum is n, or where `in_one_call` is true int32 numbers on
    the device: where each group ends; results of rows behind the last one are undefined. With
    `accumulate_into` [groups, out, in] backward adds the weight gradient there, as in `linear`, or
    replaces what is there if `is_first()`. `of`: the rows are these copies of x [rows, in]
    (`dispatch`). `to`: the results of a row's copies are added up, [rows, out] (`combine`).
    """
    if not isinstance(counts, Tensor) and experts.multiplies(x, weight, accumulate_into):
        return _CppGroupedLinear.apply(x, weight, counts, accumulate_into, is_first, of, to)
    rows = x if of is None else dispatch(x, of)
    function = _InOneCall if isinstance(counts, Tensor) else _GroupedLinear
    y = function.apply(rows, weight, counts, accumulate_into, is_first)
    return y if to is None else combine(y, to)


class _AddBias(torch.autograd.Function):
    """Sums of gradients are in fp32 at least, in the order of the rows on every device."""

    @staticmethod
    def forward(ctx, x: Tensor, bias: Tensor, ends: Tensor, weights: Tensor | None) -> Tensor:
        groups = torch.searchsorted(ends, torch.arange(len(x), device=x.device), right=True)
        groups = groups.clamp_(max=len(bias) - 1)  # of rows behind the last group
        ctx.save_for_backward(bias, groups, ends, weights)
        rows = bias[groups]
        return (x + (rows if weights is None else rows * weights.unsqueeze(1))).to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_out: Tensor):
        bias, groups, ends, weights = ctx.saved_tensors
        grads = grad_out.to(torch.promote_types(grad_out.dtype, torch.float32))
        grad_weights = None
        if weights is not None:
            grad_weights = (grads * bias[groups]).sum(1).to(weights.dtype)
            grads = grads * weights.unsqueeze(1)
        offsets = torch.cat((ends.new_zeros(1), ends))
        sums = torch.segment_reduce(grads, "sum", offsets=offsets, unsafe=True)
        return grad_out, sums.to(bias.dtype), None, grad_weights


def add_bias(x: Tensor, bias: Tensor, counts: Counts, weights: Tensor | None = None) -> Tensor:
    """x [n, out] and, of each of its groups (`counts`, as `grouped_linear`'s), a row of bias
    [groups, out], times weights [n]."""
    if isinstance(counts, Tensor):
        ends = counts
    else:
        ends = torch.tensor(counts, device=x.device).cumsum(0)
    return _AddBias.apply(x, bias, ends, weights)


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
    if fused and weights.dtype == torch.float32:
        if experts.runs(gate_up):
            return _WeightedSwiGlu.apply(gate_up, weights)
        if ops := fused_ops(gate_up.device, gate_up.dtype):
            return ops.SwiGlu.apply(gate_up, weights)
    rows = swiglu(gate_up, fused) if plain is None else plain(gate_up)
    return (rows * weights.unsqueeze(-1)).to(gate_up.dtype)


class _Move(torch.autograd.Function):
    """Copies of rows or, `back`, the sums of these copies; each is the adjoint of the other."""

    @staticmethod
    def forward(ctx, x: Tensor, copies: Copies, back: bool) -> Tensor:
        ctx.save_for_backward(copies.sources, copies.places)
        ctx.way = copies.complete, back
        return _add_copies(x, copies) if back else x[copies.sources]

    @staticmethod
    def backward(ctx, grad: Tensor):
        sources, places = ctx.saved_tensors
        complete, back = ctx.way
        return _Move.apply(grad, Copies(sources, places, complete), not back), None, None


def _add_copies(x: Tensor, copies: Copies) -> Tensor:
    """The copies of each row, added up in their own order; missing ones are 0."""
    if experts.runs(x):
        return experts.sum_rows(x, copies.places)
    if x.shape[1] > 1 and fused_ops(x.device, x.dtype):
        return torch.ops.megatron.sum_rows(x, copies.places)
    if not copies.complete:  # -1 is the last
        x = torch.cat((x, x.new_zeros(1, x.shape[1])))
    return x[copies.places].sum(1)


def dispatch(x: Tensor, copies: Copies) -> Tensor:
    """Copies of the rows of x [n, h] -> [number of copies, h]. Deterministic on every device."""
    return _Move.apply(x, copies, False)


def combine(x: Tensor, copies: Copies) -> Tensor:
    """Sum of each row's copies: x [number of copies, h] as `dispatch` made it -> [rows, h]."""
    return _Move.apply(x, copies, True)
