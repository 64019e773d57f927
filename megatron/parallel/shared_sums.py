"""Sums over ranks of one machine through memory they share: gloo carries every byte through a
socket and back.

A rank copies its tensor into a slot of its own, counts up a number that all see, waits until all
have, and adds up all slots in rank order, so that every rank has the same bits. Each rank has
two slots in turn: when one is written again, all ranks have begun the sum in between and so have
read it. Nothing but the processor orders copying before counting: on x86 stores are seen in
their order, elsewhere there is no shared memory. parallel/collectives.py decides
when to use it.
"""

from __future__ import annotations

import mmap
import os
import platform
import secrets
import time
from datetime import timedelta

import torch
import torch.distributed as dist  # noqa: TID251

from megatron.parallel.collectives import gather_objects
from megatron.parallel.context import Axis

# the activations of 2,048 tokens and hidden size 1,024 in fp32; what is larger goes through gloo
SLOT_BYTES = 8 << 20
LEAST_BYTES = 1 << 16  # below, there is nothing to gain
APART = 64  # bytes from one rank's number to the next: a line of the caches
ORDERED = ("x86_64", "AMD64")
SPIN = 0.002
NAP = 5e-5  # seconds: looked for without pause, and between looks then
_TOKEN_BYTES = 16


class SharedSums:
    """The slots of all ranks of `axis` in `memory` (uint8, as long as `size_of` says). Sums begin
    one at a time."""

    def __init__(self, axis: Axis, memory: torch.Tensor, timeout: timedelta):
        self.axis = axis
        self._timeout = timeout
        numbers = axis.size * APART
        self._slots = memory[numbers : size_of(axis)].view(2, axis.size, SLOT_BYTES)
        # sums each rank has begun
        self._begun = memory[:numbers].view(torch.int64).numpy()[:: APART // 8]
        self._turn = 0
        self._busy = False

    def takes(self, x: torch.Tensor) -> bool:
        """Whether a sum is made here. The same on every rank, which all sum tensors of one shape in
        one order."""
        return (
            LEAST_BYTES <= x.nbytes <= SLOT_BYTES
            and x.is_contiguous()
            and x.is_floating_point()
            and not self._busy
        )

    def start(self, x: torch.Tensor) -> Sum:
        """Start to sum `x` in place."""
        self._turn = self._turn + 1
        self._busy = True
        parts = [
            slot[: x.nbytes].view(x.dtype).view(x.shape) for slot in self._slots[self._turn % 2]
        ]
        parts[self.axis.rank].copy_(x)
        self._begun[self.axis.rank] = self._turn
        return Sum(self, parts, x)

    def ready(self) -> bool:
        """Whether all ranks have started the last sum."""
        return bool((self._begun >= self._turn).all())

    def wait(self) -> None:
        """Until they have. Raises RuntimeError when that takes longer than the time-out of the
        process groups."""
        start = time.monotonic()
        while not self.ready():
            waited = time.monotonic() - start
            if waited > self._timeout.total_seconds():
                late = [
                    rank
                    for rank, begun in zip(self.axis.ranks, self._begun, strict=True)
                    if begun < self._turn
                ]
                raise RuntimeError(
                    f"timed out after {waited:.0f} s of waiting for rank {late[0]} to begin the "
                    "same sum"
                )
            if waited < SPIN:
                os.sched_yield()
            else:
                time.sleep(NAP)
        self._busy = False


class Sum:
    """A sum in progress, like torch's work: `wait` for it, then `result` gives the tensor."""

    def __init__(self, sums: SharedSums, parts: list[torch.Tensor], x: torch.Tensor):
        self._sums = sums
        self._parts = parts
        self._x = x

    def is_completed(self) -> bool:
        """Whether `wait` would return immediately."""
        return self._sums.ready()

    def wait(self) -> None:
        """Until all ranks have handed in their part. Raises RuntimeError after the time-out."""
        self._sums.wait()

    def result(self) -> torch.Tensor:
        """The summed tensor. The slots are read here: before the next sum begins."""
        torch.add(self._parts[0], self._parts[1], out=self._x)
        for part in self._parts[2:]:
            self._x.add_(part)
        return self._x


def size_of(axis: Axis) -> int:
    """Bytes of memory that the ranks of an axis share."""
    return axis.size * (APART + 2 * SLOT_BYTES)


def open_shared(axis: Axis, timeout: timedelta) -> SharedSums | None:
    """Memory for the sums of an axis of several ranks on gloo, or None where they do not share a
    machine. All call it.

    `timeout`: that of the process groups.
    """
    if axis.size == 1 or dist.get_backend(axis.group) != "gloo":
        return None
    file, offer = _make(size_of(axis)) if axis.rank == 0 else (None, None)
    offer = gather_objects(offer, axis)[0]
    memory = None if offer is None else _map(*offer)
    everybody = all(gather_objects(memory is not None, axis))
    if file is not None:
        os.close(file)
    return SharedSums(axis, memory, timeout) if memory is not None and everybody else None


def _make(size: int) -> tuple[int | None, tuple[str, int, bytes] | None]:
    """(a file without a name that ends with the process, (path by which others on this machine
    reach it, bytes, token))."""
    if not hasattr(os, "memfd_create") or platform.machine() not in ORDERED:
        return None, None
    token = secrets.token_bytes(_TOKEN_BYTES)
    try:
        file = os.memfd_create("megatron-sums")
        # where memory is short it fails here, not in the middle of a sum
        os.posix_fallocate(file, 0, size + _TOKEN_BYTES)
        os.pwrite(file, token, size)
    except OSError:
        return None, None
    return file, (f"/proc/{os.getpid()}/fd/{file}", size, token)


def _map(path: str, size: int, token: bytes) -> torch.Tensor | None:
    """The memory behind `path`, if it is reachable from here and is the one meant."""
    try:
        file = os.open(path, os.O_RDWR)
        try:
            if os.pread(file, _TOKEN_BYTES, size) != token:
                return None
            return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
        finally:
            os.close(file)
    except OSError:
        return None
