"""Where each document of a pair came from, in a file next to it: PREFIX.sources.

    header    64 bytes, HEADER
    ROW       of each document in its order, 32 bytes
    hashes    uint64, of the ids of the documents that have one, in ascending order
    numbers   uint64, of the documents with these ids
    fields    JSON of each document: an object of those of `keys` that its record has
    JSON      of the whole file: its `keys`, and path and bytes of the input files

The id of a document is the first of `keys`. All integers are little-endian. The file is mapped, so
that an answer reads some pages of it whatever its size. PREFIX.json has its checksum.
"""

import hashlib
import json
import os
import shutil
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

MAGIC = b"doc-sources\r\n\x1a\x00\x00"
VERSION = 1
# magic, version, CRC-32 of the JSON; documents, ids; bytes of fields, of the JSON
HEADER = struct.Struct("<16sIIQQQQ8x")
# `offset`: byte in the unpacked file, or row from 0; `line`: from 1, 0 where it is not known;
# `fields`: where its fields begin; `file`: number of the input; `bytes`: with the end of the line,
# 0 of a row
ROW = np.dtype(
    [("offset", "<u8"), ("line", "<u8"), ("fields", "<u8"), ("file", "<u4"), ("bytes", "<u4")]
)
ENTRY = np.dtype([("hash", "<u8"), ("document", "<u8")])
# made once: it costs as much as all else; str: dates and decimal numbers of parquet
ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=str)
KINDS = ("rows", "entries", "fields")  # what the file is made of: ROW, ENTRY, JSON


def sources_path(prefix: str) -> str:
    """The file of the pair of this prefix."""
    return f"{prefix}.sources"


class Trailer(NamedTuple):
    """What the JSON at the end says: the keys, and (path, bytes) of the input files."""

    keys: tuple[str, ...]
    files: list[tuple[str, int]]


def fields_with_json(record: object, keys: Sequence[str]) -> list[list[Any]]:
    """[[fields, their JSON]] of a record, none without keys. Raises ValueError for values nested
    too deeply."""
    if not keys:
        return []
    fields = fields_of(record, keys)
    try:
        return [[fields, json_of(fields)]]
    except RecursionError:
        raise ValueError("has values of --metadata-keys that are nested too deeply") from None


def fields_of(record: object, keys: Sequence[str]) -> dict[str, Any]:
    """Those of the keys that a record has. Null is as good as none: parquet has no other way."""
    if not isinstance(record, Mapping):
        return {}
    return {key: record[key] for key in keys if record.get(key) is not None}


def id_of(fields: Mapping[str, Any], keys: Sequence[str]) -> bytes | None:
    """The id as it is looked for: its text, of any other value the JSON."""
    value = fields.get(keys[0])
    if value is None:
        return None
    return bytes_of(value) if isinstance(value, str) else json_of(value)


def json_of(value: object) -> bytes:
    """A value as it is stored. Raises RecursionError for one that is nested too deeply."""
    return bytes_of(ENCODER.encode(value))


def bytes_of(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # JSON may hold half a surrogate pair


def hash_of(name: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")


class BlockSources(NamedTuple):
    """Of the documents of a block: `rows` [documents] ROW and `entries` [ids] ENTRY, both counted
    from the block on, `fields` one after the other; `having`: how many have each key."""

    rows: np.ndarray
    entries: np.ndarray
    fields: bytes
    having: list[int]

    def placed(self, file: int, line: int, document: int, start: int) -> list[bytes]:
        """The bytes of rows, entries and fields of a block of file number `file` that begins with
        this line (0: not known) and document, and whose fields begin at byte `start`."""
        rows = self.rows.copy()
        rows["file"] = file
        rows["line"] = rows["line"] + line if line else 0
        rows["fields"] += start
        entries = self.entries.copy()
        entries["document"] += document
        return [rows.tobytes(), entries.tobytes(), self.fields]


class Collector:
    """Collects the sources of the documents of a block, whose first line begins at byte `start` of
    its file, or which are `rows` of it from that number on."""

    def __init__(self, keys: Sequence[str], start: int, rows: bool) -> None:
        self._keys = keys
        self._start = start
        self._of_rows = rows
        self._rows: list[tuple[int, int, int, int, int]] = []
        self._entries: list[tuple[int, int]] = []
        self._fields: list[bytes] = []
        self._size = 0
        self._having = [0] * len(keys)

    def add(
        self, line: int, before: int, size: int, fields: Mapping[str, Any], text: bytes
    ) -> None:
        """The next document: its line and the bytes before it in the block, its bytes, its fields
        and their JSON."""
        name = id_of(fields, self._keys)
        if name is not None:
            self._entries.append((hash_of(name), len(self._rows)))
        if self._of_rows:
            before, size = line, 0
        self._rows.append((self._start + before, line, self._size, 0, size))
        self._fields.append(text)
        self._size += len(text)
        for number, key in enumerate(self._keys):
            self._having[number] += key in fields

    def collected(self) -> BlockSources:
        """All of them."""
        return BlockSources(
            np.array(self._rows, ROW),
            np.array(self._entries, ENTRY),
            b"".join(self._fields),
            self._having,
        )


def write(target: str, sources: Trailer, paths: Sequence[str]) -> None:
    """Write the file out of those in `paths` (of KINDS). Takes 48 bytes of memory for each document
    with an id. Raises OSError."""
    rows, entries, fields = paths
    index = np.fromfile(entries, ENTRY)
    index = index[np.argsort(index["hash"], kind="stable")]
    text = json_of({"keys": sources.keys, "files": sources.files})
    with open(target, "wb") as file:
        file.write(
            HEADER.pack(
                MAGIC,
                VERSION,
                zlib.crc32(text),
                os.path.getsize(rows) // ROW.itemsize,
                len(index),
                os.path.getsize(fields),
                len(text),
            )
        )
        with open(rows, "rb") as source:
            shutil.copyfileobj(source, file, 1 << 20)
        for name in ("hash", "document"):
            file.write(np.ascontiguousarray(index[name]).data)
        with open(fields, "rb") as source:
            shutil.copyfileobj(source, file, 1 << 20)
        file.write(text)
