"""Makes the communicators of a run before its first step: NCCL makes each at its first collective
or message, which takes seconds, and a rank that does not come would be a time-out of that step."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from megatron import device as devices
from megatron import log
from megatron.parallel.collectives import all_reduce_
from megatron.parallel.context import Axis, ParallelContext
from megatron.parallel.exchange import start_receive, start_send

# of the axes that send in every step; those of pipeline stages send in pairs
AXES = ("tp", "etp", "cp", "cp_heads", "cp_ring", "ep", "shard", "instances", "optimizer", "world")
LIMIT_SECONDS = 60.0


def make_communicators(
    ctx: ParallelContext,
    device: torch.device,
    *,
    tied: bool = False,
    ring: bool = False,
    limit_seconds: float = LIMIT_SECONDS,
) -> list[str]:
    """One collective over each axis of `ctx` and one message between each pair of neighbouring
    stages; the names of what was made, in order. Every rank must call it.

    `tied`: the first and last stage sum the word embedding's gradient. `ring`: the last stage sends
    to the first (virtual stages). What has not answered after `limit_seconds` is named by a warning
    on this rank; the time-out of the process group ends the run.
    """
    axes = [ctx.axis(name) for name in (*AXES, *["ends"] * tied)]
    axes += [ctx.experts.shard, ctx.experts.instances]
    names: list[str] = []
    groups: list[object] = []
    for axis in axes:
        if axis.size > 1 and axis.group not in groups:
            groups.append(axis.group)
            _make(axis.name, axis.ranks, limit_seconds, partial(_sum, axis, device), names)
    for axis, backward in ((ctx.pp, False), (ctx.pp_gradients, True)):
        for first, second in _pairs(axis, ring):
            sender = second if backward else first
            peer = first if axis.rank == second else second
            _make(
                f"{axis.name} {first}-{second}",
                (axis.ranks[first], axis.ranks[second]),
                limit_seconds,
                partial(_message, axis, peer, axis.rank == sender, device),
                names,
            )
    return names


def _pairs(axis: Axis, ring: bool) -> Iterator[tuple[int, int]]:
    """The pairs of neighbouring stages that this one is in: those whose first is even before those
    whose first is odd, so that all pairs of a kind are made at the same time."""
    last = axis.size if ring and axis.size > 2 else axis.size - 1
    pairs = [(first, (first + 1) % axis.size) for first in range(last)]
    for pair in sorted(pairs, key=lambda pair: (pair[0] % 2, pair[0])):
        if axis.rank in pair:
            yield pair


def _make(
    name: str, ranks: tuple[int, ...], limit: float, call: Callable[[], None], names: list[str]
) -> None:
    with _warns_after(
        f"the communicator of {name} (ranks {' '.join(map(str, ranks[:16]))})", limit
    ):
        call()
    names.append(name)


@contextmanager
def _warns_after(subject: str, limit: float) -> Iterator[None]:
    text = (
        f"WARNING: {subject} was not made after {limit:g} s: a rank is missing, or cannot connect"
    )
    timer = threading.Timer(limit, log.print_line, (text,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _sum(axis: Axis, device: torch.device) -> None:
    all_reduce_(torch.zeros(1, device=device), axis)
    devices.synchronize(device)


def _message(axis: Axis, peer: int, sends: bool, device: torch.device) -> None:
    (start_send if sends else start_receive)(torch.zeros(1, device=device), axis, peer)()
    devices.synchronize(device)
