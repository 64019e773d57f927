"""Collectives with their autograd adjoints: all-reduce, all-gather, reduce-scatter, broadcast. On
an axis of size 1 each returns its input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist  # noqa: TID251

from megatron.parallel.context import Axis

Value = TypeVar("Value")
# torch 2.13 renames these two; torch 2.11 has only the old names.
_NEW_NAMES = hasattr(dist, "all_gather_single") and hasattr(dist, "reduce_scatter_single")
_gather_into = dist.all_gather_single if _NEW_NAMES else dist.all_gather_into_tensor
_scatter_into = dist.reduce_scatter_single if _NEW_NAMES else dist.reduce_scatter_tensor


class Pending:
    """Communication in progress over an axis: calling it waits and returns the result."""

    def __init__(self, works: list[Any], result: Callable[[], torch.Tensor], axis: Axis):
        self._works = works
        self._result = result
        self.axis = axis

    @property
    def arrived(self) -> bool:
        """Whether a call would return without waiting."""
        return all(work.is_completed() for work in self._works)

    def __call__(self) -> torch.Tensor:
        for work in self._works:
            work.wait()
        return self._result()


def all_reduce_(x: torch.Tensor, axis: Axis, op: str = "sum") -> torch.Tensor:
    """Reduce `x` in place over the axis with `sum`, `max` or `min`; returns it."""
    if axis.size > 1 and op == "sum":
        return start_all_reduce(x, axis)()
    if axis.size > 1:
        dist.all_reduce(x, getattr(dist.ReduceOp, op.upper()), group=axis.group)
    return x


def all_reduce(x: torch.Tensor, axis: Axis, op: str = "sum") -> torch.Tensor:
    """The reduction of `x` over the axis; `x` itself does not change."""
    return x if axis.size == 1 else all_reduce_(x.clone(), axis, op)


def all_gather(x: torch.Tensor, axis: Axis, dim: int = 0) -> torch.Tensor:
    """The shards of all ranks of the axis, joined along `dim`. Adjoint: reduce_scatter."""
    if axis.size == 1:
        return x
    return start_all_gather(x.movedim(dim, 0), axis)().movedim(0, dim)


def reduce_scatter(x: torch.Tensor, axis: Axis, dim: int = 0) -> torch.Tensor:
    """My part, along `dim`, of the sum over the axis. Adjoint: all_gather."""
    if axis.size == 1:
        return x
    return start_reduce_scatter(x.movedim(dim, 0), axis)().movedim(0, dim)


def start_all_reduce(x: torch.Tensor, axis: Axis) -> Pending:
    """Start an all-reduce (sum) of `x` in place over an axis of several ranks; the function waits
    for it and returns it."""
    return Pending([dist.all_reduce(x, group=axis.group, async_op=True)], lambda: x, axis)


def start_all_gather(x: torch.Tensor, axis: Axis) -> Pending:
    """Start an all-gather along dim 0 over several ranks; the function waits and returns the
    result."""
    x = x.contiguous()
    out = x.new_empty((axis.size * x.shape[0], *x.shape[1:]))
    return Pending([_gather_into(out, x, group=axis.group, async_op=True)], lambda: out, axis)


def start_all_gather_(x: torch.Tensor, axis: Axis) -> Pending:
    """Start an all-gather into `x`, of which this rank holds its part along dim 0.

    gloo's own all-gather copies everything and takes three times as long as exchanging the parts.
    """
    chunks = x.chunk(axis.size)
    if dist.get_backend(axis.group) != "gloo":
        return Pending(
            [_gather_into(x, chunks[axis.rank], group=axis.group, async_op=True)], lambda: x, axis
        )
    works = []
    for rank, chunk in zip(axis.ranks, chunks, strict=True):
        if rank != axis.ranks[axis.rank]:
            works.append(dist.isend(chunks[axis.rank], rank, group=axis.group))
            works.append(dist.irecv(chunk, rank, group=axis.group))
    return Pending(works, lambda: x, axis)


def start_reduce_scatter(x: torch.Tensor, axis: Axis) -> Pending:
    """Start a reduce-scatter (sum) over several ranks; the function waits and returns this rank's
    part along dim 0.

    With gloo the ranks exchange the parts and sum them here: its own reduce-scatter is slower.
    """
    x = x.contiguous()
    if dist.get_backend(axis.group) == "gloo":
        chunks = torch.empty_like(x)
        work = dist.all_to_all_single(chunks, x, group=axis.group, async_op=True)
        return Pending([work], lambda: chunks.unflatten(0, (axis.size, -1)).sum(0), axis)
    out = x.new_empty((x.shape[0] // axis.size, *x.shape[1:]))
    return Pending([_scatter_into(out, x, group=axis.group, async_op=True)], lambda: out, axis)


def start_reduce_scatter_(x: torch.Tensor, axis: Axis, fp32_accumulation: bool = False) -> Pending:
    """Start a reduce-scatter (sum) over several ranks into this rank's part of the flat `x`, which
    is returned; the rest is undefined.

    With gloo, and with `fp32_accumulation` of 16 bits, the ranks exchange the parts and sum them
    here, where torch adds 16-bit numbers in fp32; NCCL rounds each partial sum.
    """
    own_chunk = x.chunk(axis.size)[axis.rank]
    exchange = fp32_accumulation and x.dtype.itemsize == 2
    if dist.get_backend(axis.group) != "gloo" and not exchange:
        return Pending(
            [_scatter_into(own_chunk, x, group=axis.group, async_op=True)], lambda: own_chunk, axis
        )
    chunks = torch.empty_like(x)
    work = dist.all_to_all_single(chunks, x, group=axis.group, async_op=True)
    return Pending([work], lambda: torch.sum(chunks.view(axis.size, -1), 0, out=own_chunk), axis)


def start_reduce_shards_(shards: Sequence[torch.Tensor], axis: Axis) -> Pending:
    """Start a reduce-scatter (sum) with parts of any size, one per rank: this rank's is returned,
    the rest is undefined."""
    works = [
        dist.reduce(shard, rank, group=axis.group, async_op=True)
        for rank, shard in zip(axis.ranks, shards, strict=True)
        if shard.numel()
    ]
    return Pending(works, lambda: shards[axis.rank], axis)


def start_broadcast_shards_(shards: Sequence[torch.Tensor], axis: Axis) -> Pending:
    """Start an all-gather of parts of any size, one per rank; the function waits and returns this
    rank's."""
    works = [
        dist.broadcast(shard, rank, group=axis.group, async_op=True)
        for rank, shard in zip(axis.ranks, shards, strict=True)
        if shard.numel()
    ]
    return Pending(works, lambda: shards[axis.rank], axis)


def my_slice(x: torch.Tensor, axis: Axis, dim: int = 0) -> torch.Tensor:
    """My part of `x` along `dim`, without communication."""
    return x if axis.size == 1 else x.chunk(axis.size, dim)[axis.rank].contiguous()


def broadcast_(x: torch.Tensor, axis: Axis, source: int = 0) -> torch.Tensor:
    """Overwrite `x` with that of the axis's rank `source`; returns it."""
    if axis.size > 1:
        dist.broadcast(x, axis.ranks[source], group=axis.group)
    return x


def gather_objects(value: Value, axis: Axis) -> list[Value]:
    """What every rank of the axis holds, in rank order. For start-up and checkpoints, never in the
    step. Of a simulated group (addons/lab/trace): this rank's value for every rank."""
    if axis.size == 1 or "fake" in dist.get_backend(axis.group):
        return [value] * axis.size
    out: list[Any] = [None] * axis.size
    dist.all_gather_object(out, value, group=axis.group)
    return out


def broadcast_object(value: Value, axis: Axis) -> Value:
    """What rank 0 of the axis holds, as `gather_objects`."""
    held = [value]
    if axis.size > 1:
        dist.broadcast_object_list(held, axis.ranks[0], group=axis.group)
    return held[0]


def barrier(axis: Axis) -> None:
    """Wait for every rank of the axis."""
    if axis.size > 1:
        dist.barrier(group=axis.group)


def _pair(name: str, forward: Callable, backward: Callable) -> Callable:
    """An autograd function from a collective and its adjoint."""

    class Pair(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
            ctx.axis = axis
            ctx.dim = dim
            return forward(x, axis, dim)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple:
            return backward(grad, ctx.axis, ctx.dim), None, None

    Pair.__name__ = name

    def call(x: torch.Tensor, axis: Axis, dim: int = 0) -> torch.Tensor:
        return x if axis.size == 1 else Pair.apply(x, axis, dim)

    call.__name__ = name
    return call


def _same(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    return x


def _sum(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    return all_reduce(x, axis)


# g of the Megatron paper
reduce_from = _pair("reduce_from", _sum, _same)
scatter_sequence = _pair("scatter_sequence", reduce_scatter, all_gather)
# f of the Megatron paper
copy_to = _pair("copy_to", _same, _sum)
gather_sequence = _pair("gather_sequence", all_gather, reduce_scatter)
# of what every rank goes on to compute alike
gather_alike = _pair("gather_alike", all_gather, my_slice)
