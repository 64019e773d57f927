"""Files of one rank written by another: point to point, in pieces, over gloo."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist  # noqa: TID251

from megatron.checkpoint.filesystem import DISK, CheckpointError, Disk, entries, explained
from megatron.checkpoint.manifest import FILE_NAME
from megatron.checkpoint.safetensors_file import bytes_of
from megatron.parallel.context import Axis

PIECE = 16 << 20  # bytes


class Route(NamedTuple):
    """A directory whose files go to `rank`, or come from it; the process group that has both."""

    folder: Path
    rank: int
    group: Any


def on_cpu(world: Axis) -> Axis:
    """The axis of all ranks with a process group that takes tensors on the CPU; all ranks call
    this."""
    if world.size == 1 or dist.get_backend(world.group) == "gloo":
        return world
    return replace(world, group=dist.new_group(list(world.ranks), backend="gloo"))


def exchange(out: Route | None, into: Route | None, disk: Disk = DISK) -> None:
    """Send the files of a directory to a rank, and write those that a rank sends, fsynced, into an
    empty directory; each of the two ranks calls this. What comes may be damaged where the sender
    could not read. Raises CheckpointError when both ways are done."""
    outgoing = _Outgoing(out) if out else None
    incoming = _Incoming(into, disk) if into else None
    length = outgoing.length() if outgoing else None
    _swap(out, length, into, incoming.length if incoming else None)
    head = outgoing.head if outgoing else None
    _swap(out, head, into, incoming.head() if incoming else None)
    going = outgoing.pieces() if outgoing else iter(())
    coming = incoming.pieces() if incoming else iter(())
    while True:
        sent = next(going, None)
        taken = next(coming, None)
        if sent is None and taken is None:
            break
        _swap(out, sent, into, taken)
        if incoming and taken is not None:
            incoming.write(taken)
    for end in (outgoing, incoming):
        if end and end.failure:
            raise end.failure


def _swap(
    out: Route | None, sent: torch.Tensor | None, into: Route | None, taken: torch.Tensor | None
) -> None:
    works: list[Any] = []  # isend's and irecv's None is for ranks that the group lacks
    if out and sent is not None and sent.numel():
        works.append(dist.isend(sent, out.rank, group=out.group))
    if into and taken is not None and taken.numel():
        works.append(dist.irecv(taken, into.rank, group=into.group))
    for work in works:
        work.wait()


class _Part(NamedTuple):
    """A part of a message: `size` bytes at `start`, which are those at `offset` of a file."""

    name: str
    offset: int
    size: int
    start: int


def _messages(sizes: Mapping[str, int]) -> Iterator[list[_Part]]:
    """The files, one behind the other, in messages of PIECE bytes."""
    message: list[_Part] = []
    filled = 0
    for name, size in sizes.items():
        offset = 0
        while offset < size:
            length = min(PIECE - filled, size - offset)
            message.append(_Part(name, offset, length, filled))
            offset += length
            filled += length
            if filled == PIECE:
                yield message
                message = []
                filled = 0
    if message:
        yield message


def _space(message: list[_Part]) -> torch.Tensor:
    last = message[-1]
    return torch.zeros(last.start + last.size, dtype=torch.uint8)


class _Outgoing:
    """The files of a directory, the manifest last."""

    def __init__(self, route: Route):
        self._folder = route.folder
        self.failure: CheckpointError | None = None
        self._sizes: dict[str, int] = {}
        try:
            with explained("read", self._folder):
                paths = sorted(entries(self._folder), key=lambda one: (one.name == FILE_NAME, one))
                self._sizes = {path.name: path.stat().st_size for path in paths}
        except CheckpointError as error:
            self.failure = error
        text = json.dumps(self._sizes).encode()
        self.head = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def length(self) -> torch.Tensor:
        """Of the message with names and sizes."""
        return torch.tensor([len(self.head)])

    def pieces(self) -> Iterator[torch.Tensor]:
        """The bytes of each message; zeros where they cannot be read."""
        for message in _messages(self._sizes):
            piece = _space(message)
            for part in message:
                self._read(part, bytes_of(piece)[part.start : part.start + part.size])
            yield piece

    def _read(self, part: _Part, into: memoryview) -> None:
        path = self._folder / part.name
        try:
            with explained("read", path), open(path, "rb") as file:
                file.seek(part.offset)
                file.readinto(into)
        except CheckpointError as error:
            self.failure = self.failure or error


class _Incoming:
    """The files that a rank sends, as they are written."""

    def __init__(self, route: Route, disk: Disk):
        self._folder = route.folder
        self._disk = disk
        self.failure: CheckpointError | None = None
        self.length = torch.zeros(1, dtype=torch.int64)
        self._head = torch.empty(0, dtype=torch.uint8)
        self._message: list[_Part] = []
        self._sizes: dict[str, int] = {}
        self._file: int | None = None

    def head(self) -> torch.Tensor:
        """Where names and sizes are received; an empty one until the length is known."""
        self._head = torch.empty(int(self.length), dtype=torch.uint8)
        return self._head

    def pieces(self) -> Iterator[torch.Tensor]:
        """A tensor for each message to come."""
        self._sizes = json.loads(bytes(bytes_of(self._head)))
        for message in _messages(self._sizes):
            self._message = message
            yield _space(message)

    def write(self, piece: torch.Tensor) -> None:
        """The message just received into its files; after a failure the rest is dropped."""
        if self.failure:
            return
        try:
            for part in self._message:
                self._write(part, bytes_of(piece)[part.start : part.start + part.size])
        except CheckpointError as error:
            self.failure = error
            if self._file is not None:
                os.close(self._file)

    def _write(self, part: _Part, data: memoryview) -> None:
        path = self._folder / part.name
        if part.offset == 0:
            self._file = self._disk.create(path)
        assert self._file is not None, "the first part of a file comes first"
        self._disk.write(self._file, path, data, part.offset)
        if part.offset + part.size == self._sizes[part.name]:
            self._disk.fsync(self._file, path)
            self._disk.close(self._file, path)
            self._file = None
