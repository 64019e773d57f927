"""The manifest of a checkpoint: which slices of which global tensors are stored in which file, with
lengths and checksums.

It is JSON whose first line holds the CRC-32 of the whole text (taken with eight zeros in its
place), so that a damaged manifest is noticed however it is damaged.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.checkpoint import tensor_slices
from megatron.checkpoint.filesystem import (
    CheckpointError,
)
from megatron.checkpoint.safetensors_file import DTYPES, MAX_DIMS
from megatron.checkpoint.tensor_slices import Box
from megatron.checksums import ALGORITHM, BLOCK_BYTES, crc32
from megatron.config.run_directory import (
    MANIFEST,
    ForeignCheckpoint,
    read_small_file,
)
from megatron.small_files import UnsafeName, safe_name

FORMAT = "sharded-safetensors"
VERSION = 1
FILE_NAME = MANIFEST
_FIRST_LINE = re.compile(rb'\{"crc32": "([0-9a-f]{8})",\n')
_DAMAGED = "the checkpoint is damaged: use another one"


@dataclass(frozen=True)
class SavedChunk:
    """One box of a tensor: the file and its key there, and the sum of each block of its bytes
    (checksums.py)."""

    file: str
    key: str
    box: Box
    sums: tuple[str, ...]


@dataclass(frozen=True)
class TensorRecord:
    """A global tensor: its shape, dtype (safetensors' name) and the chunks that together are it."""

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[SavedChunk, ...]

    def bytes_of(self, box: Box) -> int:
        """Length of a box of this tensor."""
        return tensor_slices.volume(box) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class FileRecord:
    """A file of the checkpoint: its length, and the CRC-32 of its header (safetensors) or of all of
    it (the others)."""

    bytes: int
    crc32: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint (or one rank's part of it) holds; `source` is its path, for messages;
    `crc32` that of the text it was read from."""

    iteration: int
    files: Mapping[str, FileRecord]
    tensors: Mapping[str, TensorRecord]
    block_bytes: int = BLOCK_BYTES
    source: str = field(default=FILE_NAME, compare=False)
    crc32: str = field(default="", compare=False)

    def dump(self) -> bytes:
        """The text of this manifest, one tensor per line."""
        head = {
            "format": FORMAT,
            "version": VERSION,
            "iteration": self.iteration,
            "checksum": ALGORITHM,
            "block_bytes": self.block_bytes,
        }
        lines = [f"{json.dumps(key)}: {json.dumps(value)},\n" for key, value in head.items()]
        files = {
            name: {"bytes": record.bytes, "crc32": record.crc32}
            for name, record in self.files.items()
        }
        tensors = {name: self._as_json(record) for name, record in self.tensors.items()}
        body = "".join(lines) + f'"files": {_rows(files)},\n"tensors": {_rows(tensors)}}}\n'
        zeroed = ('{"crc32": "00000000",\n' + body).encode()
        return zeroed.replace(b"00000000", crc32(zeroed).encode(), 1)

    @staticmethod
    def _as_json(record: TensorRecord) -> dict[str, Any]:
        chunks = [
            {
                "file": chunk.file,
                "key": chunk.key,
                "box": [list(pair) for pair in chunk.box],
                "bytes": record.bytes_of(chunk.box),
                "sums": list(chunk.sums),
            }
            for chunk in record.chunks
        ]
        return {"shape": list(record.shape), "dtype": record.dtype, "chunks": chunks}

    def check_cover(self, name: str) -> None:
        """Raise CheckpointError unless the chunks of `name` cover each element exactly once."""
        record = self.tensors[name]
        pair = tensor_slices.first_overlap([chunk.box for chunk in record.chunks])
        if pair:
            raise CheckpointError(
                f"{self.source}, tensor {name}: {tensor_slices.text(pair[0])} and "
                f"{tensor_slices.text(pair[1])} overlap; each element must be written once "
                "[checkpoint-damaged]"
            )
        have = sum(tensor_slices.volume(chunk.box) for chunk in record.chunks)
        want = tensor_slices.volume(tensor_slices.whole(record.shape))
        if have != want:
            raise CheckpointError(
                f"{self.source}, tensor {name}: its chunks hold {have} of {want} elements of "
                f"shape {list(record.shape)}; a rank's part is missing [checkpoint-damaged]"
            )


def _rows(table: Mapping[str, Any]) -> str:
    """A JSON object with one line per key."""
    rows = ",\n".join(
        f" {json.dumps(key)}: {json.dumps(value, separators=(',', ':'))}"
        for key, value in table.items()
    )
    return "{\n" + rows + "}"


def merge(
    manifests: Iterable[Manifest],
    extra_files: Mapping[str, FileRecord],
    source: str,
    covers: bool = True,
) -> Manifest:
    """The manifest of a checkpoint from its ranks' parts; tensors sorted by name. Raises
    CheckpointError.

    All parts must agree on iteration and on shape and dtype of every tensor; if `covers`, they must
    together cover each tensor exactly once.
    """
    manifests = list(manifests)
    files: dict[str, FileRecord] = {}
    tensors: dict[str, TensorRecord] = {}
    for rank_manifest in manifests:
        assert (rank_manifest.iteration, rank_manifest.block_bytes) == (
            manifests[0].iteration,
            manifests[0].block_bytes,
        ), rank_manifest.source
        assert not files.keys() & rank_manifest.files.keys(), (
            f"{rank_manifest.source}: a file of another rank"
        )
        files.update(rank_manifest.files)
        for name, record in rank_manifest.tensors.items():
            first = tensors.get(name, record)
            if (first.shape, first.dtype) != (record.shape, record.dtype):
                raise CheckpointError(
                    f"{rank_manifest.source}, tensor {name}: {record.dtype} {list(record.shape)} "
                    f"here, {first.dtype} {list(first.shape)} on another rank [checkpoint-damaged]"
                )
            chunks = record.chunks if first is record else first.chunks + record.chunks
            tensors[name] = TensorRecord(record.shape, record.dtype, chunks)
    merged = Manifest(
        manifests[0].iteration,
        {**files, **extra_files},
        dict(sorted(tensors.items())),
        manifests[0].block_bytes,
        source,
    )
    for name in merged.tensors if covers else ():
        merged.check_cover(name)
    return merged


def read(path: Path) -> Manifest:
    """The checked manifest in a file. Raises CheckpointError."""
    return parse(read_small_file(path), str(path))


def parse(text: bytes, source: str) -> Manifest:
    """The manifest in `text`, fully checked but for coverage (see check_cover). Raises
    CheckpointError."""
    match = _FIRST_LINE.match(text)
    if not match:
        raise CheckpointError(
            f"{source} is not a manifest of this suite, or its first line is damaged; {_DAMAGED} "
            "[checkpoint-damaged]"
        )
    zeroed = text[: match.start(1)] + b"00000000" + text[match.end(1) :]
    if crc32(zeroed).encode() != match[1]:
        raise CheckpointError(
            f"{source}: its checksum is {crc32(zeroed)}, should be {match[1].decode()}; "
            f"{_DAMAGED} [checkpoint-damaged]"
        )
    try:
        table = json.loads(text)
        name = table["format"]
        version = table["version"]
        if name != FORMAT or type(version) is not int or not 1 <= version <= VERSION:
            raise ForeignCheckpoint(
                f"{source} has format {name!r} version {version!r}; this program reads {FORMAT!r} "
                f"up to version {VERSION}: use a newer program [checkpoint-version-unknown]"
            )
        files = {
            safe_name(file, source): FileRecord(
                _natural_number(value["bytes"]), _text(value["crc32"])
            )
            for file, value in table["files"].items()
        }
        if table["checksum"] != ALGORITHM:
            raise ValueError(f"checksum {table['checksum']!r}")
        block_bytes = _natural_number(table["block_bytes"])
        if not 4096 <= block_bytes <= 1 << 30 or block_bytes % 4096:
            raise ValueError(f"block_bytes {block_bytes}")
        tensors = {
            key: _tensor(key, value, files, block_bytes) for key, value in table["tensors"].items()
        }
        chunk_keys = [
            (chunk.file, chunk.key) for record in tensors.values() for chunk in record.chunks
        ]
        if len(set(chunk_keys)) != len(chunk_keys):
            raise ValueError("one part of a file is used twice")
        return Manifest(
            _natural_number(table["iteration"]),
            files,
            tensors,
            block_bytes,
            source,
            match[1].decode(),
        )
    except UnsafeName as error:
        raise CheckpointError(str(error)) from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{source}: {type(error).__name__} {error}; {_DAMAGED} [checkpoint-damaged]"
        ) from None


def _tensor(
    name: str, value: Any, files: Mapping[str, FileRecord], block_bytes: int
) -> TensorRecord:
    """One tensor's record; raises ValueError, TypeError or KeyError with the reason."""
    shape = tuple(_natural_number(size) for size in value["shape"])
    if value["dtype"] not in DTYPES or len(shape) > MAX_DIMS:
        raise ValueError(f"tensor {name}: unknown dtype {value['dtype']!r} or too many dims")
    record = TensorRecord(
        shape,
        value["dtype"],
        tuple(
            SavedChunk(
                _text(chunk["file"]),
                _text(chunk["key"]),
                tuple((_natural_number(low), _natural_number(high)) for low, high in chunk["box"]),
                tuple(_text(checksum) for checksum in chunk["sums"]),
            )
            for chunk in value["chunks"]
        ),
    )
    for chunk, raw in zip(record.chunks, value["chunks"], strict=True):
        problem = tensor_slices.problem_of(chunk.box, shape)
        if problem:
            raise ValueError(f"tensor {name}: box {tensor_slices.text(chunk.box)} {problem}")
        length = record.bytes_of(chunk.box)
        if not length or raw["bytes"] != length:
            raise ValueError(
                f"tensor {name}: box {tensor_slices.text(chunk.box)} has {length} bytes, not "
                f"{raw['bytes']!r}"
            )
        if len(chunk.sums) != -(-length // block_bytes):
            raise ValueError(
                f"tensor {name}: {len(chunk.sums)} checksums for the {length} bytes of a box"
            )
        if chunk.file not in files:
            raise ValueError(f"tensor {name}: its file {chunk.file!r} is not in the list of files")
        if length > files[chunk.file].bytes:
            raise ValueError(
                f"tensor {name}: box {tensor_slices.text(chunk.box)} has more bytes than its file"
            )
    return record


def _natural_number(value: Any) -> int:
    """`value` if it is a whole number that a file can hold."""
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r} is not a whole number from 0 to 2^63")
    return value


def _text(value: Any) -> str:
    """`value` if it is a text."""
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a text")
    return value
