"""Reads and writes one file in the safetensors format.

Layout (github.com/huggingface/safetensors, README "Format"): 8 bytes little-endian header length, a
JSON header {key: {dtype, shape, data_offsets}}, then the row-major tensors back to back. The header
is padded with blanks to a multiple of 8 and tensors are stored in falling order of element size, so
every tensor is aligned to its element size.

Tensors are summed by blocks (checksums.py) on a few threads while others write.
"""

from __future__ import annotations

import errno
import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from megatron import device as devices
from megatron import host
from megatron.checkpoint.filesystem import DISK, CheckpointError, Disk, check_plain, explained
from megatron.checksums import BLOCK_BYTES, block_sums, crc32, read_summed
from megatron.small_files import retried

# what one thread sums and writes, or reads and sums, at a time, in whole blocks
SECTION_BYTES = 16 << 20
MAX_DIMS = 64
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_IN_FLIGHT_BYTES = 64 << 20
_SHORT_BYTES = 1 << 18  # written before another thread would have begun
_DAMAGED = "the file is damaged: use another checkpoint"

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    """One tensor to write; `data` is it (any device, any strides) or a function that makes it when
    it is written."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    data: torch.Tensor | Callable[[], torch.Tensor]

    @property
    def bytes(self) -> int:
        """Length of its data in the file."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class TensorLocation:
    """Location of a tensor: dtype name, shape, and [start, stop) in bytes from the beginning of the
    file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Written:
    """What was written: file length, CRC-32 of length field and header, and the sums of the blocks
    of every key."""

    bytes: int
    header_crc32: str
    sums: dict[str, tuple[str, ...]]


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor as uint8 [bytes], shared, not copied."""
    assert tensor.is_contiguous()
    # not reshape(-1), which keeps the stride of a dim of size 1
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, shared, not copied."""
    return flat_bytes(tensor).numpy().data


def section_bytes(block_bytes: int) -> int:
    """How much one thread takes at a time: SECTION_BYTES in whole blocks, or one larger block."""
    return max(1, SECTION_BYTES // block_bytes) * block_bytes


def thread_count() -> int:
    """Threads for sums and copies: the processors this process may use, at most 4 (then the disk is
    the limit)."""
    return min(4, host.cores())


def _header(entries: Sequence[Entry], metadata: Mapping[str, str], path: Path) -> bytes:
    """Length field and padded JSON header for entries in the order of the file."""
    table: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for entry in entries:
        assert entry.key != "__metadata__" and entry.key not in table, (
            f"{entry.key} twice in {path}"
        )
        assert entry.dtype in DTYPE_NAMES, f"{entry.key}: safetensors has no {entry.dtype}"
        table[entry.key] = {
            "dtype": DTYPE_NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [offset, offset + entry.bytes],
        }
        offset += entry.bytes
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path}: the header for {len(entries)} tensors would take {len(text)} bytes, more "
            f"than the {MAX_HEADER_BYTES} readers accept; write fewer tensors into one file"
        )
    return len(text).to_bytes(8, "little") + text


def host_copy(entry: Entry) -> torch.Tensor:
    """The entry's tensor on the CPU, row-major; itself where it is both already."""
    return row_major(entry).to("cpu")


def row_major(entry: Entry) -> torch.Tensor:
    """The entry's tensor on its device, row-major; itself where it is so already."""
    tensor = entry.data if isinstance(entry.data, torch.Tensor) else entry.data()
    assert tensor.dtype == entry.dtype and tuple(tensor.shape) == entry.shape, (
        f"{entry.key}: declared {entry.dtype} {entry.shape}, got {tensor.dtype} "
        f"{tuple(tensor.shape)}"
    )
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _sections(entry: Entry, length: int) -> Iterator[memoryview]:
    """The bytes of the entry's tensor, at most `length` at a time. On a CPU they are shared; of a
    device each section is copied through pinned memory, which bounds what is held of it."""
    tensor = row_major(entry)
    if tensor.device.type == "cpu":
        view = bytes_of(tensor)
        yield from (view[low : low + length] for low in range(0, len(view), length))
    elif entry.bytes:
        for section in flat_bytes(tensor).split(length):
            yield bytes_of(devices.pinned_copy(section))


def write_file(
    path: Path,
    entries: Sequence[Entry],
    *,
    metadata: Mapping[str, str] | None = None,
    block_bytes: int = BLOCK_BYTES,
    disk: Disk = DISK,
) -> Written:
    """Write a new file of `entries` and fsync it; tensors are not copied (strided ones: one at a
    time; those of a device: by sections).

    `metadata` is the header's free text, by default {"format": "pt"} as torch users write it.
    Raises CheckpointError if the disk fails; the caller then removes the unfinished file with its
    directory.
    """
    ordered = sorted(entries, key=lambda entry: -entry.dtype.itemsize)
    header = _header(ordered, {"format": "pt"} if metadata is None else metadata, path)
    total = len(header) + sum(entry.bytes for entry in ordered)
    descriptor = disk.create(path)
    try:
        disk.reserve(descriptor, path, total)
        disk.write(descriptor, path, header, 0)
        sums = _write_data(descriptor, path, ordered, len(header), block_bytes, disk)
        disk.fsync(descriptor, path)
    finally:
        disk.close(descriptor, path)
    return Written(total, crc32(header), sums)


def _write_data(
    descriptor: int, path: Path, entries: Sequence[Entry], offset: int, block_bytes: int, disk: Disk
) -> dict[str, tuple[str, ...]]:
    """Sum and write the tensors by sections on a few threads, with a bounded number of bytes under
    way; short sections on the caller's thread."""
    sums: dict[str, list[Future[tuple[str, ...]]]] = {}
    waiting: deque[tuple[Future[tuple[str, ...]], int]] = deque()
    under_way = 0
    length = section_bytes(block_bytes)

    def sum_and_write(view: memoryview, position: int) -> tuple[str, ...]:
        # first, so that the write finds the bytes in the cache
        section_sums = block_sums(view, block_bytes)
        disk.write(descriptor, path, view, position)
        return section_sums

    with ThreadPoolExecutor(thread_count()) as pool:
        try:
            for entry in entries:
                sums[entry.key] = []
                for section in _sections(entry, length):
                    if len(section) < _SHORT_BYTES:
                        future: Future[tuple[str, ...]] = Future()
                        future.set_result(sum_and_write(section, offset))
                    else:
                        future = pool.submit(sum_and_write, section, offset)
                    sums[entry.key].append(future)
                    waiting.append((future, len(section)))
                    under_way += len(section)
                    offset += len(section)
                    while under_way > _IN_FLIGHT_BYTES:
                        oldest, done = waiting.popleft()
                        oldest.result()
                        under_way -= done
            return {
                key: tuple(checksum for future in futures for checksum in future.result())
                for key, futures in sums.items()
            }
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


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
        check_plain(self._descriptor, self.path)
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
