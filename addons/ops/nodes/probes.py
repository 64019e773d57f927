"""What one rank measures of itself and of its links: seconds of GEMMs, copies and messages, and
whether the numbers are right."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from megatron import launcher
from megatron.device import synchronize
from megatron.parallel.collectives import all_reduce_, reduce_scatter
from megatron.parallel.context import Axis
from megatron.parallel.exchange import all_to_all, start_receive, start_send

MIB = 1 << 20
REPEATS = 3
# Values of a message are whole numbers, so that sums are exact in any order: below 2^24 with 5,000
# ranks.
PERIOD = 251
GEMM = {"cpu": (384, torch.float32, 4), "gpu": (4096, torch.bfloat16, 40)}  # width, type, calls
COPY = {"cpu": (8 * MIB, 4), "gpu": (256 * MIB, 10)}  # bytes, calls


@dataclass
class Measured:
    """What a rank measured in one round.

    seconds: by operation, of each repeat. bits: by operation, sums of the results' bits. links: by
    size and ring, seconds of each repeat by partner. wrong: by operation, the ranks whose data came
    changed. sums: the operations whose sums over ranks were wrong here.
    """

    seconds: dict[str, list[float]] = field(default_factory=dict)
    bits: dict[str, list[int]] = field(default_factory=dict)
    links: dict[str, dict[int, list[float]]] = field(default_factory=dict)
    wrong: dict[str, list[int]] = field(default_factory=dict)
    sums: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, values: dict[str, Any]) -> Measured:
        """Of its fields as JSON, which has no numbers as keys."""
        links = {
            name: {int(peer): seconds for peer, seconds in peers.items()}
            for name, peers in values["links"].items()
        }
        return cls(**{**values, "links": links})

    def times(self) -> dict[str, list[float]]:
        """Seconds of each repeat by operation; those of messages with the faster neighbour."""
        links = {
            f"send/recv {name}": min(peers.values(), key=median)
            for name, peers in self.links.items()
        }
        return {**self.seconds, **links}


def measure(
    device: torch.device,
    axis: Axis,
    messages: tuple[int, ...],
    phase: Callable[[str], None] = lambda name: None,
) -> Measured:
    """One round on this rank of `axis`, with messages of these bytes. `phase` is told what comes
    next, on every rank alike."""
    out = Measured()
    phase("gemm")
    kind = "cpu" if device.type == "cpu" else "gpu"
    _local(out, "gemm", device, gemm(device, *GEMM[kind][:2]), GEMM[kind][2])
    phase("copy")
    _local(out, "copy", device, copy(device, COPY[kind][0]), COPY[kind][1])
    if axis.size > 1:
        for size in messages:
            for ring, members in rings(axis):
                for color in (0, 1):
                    phase(f"send/recv {size / MIB:g} MiB {ring}")
                    _link(out, f"{size / MIB:g} MiB {ring}", device, axis, members, color, size)
            _collectives(out, device, axis, size // (4 * axis.size) or 1, phase)
    return out


def gemm(device: torch.device, width: int, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    """A call returns the product [width, width] of two matrices that are the same on all ranks."""
    random = torch.Generator().manual_seed(1)
    a, b = (torch.randn(width, width, generator=random).to(device, dtype) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def copy(device: torch.device, size: int) -> Callable[[], torch.Tensor]:
    """A call returns a copy of `size` bytes that are the same on all ranks."""
    source = pattern(size // 4, 0, device)
    out = torch.empty_like(source)
    return lambda: out.copy_(source)


def pattern(count: int, rank: int, device: torch.device) -> torch.Tensor:
    """What `rank` sends: [count], fp32."""
    return torch.arange(count, device=device).remainder_(PERIOD).add_(rank).float()


def rings(axis: Axis) -> Iterator[tuple[str, list[int]]]:
    """The rings in which neighbours exchange messages: the ranks of this rank's node, and those in
    its place on all nodes. Links of one ring are alike."""
    local = launcher.info().local_world_size
    if not local or axis.size % local:
        local = axis.size
    first = axis.rank // local * local
    for name, ring in (
        ("in a node", range(first, first + local)),
        ("between nodes", range(axis.rank % local, axis.size, local)),
    ):
        if len(ring) > 1:
            yield name, list(ring)


def partner(members: list[int], rank: int, color: int) -> int | None:
    """The neighbour with which `rank` exchanges messages in the first (0) or second (1) half of a
    ring's links; None for none."""
    place, size = members.index(rank), len(members)
    other = place + 1 if place % 2 == color else place - 1
    if size > 2 and size % 2 == 0:
        other %= size
    return members[other] if 0 <= other < size else None


def _local(
    out: Measured,
    name: str,
    device: torch.device,
    call: Callable[[], torch.Tensor],
    times: int,
) -> None:
    """On a CPU processor time counts: ranks share its cores with one another and with others."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    call()
    for _ in range(REPEATS):
        synchronize(device)
        start = clock()
        for _ in range(times):
            result = call()
        synchronize(device)
        out.seconds.setdefault(name, []).append((clock() - start) / times)
        bits = result.view(torch.int16 if result.element_size() == 2 else torch.int32)
        out.bits.setdefault(name, []).append(int(bits.sum(dtype=torch.int64)))


def _link(
    out: Measured,
    name: str,
    device: torch.device,
    axis: Axis,
    members: list[int],
    color: int,
    size: int,
) -> None:
    peer = partner(members, axis.rank, color)
    if peer is None:
        return
    mine, right = (pattern(size // 4, rank, device) for rank in (axis.rank, peer))
    received = torch.empty_like(mine)
    exchange(mine[:1], received[:1], axis, peer)  # connects them
    for _ in range(REPEATS):
        exchange(mine[:1], received[:1], axis, peer)  # both are here
        synchronize(device)
        start = time.perf_counter()
        exchange(mine, received, axis, peer)
        synchronize(device)
        seconds = time.perf_counter() - start
        out.links.setdefault(name, {}).setdefault(peer, []).append(seconds)
        if not torch.equal(received, right):
            out.wrong.setdefault(f"send/recv {name}", []).append(peer)


def exchange(x: torch.Tensor, out: torch.Tensor, axis: Axis, peer: int) -> None:
    """Send `x` to `peer` and receive `out` of it, the lower rank first."""
    steps = [start_send, start_receive] if axis.rank < peer else [start_receive, start_send]
    for step in steps:
        step(x if step is start_send else out, axis, peer)()


def _collectives(
    out: Measured, device: torch.device, axis: Axis, rows: int, phase: Callable[[str], None]
) -> None:
    """All-reduce, reduce-scatter and all-to-all of `rows` values for each rank."""
    label = f"{4 * rows * axis.size / MIB:.3g} MiB"
    mine = pattern(rows * axis.size, axis.rank, device)
    base = mine - axis.rank
    total = base * axis.size + axis.size * (axis.size - 1) // 2
    part = base.view(axis.size, rows)[axis.rank]
    sent = torch.arange(axis.size, device=device).unsqueeze(1)
    calls: dict[str, tuple[Callable[[], torch.Tensor], torch.Tensor]] = {
        "all-reduce": (lambda: all_reduce_(mine.clone(), axis), total),
        "reduce-scatter": (
            lambda: reduce_scatter(mine, axis),
            total.view(axis.size, rows)[axis.rank],
        ),
        "all-to-all": (
            lambda: all_to_all(mine.view(axis.size, rows), axis, [1] * axis.size, [1] * axis.size),
            part + sent,
        ),
    }
    for name, (call, right) in calls.items():
        phase(f"{name} {label}")
        call()
        for _ in range(REPEATS):
            synchronize(device)
            start = time.perf_counter()
            result = call()
            synchronize(device)
            out.seconds.setdefault(f"{name} {label}", []).append(time.perf_counter() - start)
            if torch.equal(result, right):
                continue
            if name == "all-to-all":
                changed = (result != right).any(dim=1).nonzero().flatten().tolist()
                out.wrong.setdefault(name, []).extend(changed)
            else:
                out.sums.append(name)
