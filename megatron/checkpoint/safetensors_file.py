"""Reads and writes one file in the safetensors format.

Layout (github.com/huggingface/safetensors, README "Format"): 8 bytes little-endian header length, a
JSON header {key: {dtype, shape, data_offsets}}, then the row-major tensors back to back. The header
is padded with blanks to a multiple of 8 and tensors are stored in falling order of element size, so
every tensor is aligned to its element size.

Tensors are summed by blocks (checksums.py) on a few threads while others write.
"""

import json
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
from megatron.checkpoint.filesystem import DISK, CheckpointError, Disk
from megatron.checksums import BLOCK_BYTES, block_sums, crc32

# what one thread sums and writes, or reads and sums, at a time, in whole blocks
SECTION_BYTES = 16 << 20
MAX_DIMS = 64
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_IN_FLIGHT_BYTES = 64 << 20
_SHORT_BYTES = 1 << 18  # written before another thread would have begun

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
