"""Input files of documents, cut into blocks that a worker encodes.

Where a file is cut depends on its content alone, so that a run that was killed resumes with the
same blocks.
"""

from __future__ import annotations

import codecs
import glob
import gzip
import importlib
import io
import lzma
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, NamedTuple

# stays in a core's caches: 4 MB cost a fifth more; some 2 ms of work, ten times the handing over
BLOCK_BYTES = 1 << 18
ROWS = 256  # of a parquet file that are read at a time
SCAN = 1 << 16
PACKED = {
    b"\x1f\x8b": ("gzip", ".gz"),
    b"\xfd7zXZ\x00": ("xz", ".xz"),
    b"\x28\xb5\x2f\xfd": ("zstd", ".zst"),
}
PARQUET = b"PAR1"
BROKEN = (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError)


class Place(NamedTuple):
    """Where in the input something begins: number of the file, byte of its unpacked text (parquet:
    row), line from 1."""

    file: int = 0
    offset: int = 0
    line: int = 1


class Block(NamedTuple):
    """Successive lines of a file (`kind` "jsonl" or "lines"), a whole one ("text"), or rows of a
    parquet file ("rows").

    `start` to `end` are bytes of the unpacked file, or rows. `data` is None where a worker reads
    the bytes itself; else the bytes, or for rows a list of values for each key. `read`: bytes of
    all files, as stored on disk, up to here.
    """

    number: int
    file: int
    name: str
    kind: str
    start: int
    end: int
    data: bytes | list[list[Any]] | None
    read: int

    @property
    def weight(self) -> int:
        """Its size, 1 for the usual one or less; of rows nothing is known."""
        return max(1, (self.end - self.start) // BLOCK_BYTES)

    def content(self) -> bytes:
        """The bytes of a block that is not of rows, without the file's byte order mark. Raises
        ValueError if the file cannot be read or became shorter."""
        data = self._content()
        return data.removeprefix(codecs.BOM_UTF8) if self.start == 0 else data

    def _content(self) -> bytes:
        if self.data is not None:
            return self.data
        try:
            with open(self.name, "rb", buffering=0) as file:
                data = os.pread(file.fileno(), self.end - self.start, self.start)
        except OSError as error:
            raise ValueError(
                f"{self.name}: cannot be read ({error.strerror or error}) [file-not-readable]"
            ) from None
        if len(data) < self.end - self.start:
            raise ValueError(
                f"{self.name}: became shorter while it was read; run again when it is written "
                "[file-changed-while-read]"
            )
        return data


class Reader:
    """Cuts files into blocks, from a place on. `keys` are the columns of parquet files, `optional`
    more that may be missing, with None in each row; `txt_lines` takes each line of a .txt file for
    a document, not the whole file."""

    def __init__(
        self,
        files: Sequence[str],
        keys: Sequence[str],
        txt_lines: bool = False,
        optional: Sequence[str] = (),
    ):
        self._files = files
        self._keys = keys
        self._txt_lines = txt_lines
        self._optional = optional

    def blocks(self, place: Place, opened: Callable[[str], object]) -> Iterator[Block]:
        """All blocks in order; `opened` is called with each file's name. An empty file gives one
        block without bytes.

        Raises ValueError (file, place, what is wrong, remedy) for a file that cannot be read to its
        end.
        """
        number = 0
        done = sum(os.path.getsize(file) for file in self._files[: place.file])
        for index in range(place.file, len(self._files)):
            name = self._files[index]
            begin = end = place.offset if index == place.file else 0
            opened(name)
            try:
                with open(name, "rb") as raw:
                    for kind, start, end, data, read in self._cut(raw, name, begin):
                        yield Block(number, index, name, kind, start, end, data, done + read)
                        number += 1
                    done += os.fstat(raw.fileno()).st_size
            except BROKEN as error:
                raise ValueError(
                    f"{name}, after byte {end}: the {_kind_of(name)[0]} file is damaged or cut "
                    f"short ({error or type(error).__name__}); make it again [input-file-damaged]"
                ) from None
            except OSError as error:
                raise ValueError(
                    f"{name}, after byte {end}: cannot be read ({error.strerror or error}) "
                    "[file-not-readable]"
                ) from None

    def _cut(
        self, raw: io.BufferedReader, name: str, start: int
    ) -> Iterator[tuple[str, int, int, Any, int]]:
        packed, suffix = _packed(raw.peek(8), name)
        if raw.peek(4)[:4] == PARQUET:
            yield from self._rows(raw, name, start)
            return
        kind = "jsonl"
        if name.removesuffix(suffix).endswith(".txt"):
            kind = "lines" if self._txt_lines else "text"
        if not packed and raw.seekable():
            size = os.fstat(raw.fileno()).st_size
            while start < size or start == size == 0:
                end = size if kind == "text" else _line_end(raw, start + BLOCK_BYTES, size)
                yield kind, start, end, None, end
                start = max(end, 1)
            return
        stream = _unpacked(raw, packed)
        _skip(stream, start)
        while True:
            data = stream.read() if kind == "text" else stream.read(BLOCK_BYTES)
            if kind != "text" and data and not data.endswith(b"\n"):
                data += stream.readline()
            if not data and start:
                return
            yield kind, start, start + len(data), data, raw.tell() if raw.seekable() else 0
            if not data:
                return
            start += len(data)

    def _rows(
        self, raw: io.BufferedReader, name: str, start: int
    ) -> Iterator[tuple[str, int, int, Any, int]]:
        pyarrow = _library("pyarrow", name)
        parquet = _library("pyarrow.parquet", name)
        try:
            file = parquet.ParquetFile(raw)
            missing = [key for key in self._keys if key not in file.schema_arrow.names]
            if missing:
                raise ValueError(
                    f'{name}: has no column "{missing[0]}" (its columns: '
                    f"{', '.join(file.schema_arrow.names[:5])}; choose with --json-keys) "
                    "[parquet-column-missing]"
                )
            rows = file.metadata.num_rows
            size = os.fstat(raw.fileno()).st_size
            at = 0
            keys = [*self._keys, *self._optional]
            there = [key for key in keys if key in file.schema_arrow.names]
            for batch in file.iter_batches(ROWS, columns=there, use_threads=False):
                at += batch.num_rows
                if at > start:
                    data = [
                        batch.column(key).to_pylist() if key in there else [None] * batch.num_rows
                        for key in keys
                    ]
                    yield "rows", at - batch.num_rows, at, data, size * at // rows
            if not rows and not start:
                yield "rows", 0, 0, [[] for _ in keys], size
        except pyarrow.ArrowException as error:
            line = str(error).split("\n")[0]
            raise ValueError(
                f"{name}: the parquet file is damaged or cut short ({line}); make it again "
                "[input-file-damaged]"
            ) from None


def _kind_of(name: str) -> tuple[str, str]:
    with open(name, "rb") as raw:
        return _packed(raw.read(8), name)


def _packed(magic: bytes, name: str) -> tuple[str, str]:
    """How a file is packed by its first bytes ("" for not at all), and the suffix that says so; its
    name may not lie."""
    for begin, (packed, suffix) in PACKED.items():
        if magic.startswith(begin):
            return packed, suffix
    for packed, suffix in PACKED.values():
        if name.endswith(suffix) and magic:
            raise ValueError(
                f"{name}: the {packed} file is damaged: it does not begin as a {packed} file "
                "does; make it again, or name it after what it is [input-file-damaged]"
            )
    if name.endswith(".parquet") and magic[:4] != PARQUET:
        raise ValueError(
            f"{name}: the parquet file is damaged: it does not begin as one; make it again "
            "[input-file-damaged]"
        )
    return "", ""


def _unpacked(raw: io.BufferedReader, packed: str) -> BinaryIO:
    if packed == "gzip":
        return gzip.GzipFile(fileobj=raw)
    if packed == "xz":
        return lzma.LZMAFile(raw)
    if packed == "zstd":
        return io.BufferedReader(_Zstd(raw), 1 << 20)
    return raw


class _Zstd(io.RawIOBase):
    """What a zstd file of any number of frames holds; unlike the library's own reader it notices a
    cut one."""

    def __init__(self, raw: io.BufferedReader):
        zstandard = _library("zstandard", raw.name)
        self._raw = raw
        self._error = zstandard.ZstdError
        self._machine = zstandard.ZstdDecompressor(max_window_size=1 << 31)
        self._frame = None
        self._out = memoryview(b"")
        self._left = b""

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any) -> int:
        """The next bytes; raises EOFError where the file ends within a frame."""
        while not self._out:
            packed = self._left or self._raw.read(1 << 17)
            self._left = b""
            if not packed:
                if self._frame is not None:
                    raise EOFError("it ends within a frame")
                return 0
            self._frame = self._frame or self._machine.decompressobj()
            try:
                self._out = memoryview(self._frame.decompress(packed))
            except self._error as error:
                raise EOFError(str(error)) from None
            if self._frame.eof:
                self._left = self._frame.unused_data
                self._frame = None
        count = min(len(buffer), len(self._out))
        buffer[:count] = self._out[:count]
        self._out = self._out[count:]
        return count


def _skip(stream: BinaryIO, count: int) -> None:
    while count:
        got = len(stream.read(min(count, BLOCK_BYTES)))
        count = count - got if got else 0


def _line_end(raw: io.BufferedReader, at: int, size: int) -> int:
    """The end of the line that holds the byte before `at`."""
    at -= 1
    while at < size:
        raw.seek(at)
        part = raw.read(SCAN)
        found = part.find(b"\n")
        if found >= 0:
            return at + found + 1
        at += len(part)
    return size


def _library(module: str, file: str) -> ModuleType:
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"{file}: reading it needs the package {package} ({error}); run: pip install "
            f"{package} (or install this suite with its extra: [data]) [package-missing]"
        ) from None


def input_files(patterns: Sequence[str]) -> tuple[list[str], list[str]]:
    """The files that paths and globs name, each glob's in sorted order; and what is wrong with
    them."""
    files: list[str] = []
    problems: list[str] = []
    for pattern in patterns:
        found = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
        if not found:
            problems.append(
                f"--input {pattern}: no such file (looked in {os.getcwd()}); give a .jsonl file "
                "or a glob [file-not-readable]"
            )
        for file in found:
            if os.path.isdir(file):
                if file == pattern:
                    problems.append(
                        f"--input {file}: is a directory; give its files: "
                        f"{Path(file) / '*.jsonl'} [path-is-a-directory]"
                    )
            elif not os.access(file, os.R_OK):
                problems.append(
                    f"--input {file}: cannot be read; check its permissions [file-not-readable]"
                )
            elif file in files:
                problems.append(
                    f"--input {pattern}: names {file} a second time; name each file once "
                    "[input-given-twice]"
                )
            else:
                files.append(file)
    return files, problems
