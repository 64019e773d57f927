"""What single ranks of an axis send each other: stages, rings of keys and values, experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist  # noqa: TID251

from megatron.parallel.collectives import Pending
from megatron.parallel.context import Axis


def all_to_all(
    x: torch.Tensor, axis: Axis, send: Sequence[int], receive: Sequence[int]
) -> torch.Tensor:
    """Send each rank of the axis as many rows of `x`, in order, as `send` says, and receive as many
    as `receive` says. Adjoint: the same with both exchanged."""
    return x if axis.size == 1 else _AllToAll.apply(x, axis, list(send), list(receive))


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, axis: Axis, send: list[int], receive: list[int]
    ) -> torch.Tensor:
        ctx.way = (axis, receive, send)
        return _exchange_rows(x, axis, send, receive)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        return _exchange_rows(grad, *ctx.way), None, None, None


def _exchange_rows(
    x: torch.Tensor, axis: Axis, send: list[int], receive: list[int]
) -> torch.Tensor:
    out = x.new_empty((sum(receive), *x.shape[1:]))
    dist.all_to_all_single(out, x.contiguous(), receive, send, group=axis.group)
    return out


def start_shift(x: torch.Tensor, axis: Axis) -> Callable[[], torch.Tensor]:
    """Start to send `x` to the next rank of a ring; the function waits and returns what the
    previous rank sent."""
    x = x.contiguous()
    return start_exchange(x, torch.empty_like(x), axis, 1)


def start_exchange(
    x: torch.Tensor, out: torch.Tensor, axis: Axis, step: int
) -> Callable[[], torch.Tensor]:
    """Start to send `x` to the rank `step` further on a ring, and to receive into `out` from the
    rank as far before; the function waits and returns `out`. Nothing empty travels."""
    after, before = (axis.ranks[(axis.rank + way) % axis.size] for way in (step, -step))
    operations = [dist.P2POp(dist.isend, x, after, axis.group)] * (x.numel() > 0)
    operations += [dist.P2POp(dist.irecv, out, before, axis.group)] * (out.numel() > 0)
    works = dist.batch_isend_irecv(operations) if operations else []

    def wait() -> torch.Tensor:
        for work in works:
            work.wait()
        return out

    return wait


def start_send(x: torch.Tensor, axis: Axis, peer: int) -> Callable[[], torch.Tensor]:
    """Start to send `x` to the axis's rank `peer`; the function waits until it is sent and returns
    what was sent."""
    x = x.contiguous()
    return Pending([dist.isend(x, axis.ranks[peer], group=axis.group)], lambda: x, axis)


def start_receive(x: torch.Tensor, axis: Axis, peer: int) -> Callable[[], torch.Tensor]:
    """Start to receive into `x` what the axis's rank `peer` sends next; the function waits and
    returns it."""
    return Pending([dist.irecv(x, axis.ranks[peer], group=axis.group)], lambda: x, axis)
