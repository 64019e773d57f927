"""Sums over ranks of one machine through memory they share: gloo carries every byte through a socket and back.

A rank copies its tensor into a slot of its own, gloo says when all have done so, and each adds up all slots in rank order,
so that every rank has the same bits. Each rank has two slots in turn: when one is written again, all ranks have begun
the sum in between and so have read it. Knows no layer; parallel/collectives.py decides when it is used.
"""
from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron.parallel.collectives import gather_objects
from megatron.parallel.context import Axis

SLOT_BYTES = 8 << 20        # the activations of 2,048 tokens and hidden size 1,024 in fp32; what is larger goes through gloo
LEAST_BYTES = 1 << 16       # below, gloo's one message is all there is to save
_TOKEN_BYTES = 16


class SharedSums:
    """The slots of all ranks of `axis` in `memory` (uint8), two for each rank. Sums begin one at a time."""

    def __init__(self, axis: Axis, memory: torch.Tensor):
        self.axis = axis
        self._slots = memory[:2 * axis.size * SLOT_BYTES].view(2, axis.size, SLOT_BYTES)
        self._turn, self._busy = 0, False
        self._nothing = torch.zeros(1)

    def takes(self, x: torch.Tensor) -> bool:
        """Is this a sum for it? The same on every rank, which all sum tensors of one shape in one order."""
        return (LEAST_BYTES <= x.nbytes <= SLOT_BYTES and x.is_contiguous() and x.is_floating_point() and not self._busy)

    def start(self, x: torch.Tensor) -> tuple[Any, Callable[[], torch.Tensor]]:
        """Begin to sum `x` in place: (what to wait for, what to call then for `x`)."""
        self._turn, self._busy = 1 - self._turn, True
        parts = [slot[:x.nbytes].view(x.dtype).view(x.shape) for slot in self._slots[self._turn]]
        parts[self.axis.rank].copy_(x)
        ready = dist.all_reduce(self._nothing, group=self.axis.group, async_op=True)

        def result() -> torch.Tensor:
            torch.add(parts[0], parts[1], out=x)
            for part in parts[2:]:
                x.add_(part)
            self._busy = False
            return x

        return ready, result


def open_shared(axis: Axis) -> SharedSums | None:
    """Memory for the sums of an axis of several ranks on gloo, or None where they do not share a machine. All call it."""
    if axis.size == 1 or dist.get_backend(axis.group) != "gloo":
        return None
    file, offer = _make(2 * axis.size * SLOT_BYTES) if axis.rank == 0 else (None, None)
    offer = gather_objects(offer, axis)[0]
    memory = None if offer is None else _map(*offer)
    everybody = all(gather_objects(memory is not None, axis))
    if file is not None:
        os.close(file)
    return SharedSums(axis, memory) if memory is not None and everybody else None


def _make(size: int) -> tuple[int | None, tuple[str, int, bytes] | None]:
    """(a file without a name that ends with the process, (path by which others on this machine reach it, bytes, token))."""
    if not hasattr(os, "memfd_create"):
        return None, None
    token = secrets.token_bytes(_TOKEN_BYTES)
    try:
        file = os.memfd_create("megatron-sums")
        os.posix_fallocate(file, 0, size + _TOKEN_BYTES)    # where memory is short it fails here, not in the middle of a sum
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
