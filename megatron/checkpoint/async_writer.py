"""Asynchronous checkpointing: a background process writes a rank's part of a checkpoint during
training.

It is forked before CUDA and process groups are started, gets the bytes through shared memory (a
copy of all that the rank saves), has one save in hand at most, and ends with its rank. Knows slices
and directories, not what a run is made of.
"""

import errno
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from math import prod
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import NamedTuple

import torch

from megatron import cuda
from megatron import device as devices
from megatron.checkpoint import store, tensor_slices
from megatron.checkpoint.filesystem import CheckpointError, explained
from megatron.checkpoint.helper_process import SideProcess
from megatron.checkpoint.sharded import TensorSlice
from megatron.checkpoint.tensor_slices import Box

ALIGNED = 64  # bytes
Failure = tuple[str, int | None]


class SharedSlice(NamedTuple):
    """A slice in shared memory, where its bytes begin at `offset`."""

    name: str
    global_shape: tuple[int, ...]
    dtype: torch.dtype
    box: Box
    offset: int

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """Its tensor in the memory (uint8)."""
        shape = tensor_slices.extent(self.box)
        return (
            memory[self.offset : self.offset + prod(shape) * self.dtype.itemsize]
            .view(self.dtype)
            .view(shape)
        )


class WriteJob(NamedTuple):
    """What to write where; if `memory` is not 0, that many bytes must be mapped again first."""

    slices: list[SharedSlice]
    temporary: Path
    rank: int
    iteration: int
    memory: int


class Writer:
    """The rank's side: `start` a save, check whether it is `done`, take its `result`; only then the
    next one."""

    def __init__(self) -> None:
        """Fork the process. Raises ValueError if the system does not support it."""
        if not hasattr(os, "memfd_create"):
            raise ValueError(
                "--async-save: needs shared memory by Linux's memfd_create, which this system "
                "lacks; omit it [async-save-not-supported]"
            )
        self.process = SideProcess(_serve)
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._busy = False
        self._answers: list[Failure | None] = []

    def reserve(self, slices: Sequence[TensorSlice], device: torch.device) -> None:
        """Get the memory for a snapshot of such slices now, so that the first save need not wait
        for it."""
        needed = _laid_out(slices)[1]
        with suppress(OSError):  # said at the first save
            if needed > len(self._memory):
                self._allocate(needed, device)

    def start(
        self,
        slices: Sequence[TensorSlice],
        temporary: Path,
        rank: int,
        iteration: int,
        device: torch.device,
    ) -> None:
        """Copy the slices and have them written into `temporary` (see `store.begin`); returns when
        they are copied.

        Without the process, or without memory for the copy, they are written before this returns,
        with a warning.
        """
        assert not self._busy, "a save is under way"
        self._busy = True
        shared_slices, needed = _laid_out(slices)
        try:
            if not self.process.alive():
                raise ChildProcessError(errno.ECHILD, "its process has died")
            grown = needed if needed > len(self._memory) else 0
            if grown:
                self._allocate(grown, device)
            for shared, source in zip(shared_slices, slices, strict=True):
                tensor = (
                    source.tensor if isinstance(source.tensor, torch.Tensor) else source.tensor()
                )
                shared.view(self._memory).copy_(tensor.detach(), non_blocking=True)
            devices.synchronize(device)
            self.process.pipe.send(WriteJob(shared_slices, temporary, rank, iteration, 0))
        except OSError as error:
            print(
                f"WARNING: --async-save: saving synchronously ({error.strerror or error}): rank "
                f"{rank} pauses training while it writes its part of iteration {iteration}",
                flush=True,
            )
            self._answers.append(
                _written(WriteJob(shared_slices, temporary, rank, iteration, 0), slices)
            )

    def done(self) -> bool:
        """Is there a result to take without waiting?"""
        return self._busy and (bool(self._answers) or self.process.pipe.poll())

    def result(self) -> None:
        """Wait until what was started is on the disk. Raises CheckpointError if it is not, or if
        the process has died."""
        assert self._busy, "nothing was started"
        try:
            failure = self._answers.pop() if self._answers else self.process.pipe.recv()
        except (EOFError, OSError):
            self.process.wait()
            failure = (
                "the process that writes checkpoints has died (exit code "
                f"{self.process.exit_code}) [worker-killed]",
                errno.ECHILD,
            )
        self._busy = False
        if failure:
            raise CheckpointError(*failure)

    def _allocate(self, size: int, device: torch.device) -> None:
        """Shared memory of so many bytes, in both processes; every page is there when this returns.
        Raises OSError."""
        cuda.unpin(self._memory, device)
        self._memory = torch.empty(0, dtype=torch.uint8)
        file = os.memfd_create("checkpoint")
        try:
            # too little memory is an error here, and SIGBUS later
            os.posix_fallocate(file, 0, size)
            self.process.pipe.send(WriteJob([], Path(), 0, 0, size))
            send_handle(self.process.pipe, file, self.process.pid)
            self._memory = _mapped(file, size)
        finally:
            os.close(file)
        if not cuda.pin(self._memory, device):
            print(
                f"WARNING: --async-save: {size} bytes of memory cannot be pinned, so copies to it "
                "are slow",
                flush=True,
            )

    def close(self) -> None:
        """End the process and abandon a save in progress."""
        self.process.close()


@contextmanager
def started() -> Iterator[Writer]:
    """A writer within the block."""
    writer = Writer()
    try:
        yield writer
    finally:
        writer.close()


def _laid_out(slices: Sequence[TensorSlice]) -> tuple[list[SharedSlice], int]:
    """The offset of each slice in the shared memory, and their total size."""
    shared_slices = []
    offset = 0
    for tensor_slice in slices:
        shared_slices.append(
            SharedSlice(
                tensor_slice.name,
                tensor_slice.global_shape,
                tensor_slice.dtype,
                tensor_slice.box,
                offset,
            )
        )
        offset += (
            -(-tensor_slices.volume(tensor_slice.box) * tensor_slice.dtype.itemsize // ALIGNED)
            * ALIGNED
        )
    return shared_slices, offset


def _mapped(file: int, size: int) -> torch.Tensor:
    """The bytes of a file in memory, uint8, its pages in this process's table already."""
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
    return torch.frombuffer(mmap.mmap(file, size, flags=flags), dtype=torch.uint8)


def _written(job: WriteJob, slices: Sequence[TensorSlice]) -> Failure | None:
    """Write the slices; what kept them from being written."""
    try:
        with explained("save in", job.temporary.parent):
            store.write_rank_files(job.temporary, job.rank, slices, job.iteration)
    except CheckpointError as error:
        return str(error), error.errno
    return None


def _serve(pipe: Connection) -> None:
    """The background process: write what is requested until the rank exits."""
    memory = torch.empty(0, dtype=torch.uint8)
    while True:
        job = pipe.recv()
        if job.memory:
            file = recv_handle(pipe)
            memory = _mapped(file, job.memory)
            os.close(file)
            continue
        slices = [
            TensorSlice(
                shared.name, shared.global_shape, shared.dtype, shared.box, shared.view(memory)
            )
            for shared in job.slices
        ]
        pipe.send(_written(job, slices))
