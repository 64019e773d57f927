"""Input files of documents, cut into blocks that a worker encodes.

Where a file is cut depends on its content alone, so that a run that was killed resumes with the
same blocks.
"""

import codecs
import glob
import io
import itertools
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

from megatron.data.preprocess.unpack import BROKEN, ParquetRows, unpacked

# stays in a core's caches: 4 MB cost a fifth more; some 2 ms of work, ten times the handing over
BLOCK_BYTES = 1 << 18
# The most that a line, a row or a text file may have: its copies, one of them with 4 bytes for each
# character, stay below 1 GB. Few texts of a corpus have more than enwik8's 100 MB.
RECORD_BYTES = 128 << 20
SCAN = 1 << 16
PACKED = {
    b"\x1f\x8b": ("gzip", ".gz"),
    b"\xfd7zXZ\x00": ("xz", ".xz"),
    b"\x28\xb5\x2f\xfd": ("zstd", ".zst"),
}
PARQUET = b"PAR1"
TEXT_SUFFIXES = (".txt", ".md", ".markdown", ".rst", ".text")  # of files that are one document
RECORD_SUFFIXES = (".jsonl", ".json", ".ndjson", ".parquet")
# What a table's column is made of JSON Lines with; any other reader of CSV does as well.
_FROM_CSV = (
    "python -c 'import csv, json, sys; [print(json.dumps(row)) for row in "
    "csv.DictReader(open(sys.argv[1]){delimiter})]' {file} > {stem}.jsonl, then --input "
    "{stem}.jsonl --json-keys COLUMN"
)
_FROM_LIST = (
    "python -c 'import json, sys; [print(json.dumps(row)) for row in "
    "json.load(open(sys.argv[1]))]' {file} > {stem}.jsonl"
)


class InputPosition(NamedTuple):
    """Where in the input something begins: number of the file, byte of its unpacked text (parquet:
    row), line from 1."""

    file: int = 0
    offset: int = 0
    line: int = 1


class FileBlock(NamedTuple):
    """Successive lines of a file (`kind` "jsonl" or "lines"), a whole one ("text"), rows of a
    parquet file ("rows"), or a line, text or row of more than RECORD_BYTES ("long"), without its
    bytes.

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

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """The values of each row of a block of rows."""
        assert isinstance(self.data, list)
        return zip(*self.data, strict=True)

    def text_start(self) -> int:
        """Where in the file the first line begins, after a byte order mark. Raises as `content`."""
        if self.start or self.kind not in ("jsonl", "lines", "text"):
            return self.start
        return len(codecs.BOM_UTF8) if self._content().startswith(codecs.BOM_UTF8) else 0

    def content(self) -> bytes:
        """The bytes of a block that is not of rows, without the file's byte order mark. Raises
        ValueError if the file cannot be read or became shorter."""
        data = self._content()
        return data.removeprefix(codecs.BOM_UTF8) if self.start == 0 else data

    def _content(self) -> bytes:
        if isinstance(self.data, bytes):
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


class FileReader:
    """Cuts files into blocks, from a place on. `keys` are the columns of parquet files, `optional`
    more that may be missing, with None in each row; `txt_lines` takes each line of a .txt file for
    a document, not the whole file. With `span` the lines of the one file that begin in these bytes,
    or these rows."""

    def __init__(
        self,
        files: Sequence[str],
        keys: Sequence[str],
        txt_lines: bool = False,
        optional: Sequence[str] = (),
        span: tuple[int, int] | None = None,
    ):
        self._files = files
        self._keys = keys
        self._txt_lines = txt_lines
        self._optional = optional
        self._span = span

    def blocks(
        self, position: InputPosition, opened: Callable[[str], object]
    ) -> Iterator[FileBlock]:
        """All blocks in order; `opened` is called with each file's name. An empty file gives one
        block without bytes. None has more than BLOCK_BYTES + RECORD_BYTES.

        Raises ValueError (file, place, what is wrong, remedy) for a file that cannot be read to its
        end.
        """
        number = 0
        done = sum(os.path.getsize(file) for file in self._files[: position.file])
        for index in range(position.file, len(self._files)):
            name = self._files[index]
            begin = end = position.offset if index == position.file else 0
            opened(name)
            try:
                with open(name, "rb") as raw:
                    for kind, start, end, data, read in self._cut(raw, name, begin):
                        yield FileBlock(number, index, name, kind, start, end, data, done + read)
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
        packed, suffix = packed_as(raw.peek(8), name)
        if raw.peek(4)[:4] == PARQUET:
            yield from self._rows(raw, name, start)
            return
        kind = _kind_of_text(name.removesuffix(suffix), self._txt_lines)
        if not packed and raw.seekable():
            size = os.fstat(raw.fileno()).st_size
            if self._span:
                start, size = (
                    _line_end(raw, offset, size) if offset else 0 for offset in self._span
                )
            yield from _plain(raw, kind, start, size)
            return
        stream = unpacked(raw, packed)
        skip(stream, start)
        while True:
            data = stream.read(RECORD_BYTES + 1 if kind == "text" else BLOCK_BYTES)
            if kind != "text" and data and not data.endswith(b"\n"):
                data += stream.readline(RECORD_BYTES)
            if not data and start:
                return
            end = start + len(data)
            cut = start if kind == "text" else start + data.rfind(b"\n") + 1
            long = end - cut > RECORD_BYTES
            if long:
                data = data[: cut - start]
                end += _skip_record(stream, kind)
            read = raw.tell() if raw.seekable() else 0
            if not long:
                yield kind, start, end, data, read
            elif data:
                yield kind, start, cut, data, read
            if long:
                yield "long", cut, end, b"", read
            if not data and not long:
                return
            start = end

    def _rows(
        self, raw: io.BufferedReader, name: str, start: int
    ) -> Iterator[tuple[str, int, int, Any, int]]:
        rows = ParquetRows(raw, self._keys, self._optional)
        size = os.fstat(raw.fileno()).st_size
        if not rows.count and not start:
            yield "rows", 0, 0, [[] for _ in (*self._keys, *self._optional)], size
        stop = self._span[1] if self._span else rows.count
        for first, end, values in rows.blocks(start, RECORD_BYTES, stop):
            kind = "rows" if values is not None else "long"
            yield kind, first, end, values or b"", size * end // rows.count


def too_long(*_: object) -> NoReturn:
    """Raises ValueError: what is wrong with a record of more than RECORD_BYTES."""
    raise ValueError(
        f"has more than {RECORD_BYTES} bytes, the most that a line, row or text file may have; cut "
        "it in parts (--txt-lines makes each line of a text file a document)"
    )


def _kind_of(name: str) -> tuple[str, str]:
    with open(name, "rb") as raw:
        return packed_as(raw.read(8), name)


def _kind_of_text(name: str, txt_lines: bool) -> str:
    """What the blocks of a file are whose name, without the suffix of a packed one, is this."""
    if not name.endswith(TEXT_SUFFIXES):
        return "jsonl"
    return "lines" if txt_lines else "text"


def spans(name: str, size: int, txt_lines: bool) -> tuple[bool, list[tuple[int, int]]]:
    """A file cut into spans of about `size` bytes as stored: whether they are rows, and the bytes
    or rows of each; none for a file that is read whole. Raises OSError, and ValueError for a file
    that is damaged."""
    with open(name, "rb") as raw:
        packed, suffix = packed_as(raw.peek(8), name)
        total = os.fstat(raw.fileno()).st_size
        if raw.peek(4)[:4] == PARQUET:
            return True, _row_spans(ParquetRows(raw, ()).groups(), size / total)
    if packed or _kind_of_text(name.removesuffix(suffix), txt_lines) == "text":
        return False, []
    count = -(-total // size)
    return False, [(total * n // count, total * (n + 1) // count) for n in range(count)]


def _row_spans(groups: Sequence[int], share: float) -> list[tuple[int, int]]:
    """Row groups (their rows) put together until they have this share of all rows."""
    cuts = [0]
    end = 0
    for rows in groups:
        end += rows
        if end - cuts[-1] >= share * sum(groups):
            cuts.append(end)
    if end > cuts[-1]:
        cuts.append(end)
    return list(itertools.pairwise(cuts))


def packed_as(magic: bytes, name: str) -> tuple[str, str]:
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


def _plain(
    raw: io.BufferedReader, kind: str, start: int, size: int
) -> Iterator[tuple[str, int, int, Any, int]]:
    """Blocks of a file that is not compressed, up to byte `size`, without their bytes."""
    while start < size or start == size == 0:
        end = size if kind == "text" else _line_end(raw, start + BLOCK_BYTES, size)
        cut = end
        if end - start > RECORD_BYTES + (0 if kind == "text" else BLOCK_BYTES):
            raw.seek(start)
            cut = start
            if kind != "text":
                cut += raw.read(BLOCK_BYTES).rfind(b"\n") + 1
        if cut > start or not size:
            yield kind, start, cut, None, cut
        if cut < end:
            yield "long", cut, end, b"", end
        start = max(end, 1)


def skip(stream: io.BufferedIOBase, count: int) -> None:
    """Pass by so many bytes, or all that are left."""
    while count:
        got = len(stream.read(min(count, BLOCK_BYTES)))
        count = count - got if got else 0


def _skip_record(stream: io.BufferedIOBase, kind: str) -> int:
    """Pass by the rest of a text, or of a line; its bytes."""
    count = 0
    chunk = b""
    while not chunk.endswith(b"\n") or kind == "text":
        chunk = stream.read(SCAN) if kind == "text" else stream.readline(SCAN)
        if not chunk:
            break
        count += len(chunk)
    return count


def _line_end(raw: io.BufferedReader, position: int, size: int) -> int:
    """The end of the line that holds the byte before `at`."""
    position -= 1
    while position < size:
        raw.seek(position)
        chunk = raw.read(SCAN)
        index = chunk.find(b"\n")
        if index >= 0:
            return position + index + 1
        position += len(chunk)
    return size


class Inputs(NamedTuple):
    """The files that paths and globs name; what is wrong with them; what is worth a line."""

    files: list[str]
    problems: list[str]
    notes: list[str]


def input_files(patterns: Sequence[str]) -> Inputs:
    """The files that paths, directories and globs name, those of each glob or directory in sorted
    order. A directory is walked for files of text and of records; hidden ones are passed by."""
    files: list[str] = []
    problems: list[str] = []
    notes: list[str] = []
    for pattern in patterns:
        matches = (
            [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
        )
        if os.path.isdir(pattern):
            matches, others = _walked(pattern)
            if not matches:
                problems.append(
                    f"--input {pattern}: the directory has no file that ends in "
                    f"{', '.join(TEXT_SUFFIXES + RECORD_SUFFIXES)}{others and f', but {others}'}; "
                    "rename those that are text [input-without-text]"
                )
            elif others:
                notes.append(f"--input {pattern}: not read: {others}")
        elif not matches:
            problems.append(_missing(pattern))
        for file in matches:
            if os.path.isdir(file):
                continue  # a glob's
            if not os.access(file, os.R_OK):
                problems.append(
                    f"--input {file}: cannot be read; check its permissions [file-not-readable]"
                )
            elif file in files:
                problems.append(
                    f"--input {pattern}: names {file} a second time; name each file once "
                    "[input-given-twice]"
                )
            else:
                problems += _other_format(file)
                files.append(file)
    return Inputs(files, problems, notes)


def _walked(folder: str) -> tuple[list[str], str]:
    """The files of text and of records below a folder, and how many others there are, by suffix."""
    files = []
    others: Counter[str] = Counter()
    for path, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(name for name in names if not name.startswith(".")):
            plain = _without_packing(name).lower()
            if plain.endswith(TEXT_SUFFIXES + RECORD_SUFFIXES):
                files.append(os.path.join(path, name))
            else:
                others[os.path.splitext(plain)[1] or "without a suffix"] += 1
    return files, ", ".join(f"{count} {suffix}" for suffix, count in others.most_common(5))


def _without_packing(name: str) -> str:
    suffix = next((suffix for _, suffix in PACKED.values() if name.endswith(suffix)), "")
    return name.removesuffix(suffix)


def _missing(pattern: str) -> str:
    where = f"--input {pattern}: no such file (looked in {os.getcwd()})"
    if re.fullmatch(r"[\w-]+/[\w.-]+", pattern) and "." not in os.path.splitext(pattern)[1]:
        return (
            f"{where}; a data set of the Hugging Face hub: --input hf://{pattern}, or hf download "
            f"{pattern} --repo-type dataset --local-dir DIR, then --input DIR [file-not-readable]"
        )
    return f"{where}; give a file, a directory or a glob [file-not-readable]"


def _other_format(file: str) -> Iterator[str]:
    """What is wrong with a file that is neither text nor JSON Lines nor parquet, by its name and
    its beginning."""
    name = _without_packing(file)
    stem, suffix = os.path.splitext(name)
    if suffix.lower() in (".csv", ".tsv"):
        delimiter = ', delimiter="\\t"' * (suffix.lower() == ".tsv")
        yield (
            f"--input {file}: {suffix[1:].upper()} is not read; make JSON Lines of it: "
            f"{_FROM_CSV.format(file=name, stem=stem, delimiter=delimiter)} [input-format-not-read]"
        )
        return
    if not os.path.isfile(file) or name.endswith(TEXT_SUFFIXES) or name != file:
        return
    with open(file, "rb") as raw:
        start = raw.read(SCAN)
    if start.startswith((*PACKED, PARQUET)):
        return
    begin = start.removeprefix(codecs.BOM_UTF8).lstrip()[:1]
    if suffix == ".json" and begin == b"[":
        yield (
            f"--input {file}: is one JSON list, and each line must hold one record; make JSON "
            f"Lines of it: {_FROM_LIST.format(file=file, stem=stem)} [input-format-not-read]"
        )
    elif begin not in (b"", b"{", b"[") and not name.endswith(RECORD_SUFFIXES):
        remedy = "if it is text, let its name end in .txt"
        if start.startswith(b"%PDF") or b"\0" in start:
            remedy = "it is no text; extract its text first (pdftotext, pandoc, unzip)"
        yield f"--input {file}: is not JSON Lines; {remedy} [input-format-not-read]"
