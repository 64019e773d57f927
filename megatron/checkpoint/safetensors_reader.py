"""Reads safetensors files, whoever wrote them: every place is checked against the header, every
byte against its checksum where there is one."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from megatron.checkpoint.filesystem import CheckpointError, explained
from megatron.checkpoint.safetensors_file import (
    DTYPES,
    MAX_DIMS,
    MAX_HEADER_BYTES,
    bytes_of,
)
from megatron.checksums import BLOCK_BYTES, crc32
from megatron.file_sums import read_summed
from megatron.small_files import retried

_DAMAGED = "the file is damaged: use another checkpoint"


@dataclass(frozen=True)
class TensorLocation:
    """Location of a tensor: dtype name, shape, and [start, stop) in bytes from the beginning of the
    file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def _parse_header(  # noqa: C901
    path: Path | str, text: bytes, data_start: int, file_bytes: int
) -> tuple[dict[str, TensorLocation], dict[str, str]]:
    """Places and metadata from the JSON header, everything checked against the length of the
    file."""

    def bad(reason: str, key: str = "") -> CheckpointError:
        return CheckpointError(
            f"{path}{f', tensor {key}' if key else ''}: {reason}; {_DAMAGED} [checkpoint-damaged]"
        )

    try:
        table = json.loads(text)
    except (ValueError, RecursionError):
        raise bad("the header is not JSON") from None
    if not isinstance(table, dict):
        raise bad("the header is not a JSON object")
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise bad("__metadata__ must map texts to texts")
    locations: dict[str, TensorLocation] = {}
    for key, value in table.items():
        try:
            dtype = value["dtype"]
            shape = tuple(value["shape"])
            (low, high) = value["data_offsets"]
            numbers = [*shape, low, high]
        except (TypeError, KeyError, ValueError):
            raise bad("the header lacks dtype, shape or data_offsets", key) from None
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise bad(f"unknown dtype {str(dtype)[:40]!r}", key)
        if len(shape) > MAX_DIMS or not all(
            type(number) is int and 0 <= number < 1 << 63 for number in numbers
        ):
            raise bad(
                f"shape (at most {MAX_DIMS} dims) and data_offsets must be whole numbers", key
            )
        if high - low != prod(shape) * DTYPES[dtype].itemsize:
            raise bad(f"{dtype} {list(shape)} does not take {high - low} bytes", key)
        locations[key] = TensorLocation(dtype, shape, data_start + low, data_start + high)
    end = data_start
    for key, location in sorted(locations.items(), key=lambda item: (item[1].start, item[1].stop)):
        if location.start != end:
            raise bad(f"starts at byte {location.start}, the tensor before it ends at {end}", key)
        if location.stop > file_bytes:
            raise bad(f"the file ends at byte {file_bytes}, the tensor at {location.stop}", key)
        end = location.stop
    if end != file_bytes:
        raise bad(f"the file has {file_bytes} bytes, its header speaks of {end}")
    return locations, metadata


class SafetensorsFile:
    """An open file of tensors: `locations` by key, `metadata`, and `header_crc32`. A context
    manager.

    Opening reads and checks the header only; raises CheckpointError naming file and tensor when
    anything is wrong.
    """

    def __init__(self, path: Path | str):
        self.path = path
        self._descriptor = -1
        try:
            head = retried(self._read_header, errno.ESTALE)
            self.header_crc32 = crc32(head)
            self.locations, self.metadata = _parse_header(path, head[8:], len(head), self.bytes)
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        with explained("open", self.path):
            # of a pipe: at once
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        _check_plain(self._descriptor, self.path)
        self.bytes = os.fstat(self._descriptor).st_size

    def _read_header(self) -> bytes:
        """Open the file; length field and header."""
        self.close()
        self._open()
        field = bytearray(min(8, self.bytes))
        self._read_at(memoryview(field), 0, "header")
        length = int.from_bytes(field, "little")
        if self.bytes < 8 or not 2 <= length <= min(self.bytes - 8, MAX_HEADER_BYTES):
            raise CheckpointError(
                f"{self.path}: {self.bytes} bytes with a header of {length} (at most "
                f"{MAX_HEADER_BYTES} allowed); {_DAMAGED} [checkpoint-damaged]"
            )
        head = bytearray(8 + length)
        self._read_at(memoryview(head), 0, "header")
        return bytes(head)

    def _read_at(self, view: memoryview, offset: int, key: str) -> None:
        """Fill `view` from byte `offset` of the file."""
        with explained("read", self.path):
            while view:
                done = os.preadv(self._descriptor, [view], offset)
                if done == 0:
                    raise CheckpointError(
                        f"{self.path}, tensor {key}: the file ends at byte {offset}; {_DAMAGED} "
                        "[checkpoint-damaged]"
                    )
                view = view[done:]
                offset = offset + done

    def read_into(
        self,
        key: str,
        view: memoryview,
        start: int = 0,
        sums: Sequence[str] | None = None,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        """Fill `view` with the tensor's bytes from `start` on; with `sums`, those of the tensor's
        blocks, check them.

        With `sums`, `start` and the end of the view must be between blocks (or at the tensor's
        end). Thread-safe. Raises CheckpointError naming file and tensor.
        """
        location = self.locations[key]
        assert 0 <= start and location.start + start + len(view) <= location.stop, (
            f"{key}: beyond the tensor"
        )
        if sums is None:
            return self._read_at(view, location.start + start, key)
        assert start % block_bytes == 0, f"{key}: byte {start} is inside a block"
        with explained("read", self.path):
            done, actual = read_summed(self._descriptor, view, location.start + start, block_bytes)
        subject = f"{self.path}, tensor {key}"
        for number, have in enumerate(actual, start // block_bytes):
            if have != sums[number]:
                raise CheckpointError(
                    f"{subject}: checksum of bytes from {number * block_bytes} on is {have}, "
                    f"should be {sums[number]}; {_DAMAGED} [checkpoint-damaged]"
                )
        if done < len(view):
            raise CheckpointError(
                f"{subject}: the file ends at byte {location.start + start + done}; {_DAMAGED} "
                "[checkpoint-damaged]"
            )

    def read(self, key: str) -> torch.Tensor:
        """The whole tensor, new, on the CPU; checksums, which are in the manifest, are not verified
        here."""
        if key not in self.locations:
            raise CheckpointError(
                f"{self.path} has no tensor {key!r}; it has "
                f"{', '.join(sorted(self.locations)[:5])} ... [checkpoint-damaged]"
            )
        location = self.locations[key]
        tensor = torch.empty(location.shape, dtype=DTYPES[location.dtype])
        self.read_into(key, bytes_of(tensor))
        return tensor

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_plain(descriptor: int, path: Path | str) -> None:
    """Raise CheckpointError for an open file that is a pipe, a device or a socket."""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise CheckpointError(
            f"{path} is not a plain file; the checkpoint is damaged: use another one "
            "[checkpoint-damaged]"
        )
