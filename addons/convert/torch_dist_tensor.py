"""The tensors of a torch_dist checkpoint: where their parts are in the files of the ranks, which
torch.distributed.checkpoint's .metadata says."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

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
from megatron.small_files import UnsafeName, path_inside, read_bytes

from .links import ConversionError
from .torch_files import MAX_PICKLE_BYTES, StoredPart, read_file, unpickle

_METADATA = ".metadata"
_OVERHEAD = 1 << 20  # bytes that torch.save may add to those of a tensor
# objects that say how many updates the optimizer has made
_OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\.optimizer/.+")


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor, saved in `file`, in so many bytes from another on."""

    box: Box
    file: Path
    section: tuple[int, int]


@dataclass(frozen=True)
class StoredTensor:
    """A global tensor in the chunks that the ranks wrote."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    _opened: dict[Chunk, StoredPart] = field(default_factory=dict, repr=False, compare=False)

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
        """A chunk. Raises ConversionError where the file is damaged, or has another tensor."""
        shape = extent(chunk.box)
        if chunk not in self._opened:
            part = None
            try:
                if chunk.section[1] <= volume(chunk.box) * self.dtype.itemsize + _OVERHEAD:
                    part = read_file(chunk.file, section=chunk.section).tensors.get("")
            except ConversionError as error:
                raise ConversionError(f"{error} (a part of {self.name})") from None
            if part is None or part.dtype != self.dtype or part.shape != shape:
                raise ConversionError(
                    f"{chunk.file}: has no {self.dtype} of shape {list(shape)} where {_METADATA} "
                    f"says that {self.name} is"
                )
            self._opened[chunk] = part
        return self._opened[chunk].read()


def read_index(folder: Path) -> tuple[dict[str, StoredTensor], dict[str, Any]]:
    """({name: tensor}, {name: plain values of an object, of those of the optimizer's state}) of a
    folder. Raises ConversionError."""
    source = folder / _METADATA
    tensors = {}
    objects = {}
    try:
        data = read_bytes(path_inside(folder, _METADATA), MAX_PICKLE_BYTES)
        metadata = unpickle(data, source)["values"]
        stored = {}
        for key, info in metadata["storage_data"].items():
            index = json.loads(key)
            stored[index["fqn"], _numbers(index.get("offset") or ())] = info
        for name, entry in metadata["state_dict_metadata"].items():
            if entry is None:
                if _OPTIMIZER.fullmatch(name):
                    file, section = _location(folder, stored[name, ()], MAX_PICKLE_BYTES)
                    objects[name] = read_file(file, section=section).root
                continue
            chunks = []
            for chunk in entry["chunks"]:
                start, sizes = _numbers(chunk["offsets"]), _numbers(chunk["sizes"])
                box = tuple((low, low + size) for low, size in zip(start, sizes, strict=True))
                chunks.append(Chunk(box, *_location(folder, stored[name, start])))
            dtype = getattr(torch, entry["properties"][0].removeprefix("torch."))
            tensors[name] = StoredTensor(name, dtype, _numbers(entry["size"]), tuple(chunks))
    except (ConversionError, UnsafeName):
        raise
    except OSError as error:
        raise ConversionError(f"{source}: cannot be read ({error.strerror})") from None
    # other values where these belong
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ConversionError(
            f"{source}: is not the metadata of torch.distributed.checkpoint "
            f"({type(error).__name__}: {str(error)[:200]})"
        ) from None
    return tensors, objects


def _numbers(value: Any) -> tuple[int, ...]:
    """A shape or an offset. Raises ValueError, TypeError."""
    if not all(type(number) is int and 0 <= number < 1 << 48 for number in value):
        raise ValueError(f"{value} is no shape or offset")
    return tuple(value)


def _location(
    folder: Path, info: dict[str, Any], limit: int = 1 << 48
) -> tuple[Path, tuple[int, int]]:
    """(file, section) of what was stored. Raises UnsafeName, ValueError."""
    start, length = _numbers((info["offset"], info["length"]))
    if info.get("transform_descriptors") or length > limit:
        raise ValueError("its data are compressed or encrypted, which is not read, or too long")
    return path_inside(folder, info["relative_path"]), (start, length)
