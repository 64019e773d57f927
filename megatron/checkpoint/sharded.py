"""Writes the slices of tensors that a rank holds, and reads any box of any tensor, whichever ranks
wrote it.

Everything is indexed by global tensor name, shape and box, so the layout at save and the layout
at load need not agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.checkpoint import tensor_slices
from megatron.checkpoint.filesystem import (
    DISK,
    Disk,
)
from megatron.checkpoint.manifest import FileRecord, Manifest, SavedChunk, TensorRecord
from megatron.checkpoint.safetensors_file import (
    DTYPE_NAMES,
    Entry,
    write_file,
)
from megatron.checkpoint.tensor_slices import Box
from megatron.checksums import BLOCK_BYTES


@dataclass(frozen=True)
class TensorSlice:
    """The part `box` of the global tensor `name` that this rank writes.

    `tensor` has the box's shape, any strides, on any device; or it is a function that makes it when
    it is written.
    """

    name: str
    global_shape: tuple[int, ...]
    dtype: torch.dtype
    box: Box
    tensor: torch.Tensor | Callable[[], torch.Tensor]

    def __post_init__(self) -> None:
        problem = tensor_slices.problem_of(self.box, self.global_shape)
        assert problem is None, f"{self.name}: box {tensor_slices.text(self.box)} {problem}"
        if isinstance(self.tensor, torch.Tensor):
            assert (
                tuple(self.tensor.shape) == tensor_slices.extent(self.box)
                and self.tensor.dtype == self.dtype
            ), (
                f"{self.name}: {self.tensor.dtype} {tuple(self.tensor.shape)} for {self.dtype} "
                f"{tensor_slices.text(self.box)}"
            )

    @classmethod
    def whole(cls, name: str, tensor: torch.Tensor) -> TensorSlice:
        """The slice that is all of a tensor."""
        shape = tuple(tensor.shape)
        return cls(name, shape, tensor.dtype, tensor_slices.whole(shape), tensor)

    @property
    def key(self) -> str:
        """Its key in the file: the name, with the box behind it where it is not the whole
        tensor."""
        return (
            self.name
            if self.box == tensor_slices.whole(self.global_shape)
            else self.name + tensor_slices.text(self.box)
        )


def write(
    directory: Path,
    file_name: str,
    slices: Sequence[TensorSlice],
    iteration: int,
    *,
    block_bytes: int = BLOCK_BYTES,
    disk: Disk = DISK,
) -> Manifest:
    """Write one rank's slices into `directory/file_name`, fsynced, and return its part of the
    manifest.

    Empty slices are noted without data; without any data there is no file. Raises CheckpointError.
    """
    filled = [tensor_slice for tensor_slice in slices if tensor_slices.volume(tensor_slice.box)]
    files: dict[str, FileRecord] = {}
    sums: dict[str, tuple[str, ...]] = {}
    if filled:
        entries = [
            Entry(
                tensor_slice.key,
                tensor_slice.dtype,
                tensor_slices.extent(tensor_slice.box),
                tensor_slice.tensor,
            )
            for tensor_slice in filled
        ]
        written = write_file(directory / file_name, entries, block_bytes=block_bytes, disk=disk)
        files[file_name] = FileRecord(written.bytes, written.header_crc32)
        sums = written.sums
    tensors: dict[str, TensorRecord] = {}
    for tensor_slice in slices:
        record = tensors.get(tensor_slice.name)
        dtype = DTYPE_NAMES[tensor_slice.dtype]
        assert record is None or (record.shape, record.dtype) == (
            tensor_slice.global_shape,
            dtype,
        ), f"{tensor_slice.name}: two shapes"
        chunks = record.chunks if record else ()
        if tensor_slices.volume(tensor_slice.box):
            chunks += (
                SavedChunk(file_name, tensor_slice.key, tensor_slice.box, sums[tensor_slice.key]),
            )
        tensors[tensor_slice.name] = TensorRecord(tensor_slice.global_shape, dtype, chunks)
    return Manifest(iteration, files, tensors, block_bytes, source=str(directory / file_name))
