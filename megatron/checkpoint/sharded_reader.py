"""Reads the tensors of a checkpoint by name and box, from however many files they are in."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from megatron.checkpoint import tensor_slices
from megatron.checkpoint.filesystem import CheckpointError, explained
from megatron.checkpoint.manifest import Manifest, SavedChunk, TensorRecord
from megatron.checkpoint.safetensors_file import DTYPES, bytes_of, section_bytes, thread_count
from megatron.checkpoint.safetensors_reader import SafetensorsFile
from megatron.checkpoint.tensor_slices import Box
from megatron.config.run_directory import ForeignCheckpoint
from megatron.small_files import path_inside

MOST_LATER = 1024  # sections that wait to be read


class Reader:
    """Reads boxes of the tensors that `manifest` lists in `directory`, every byte checked. A
    context manager.

    Files are opened, and their length and header compared with the manifest, when first needed.
    `of_one_rank`: it has what one rank holds, under its own name and box (local_copies.py).
    """

    of_one_rank = False

    def __init__(self, directory: Path, manifest: Manifest):
        self.directory = directory
        self.manifest = manifest
        self._files: dict[str, SafetensorsFile] = {}
        self._covered: set[str] = set()
        self._pool = ThreadPoolExecutor(thread_count())
        self._later: deque[Future[None]] = deque()

    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self.manifest.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Global shape of a tensor."""
        return self._record(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Dtype a tensor was saved in."""
        return DTYPES[self._record(name).dtype]

    def _record(self, name: str) -> TensorRecord:
        record = self.manifest.tensors.get(name)
        if record is None:
            raise ForeignCheckpoint(
                f"{self.directory} has no tensor {name!r} among its {len(self.manifest.tensors)}; "
                "was it saved from another model, or without its optimizer? "
                "[checkpoint-tensor-missing]"
            )
        if name not in self._covered:
            self.manifest.check_cover(name)
            self._covered.add(name)
        return record

    def read(
        self, name: str, box: Box | None = None, into: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The part `box` (all of it without) of tensor `name`: in `into` (same shape and dtype, any
        device and strides) or in a new CPU tensor, which is returned. Raises CheckpointError naming
        file and tensor.
        """
        if into is None:
            box = tensor_slices.whole(self.shape(name)) if box is None else box
            into = torch.empty(tensor_slices.extent(box), dtype=self.dtype(name))
        self.read_later(name, box, into)
        self.wait()
        return into

    def read_later(self, name: str, box: Box | None, into: torch.Tensor) -> None:
        """As `read`, but `into` is filled only when `wait` returns: several tensors are read at a
        time, on all threads."""
        record = self._record(name)
        box = tensor_slices.whole(record.shape) if box is None else box
        problem = tensor_slices.problem_of(box, record.shape)
        if problem:
            raise CheckpointError(
                f"{self.directory}, tensor {name} {list(record.shape)}: "
                f"box {tensor_slices.text(box)} {problem}"
            )
        dtype = DTYPES[record.dtype]
        if tuple(into.shape) != tensor_slices.extent(box) or into.dtype != dtype:
            raise CheckpointError(
                f"{self.directory}, tensor {name}: {into.dtype} {tuple(into.shape)} cannot take "
                f"{dtype} {tensor_slices.text(box)}; read it without `into` and convert it"
            )
        target = into.detach()
        for chunk in record.chunks:
            common = tensor_slices.intersection(chunk.box, box)
            if common is not None:
                self._later.extend(
                    map(
                        self._pool.submit,
                        self._tasks(
                            record,
                            chunk,
                            common,
                            target[tensor_slices.slices(tensor_slices.relative(common, box))],
                        ),
                    )
                )
        while len(self._later) > MOST_LATER:
            self._take_first()

    def wait(self) -> None:
        """Wait for all reads of `read_later`. The first error is raised after all of them have
        ended."""
        while self._later:
            self._take_first()

    def _take_first(self) -> None:
        try:
            self._later.popleft().result()
        except BaseException:
            pending = list(self._later)
            self._later.clear()
            for future in pending:
                future.cancel()
            for future in pending:
                if not future.cancelled():
                    future.exception()
            raise

    def _tasks(
        self, record: TensorRecord, chunk: SavedChunk, common: Box, target: torch.Tensor
    ) -> list[Callable[[], None]]:
        """The steps that bring the part `common` (global coordinates, inside `chunk`) into
        `target`, of its shape."""
        file = self._file(record, chunk)
        block = self.manifest.block_bytes
        if common == chunk.box and target.is_contiguous() and target.device.type == "cpu":
            view = bytes_of(target)
            section = section_bytes(block)
            return [
                partial(
                    file.read_into, chunk.key, view[low : low + section], low, chunk.sums, block
                )
                for low in range(0, len(view), section)
            ]
        local = tensor_slices.relative(common, chunk.box)
        shape = tensor_slices.extent(chunk.box)
        limit = section_bytes(block) // target.dtype.itemsize
        return [
            partial(
                _copy_box,
                file,
                chunk,
                shape,
                sub_box,
                block,
                target[tensor_slices.slices(tensor_slices.relative(sub_box, local))],
            )
            for sub_box in tensor_slices.cut(local, shape, limit)
        ]

    def _file(self, record: TensorRecord, chunk: SavedChunk) -> SafetensorsFile:
        """The chunk's open file; its length, header and this chunk's place agree with the
        manifest."""
        file = self._files.get(chunk.file)
        if file is None:
            with explained("read", self.directory):
                file = SafetensorsFile(path_inside(self.directory, chunk.file))
            self._files[chunk.file] = file
        want = self.manifest.files[chunk.file]
        location = file.locations.get(chunk.key)
        if (file.bytes, file.header_crc32) != (want.bytes, want.crc32):
            reason = (
                f"{file.bytes} bytes with header {file.header_crc32}, should be {want.bytes} with "
                f"{want.crc32}"
            )
        elif location is None or (location.dtype, location.shape) != (
            record.dtype,
            tensor_slices.extent(chunk.box),
        ):
            reason = f"its tensor {chunk.key} is not the one of the manifest"
        else:
            return file
        raise CheckpointError(
            f"{file.path}, tensor {chunk.key}: {reason}; the file is damaged: use another "
            "checkpoint [checkpoint-damaged]"
        )

    def verify(self) -> int:
        """Read and check every chunk of every tensor without keeping it; returns the bytes
        checked."""
        total = 0
        block = self.manifest.block_bytes
        section = section_bytes(block)
        for name in self.manifest.tensors:
            record = self._record(name)
            for chunk in record.chunks:
                file = self._file(record, chunk)
                length = record.bytes_of(chunk.box)
                for low in range(0, length, section):
                    scratch = memoryview(bytearray(min(section, length - low)))
                    file.read_into(chunk.key, scratch, low, chunk.sums, block)
                total += length
        return total

    def close(self) -> None:
        """Close all files."""
        self._pool.shutdown()
        for file in self._files.values():
            file.close()
        self._files.clear()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _copy_box(
    file: SafetensorsFile,
    chunk: SavedChunk,
    shape: Sequence[int],
    sub_box: Box,
    block: int,
    target: torch.Tensor,
) -> None:
    """Copy `piece` of a chunk of `shape` into `target` by way of the whole blocks around it, which
    are checked."""
    size = target.dtype.itemsize
    first, stop = tensor_slices.span(sub_box, shape)
    location = file.locations[chunk.key]
    low = first * size // block * block
    high = min(-(-stop * size // block) * block, location.stop - location.start)
    scratch = torch.empty(high - low, dtype=torch.uint8)
    file.read_into(chunk.key, bytes_of(scratch), low, chunk.sums, block)
    values = scratch[first * size - low : stop * size - low].view(target.dtype)
    target.copy_(
        values.as_strided(
            tensor_slices.extent(sub_box), tensor_slices.strides(shape), values.storage_offset()
        )
    )
