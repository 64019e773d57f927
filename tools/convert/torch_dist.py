"""Megatron's torch_dist checkpoints: global tensors in the files of torch.distributed.checkpoint,
and which of them our weights are made of."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    whole,
)
from megatron.config.model import ModelConfig
from megatron.config.plan.parameters import WORD_EMBEDDING, ParameterSpec
from megatron.small_files import open_regular
from tools.convert.config_keys import read_json
from tools.convert.links import ConversionError
from tools.convert.megatron_names import our_name
from tools.convert.native import Incoming
from tools.convert.torch_files import Unpickler

METADATA = "metadata.json"
COMMON = "common.pt"
_SHOWN = 20  # reasons of one error
_LAYER = re.compile(r"decoder\.layers\.(?:(\d+)\.)?(.+)")
_EXPERTS = re.compile(r"mlp\.experts\.experts\.(?:(\d+)\.)?(.+)")
_HALVES = {"_w": 0, "_v": 1}  # gate and up, as tensors of their own


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
                part = self._load(chunk)[slices(relative(common, chunk.box))]
                result[slices(relative(common, box))] = part
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


@dataclass(frozen=True)
class Piece:
    """All of a stored tensor, or what it holds at an index of its first dim."""

    tensor: StoredTensor
    layer: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Without the indexed dim."""
        return self.tensor.shape if self.layer is None else self.tensor.shape[1:]

    def read(self) -> torch.Tensor:
        """It."""
        box = whole(self.tensor.shape)
        if self.layer is not None:
            box = ((self.layer, self.layer + 1), *box[1:])
        return self.tensor.read(box)


# of one of our tensors: expert, or -1 for all, and half of a gated matrix, or -1 for both
Part = tuple[int, int]


@dataclass(frozen=True)
class _Merged:
    """Makes one of our tensors of its pieces, which are in order."""

    shape: tuple[int, ...]
    pieces: Sequence[Piece]

    def __call__(self) -> torch.Tensor:
        flat = torch.empty(prod(self.shape), dtype=self.pieces[0].tensor.dtype)
        start = 0
        for piece in self.pieces:
            size = prod(piece.shape)
            flat[start : start + size] = piece.read().flatten()
            start += size
        return flat.view(self.shape)


class TorchDistCheckpoint:
    """An open torch_dist checkpoint: arguments, and for each tensor of ours the pieces that it is
    made of."""

    def __init__(self, source: Path, unpickler: Unpickler):
        self.source = source
        backend = read_json(source / METADATA).get("sharded_backend")
        if backend != "torch_dist":
            raise ConversionError(
                f"{source}: its format is {backend!r}, which is not read; save it with "
                "--ckpt-format torch_dist"
            )
        common = unpickler.read(source / COMMON).values
        self.args: dict[str, Any] = common["args"] if isinstance(common.get("args"), dict) else {}
        self.optimizer = False
        self.parts: dict[str, dict[Part, Piece]] = {}
        for name, entry in unpickler.index(source)["tensors"].items():
            if name.startswith(("optimizer.", "rng_state", "rerun_state_machine")):
                self.optimizer |= name.startswith("optimizer.")
            else:
                self._sort(self._tensor(name, entry))

    @property
    def layout(self) -> str:
        """What it is, for the report."""
        left = "; the optimizer's state is not converted" if self.optimizer else ""
        return f"torch_dist{left}"

    def _tensor(self, name: str, entry: Mapping[str, Any]) -> StoredTensor:
        """A stored tensor; raises ConversionError for one that is not complete."""
        dtype = getattr(torch, str(entry["dtype"]).removeprefix("torch."), None)
        if not isinstance(dtype, torch.dtype):
            raise ConversionError(f"{self.source}: {name} has the dtype {entry['dtype']}")
        chunks = [
            Chunk(
                tuple((at, at + size) for at, size in zip(c["offsets"], c["sizes"], strict=True)),
                self.source / c["file"],
                c["start"],
                c["crc"],
            )
            for c in entry["chunks"]
        ]
        tensor = StoredTensor(name, dtype, tuple(entry["shape"]), tuple(chunks))
        wrong = tensor.problem()
        if wrong:
            raise ConversionError(f"{self.source}: {name}: {wrong}")
        return tensor

    def _sort(self, tensor: StoredTensor) -> None:
        """Note which of our tensors it is a part of."""
        name = our_name(tensor.name)
        if name is None:
            return
        layer = _LAYER.fullmatch(name)
        if not layer:
            self._add(name, (-1, -1), Piece(tensor))
            return
        tail = layer[2]
        half = _HALVES.get(tail[-2:], -1) if re.fullmatch(r".+\.(weight|bias)_[wv]", tail) else -1
        if half >= 0:
            tail = tail[:-2]
        experts = _EXPERTS.fullmatch(tail)
        expert = -1
        if experts:
            tail = f"mlp.experts.{experts[2]}"
            expert = -1 if experts[1] is None else int(experts[1])
        if layer[1] is not None:
            self._add(f"decoder.layers.{int(layer[1])}.{tail}", (expert, half), Piece(tensor))
            return
        if not tensor.shape or not tensor.shape[0]:
            self._add(name, (-1, -1), Piece(tensor))
            return
        for number in range(tensor.shape[0]):
            self._add(f"decoder.layers.{number}.{tail}", (expert, half), Piece(tensor, number))

    def _add(self, name: str, part: Part, piece: Piece) -> None:
        parts = self.parts.setdefault(name, {})
        if part in parts:
            raise ConversionError(
                f"{self.source}: both {parts[part].tensor.name} and {piece.tensor.name} are {name}"
            )
        parts[part] = piece

    def vocabulary_rows(self) -> int:
        """Rows of the word embedding, with padding."""
        parts = self.parts.get(WORD_EMBEDDING)
        if not parts:
            raise ConversionError(f"{self.source}: {WORD_EMBEDDING} is missing")
        shape = parts[-1, -1].shape
        return shape[0] if shape else 0

    def weights(self, table: Mapping[str, ParameterSpec], model: ModelConfig) -> list[Incoming]:
        """Our tensors. Raises ConversionError unless theirs are exactly those of the table."""
        lines = [
            f"{next(iter(parts.values())).tensor.name} is not a part of this model"
            for name, parts in self.parts.items()
            if name not in table
        ]
        weights = []
        for name, spec in table.items():
            wrong = self._problem(spec, model)
            if wrong:
                lines.append(wrong)
                continue
            pieces = [piece for _, piece in sorted(self.parts[name].items())]
            merged = _Merged(spec.shape, pieces)
            weights.append(Incoming(name, pieces[0].tensor.dtype, spec.shape, merged))
        if lines:
            more = [f"{self.source}: and {len(lines) - _SHOWN} more"] * (len(lines) > _SHOWN)
            raise ConversionError(
                "\n".join([f"{self.source}: {line}" for line in lines[:_SHOWN]] + more)
            )
        return weights

    def _problem(self, spec: ParameterSpec, model: ModelConfig) -> str | None:
        """Why a tensor of ours cannot be made, or None."""
        parts = self.parts.get(spec.name)
        if not parts:
            return f"{spec.name} is missing"
        experts = range(spec.shape[0]) if any(expert >= 0 for expert, _ in parts) else (-1,)
        gated = model.gated and ".linear_fc1." in spec.name
        halves = (0, 1) if any(half >= 0 for _, half in parts) else (-1,)
        want = [(expert, half) for expert in experts for half in halves]
        if sorted(parts) != want or (halves != (-1,) and not gated):
            return f"{spec.name}: its experts or halves are not complete, or are there twice"
        lead = spec.shape[:1] if ".mlp.experts." in spec.name else ()
        shape = spec.shape[len(lead) :]
        if gated:
            shape = (shape[0] * shape[1] // len(halves), *shape[2:])
        if experts == (-1,):
            shape = (*lead, *shape)
        for piece in parts.values():
            if piece.shape != shape:
                return (
                    f"{piece.tensor.name} has shape {list(piece.tensor.shape)}, of which "
                    f"{list(piece.shape)} should be {list(shape)} by its arguments"
                )
        dtypes = {piece.tensor.dtype for piece in parts.values()}
        if len(dtypes) > 1 or not next(iter(dtypes)).is_floating_point:
            return f"{spec.name} is {', '.join(sorted(map(str, dtypes)))}, should be one format"
        return None
