"""Files of one rank written by another: point to point, in pieces, over gloo."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist  # noqa: TID251

from megatron.checkpoint.filesystem import (
    DISK,
    CheckpointError,
    Disk,
    explained,
)
from megatron.checkpoint.manifest import FILE_NAME
from megatron.checkpoint.safetensors_file import bytes_of
from megatron.config.run_directory import (
    entries,
)
from megatron.parallel.context import Axis
from megatron.small_files import path_inside

SECTION_BYTES = 16 << 20  # bytes
HEAD = 4096  # bytes of the message with names and sizes


class Route(NamedTuple):
    """A directory whose files go to `rank`, or come from it; the process group that has both."""

    folder: Path
    rank: int
    group: Any


class FileSection(NamedTuple):
    """`size` bytes at `offset` of a file; `last` of it."""

    path: Path
    offset: int
    size: int
    last: bool


def on_cpu(world: Axis) -> Axis:
    """The axis of all ranks with a process group that takes tensors on the CPU; all ranks call
    this."""
    if world.size == 1 or dist.get_backend(world.group) == "gloo":
        return world
    return replace(world, group=dist.new_group(list(world.ranks), backend="gloo"))


def exchange(out: Route | None, into: Route | None, disk: Disk = DISK) -> None:
    """Send the files of a directory to a rank, and write those that a rank sends, fsynced, into an
    empty directory; each of the two ranks calls this. No file is empty. What comes may be damaged
    where the sender could not read. Raises CheckpointError when both ways are done."""
    # After a failure the other rank still waits for its messages: zeros are sent, what comes is
    # dropped.
    failures: list[CheckpointError] = []
    sizes = _sizes(out.folder, failures) if out else {}
    head = bytearray(json.dumps(sizes).encode().ljust(HEAD))
    their_head = torch.empty(HEAD, dtype=torch.uint8)
    _swap(out, torch.frombuffer(head, dtype=torch.uint8), into, their_head)
    going = _sections(out.folder, sizes) if out else iter(())
    coming: Iterator[FileSection] = iter(())
    if into:
        their_sizes = json.loads(bytes(bytes_of(their_head)))
        try:
            with explained("write", into.folder):
                for name in their_sizes:
                    path_inside(into.folder, name)
        except CheckpointError as error:
            failures.append(error)
        coming = _sections(into.folder, their_sizes)
    file = -1
    for outgoing, incoming in zip_longest(going, coming):
        sent = _read(outgoing, failures) if outgoing else None
        received = torch.empty(incoming.size, dtype=torch.uint8) if incoming else None
        _swap(out, sent, into, received)
        if incoming and received is not None and not failures:
            try:
                if incoming.offset == 0:
                    file = disk.create(incoming.path)
                disk.write(file, incoming.path, bytes_of(received), incoming.offset)
                if incoming.last:
                    disk.fsync(file, incoming.path)
                    disk.close(file, incoming.path)
                    file = -1
            except CheckpointError as error:
                failures.append(error)
    if file >= 0:
        os.close(file)
    if failures:
        raise failures[0]


def _swap(
    out: Route | None, sent: torch.Tensor | None, into: Route | None, received: torch.Tensor | None
) -> None:
    works: list[Any] = []  # isend's and irecv's None is for ranks that the group lacks
    if out and sent is not None:
        works.append(dist.isend(sent, out.rank, group=out.group))
    if into and received is not None:
        works.append(dist.irecv(received, into.rank, group=into.group))
    for work in works:
        work.wait()


def _sizes(folder: Path, failures: list[CheckpointError]) -> dict[str, int]:
    """The size of each file, the manifest last."""
    try:
        with explained("read", folder):
            paths = sorted(entries(folder), key=lambda path: (path.name == FILE_NAME, path))
            return {path.name: path.stat().st_size for path in paths}
    except CheckpointError as error:
        failures.append(error)
        return {}


def _sections(folder: Path, sizes: Mapping[str, int]) -> Iterator[FileSection]:
    for name, size in sizes.items():
        for offset in range(0, size, SECTION_BYTES):
            end = min(offset + SECTION_BYTES, size)
            yield FileSection(folder / name, offset, end - offset, end == size)


def _read(section: FileSection, failures: list[CheckpointError]) -> torch.Tensor:
    """The bytes of a piece; zeros where they cannot be read."""
    data = torch.zeros(section.size, dtype=torch.uint8)
    try:
        with explained("read", section.path), open(section.path, "rb") as file:
            file.seek(section.offset)
            file.readinto(bytes_of(data))
    except CheckpointError as error:
        failures.append(error)
    return data
