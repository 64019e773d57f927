"""A tensor of a torch_dist checkpoint: where its parts are in the files of the ranks."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from megatron.checkpoint.tensor_slices import (
    Box,
    extent,
    first_overlap,
    intersection,
    problem_of,
    relative,
    slices,
    volume,
)
from megatron.small_files import open_regular
from tools.convert.links import ConversionError


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor: its data is in `file` from byte `start` on."""

    box: Box
    file: Path
    start: int
    crc: int


@dataclass(frozen=True)
class StoredTensor:
    """A global tensor in the chunks that the ranks wrote."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    def problem(self) -> str | None:
        """Why the chunks are not the tensor, each element once, or None."""
        boxes = [chunk.box for chunk in self.chunks]
        for box in boxes:
            wrong = problem_of(box, self.shape)
            if wrong:
                return f"a part of it {wrong}"
        if first_overlap([box for box in boxes if volume(box)]):
            return "two of its parts overlap"
        if sum(map(volume, boxes)) != prod(self.shape):
            return "a part of it is missing"
        return None

    def read(self, box: Box) -> torch.Tensor:
        """A part of it; one chunk more is in memory."""
        result = torch.empty(extent(box), dtype=self.dtype)
        for chunk in self.chunks:
            common = intersection(box, chunk.box)
            if common:
                section = self._load(chunk)[slices(relative(common, chunk.box))]
                result[slices(relative(common, box))] = section
        return result

    def _load(self, chunk: Chunk) -> torch.Tensor:
        """A chunk. Raises ConversionError where the file is damaged."""
        data = bytearray(volume(chunk.box) * self.dtype.itemsize)
        with open_regular(chunk.file) as file:
            file.seek(chunk.start)
            size = file.readinto(data)
        if size < len(data) or zlib.crc32(data) != chunk.crc:
            raise ConversionError(f"{chunk.file}: the data of {self.name} are damaged")
        if not data:
            return torch.empty(extent(chunk.box), dtype=self.dtype)
        return torch.frombuffer(data, dtype=self.dtype).view(extent(chunk.box))
