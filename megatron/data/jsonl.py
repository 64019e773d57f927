"""JSON-lines files: chunks of lines that know where they stand, and the texts in a line. Knows no tokenizer."""

from __future__ import annotations

import codecs
import glob
import gzip
import io
import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

GZIP_MAGIC = b"\x1f\x8b"
CHUNK_BYTES = 1 << 18  # about 20 ms of work for the fastest tokenizer: handing a chunk over costs far less
CHUNK_LINES = 1024


class Chunk(NamedTuple):
    """Some successive lines of one file: `first` is the number of the first, from 1; `read` is how many bytes of all
    files (as they lie on disk) had been read when it was full."""

    file: str
    first: int
    lines: list[bytes]
    read: int


def read_chunks(files: Sequence[str], opened: Callable[[str], object]) -> Iterator[Chunk]:
    """All lines of the files in order, blank ones included; `opened` is called with each file's name as it is opened.

    A file that begins as gzip does is unpacked. A file without any line gives one chunk without lines.
    Raises ValueError (file, line, what is wrong, remedy) for a file that cannot be read to its end.
    """
    done = 0
    for file in files:
        opened(file)
        number = 1
        try:
            with open(file, "rb") as raw:
                for lines in _grouped(_unpacked(raw, file)):
                    yield Chunk(file, number, lines, done + (raw.tell() if raw.seekable() else 0))
                    number += len(lines)
                size = os.fstat(raw.fileno()).st_size
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(
                f"{file}, after line {number - 1}: the gzip file is damaged or cut short ({error}); make it again"
            ) from None
        except OSError as error:
            raise ValueError(f"{file}, after line {number - 1}: cannot be read ({error.strerror or error})") from None
        if number == 1:
            yield Chunk(file, 1, [], done + size)
        done += size


def _unpacked(raw: io.BufferedReader, file: str) -> BinaryIO:
    magic = raw.peek(2)[:2]
    if magic == GZIP_MAGIC:
        return gzip.GzipFile(fileobj=raw)
    if file.endswith(".gz") and magic:
        raise gzip.BadGzipFile("it does not begin as a gzip file does")
    return raw


def _grouped(lines: BinaryIO) -> Iterator[list[bytes]]:
    group, size = [], 0
    for line in lines:
        group.append(line)
        size += len(line)
        if size >= CHUNK_BYTES or len(group) == CHUNK_LINES:
            yield group
            group, size = [], 0
    if group:
        yield group


def texts_of(line: bytes, keys: Sequence[str]) -> list[list[str]]:
    """For each key the texts under it: one, or as many as its list has. Raises ValueError saying what is wrong."""
    record = _parse(line)
    if not isinstance(record, dict):
        raise ValueError(f"holds {_kind(record)}, not a JSON object")
    return [_texts(record, key) for key in keys]


def _parse(line: bytes) -> object:
    if line.startswith(codecs.BOM_UTF8):
        raise ValueError("begins with a byte order mark; save the file as UTF-8 without one")
    if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ValueError("is UTF-16; convert the file first (iconv -f UTF-16 -t UTF-8)")
    try:
        return json.loads(line.decode("utf-8").rstrip("\r\n"))  # no line end, so that an open string is called that
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 (byte {error.start + 1} of the line is 0x{line[error.start]:02x})") from None
    except json.JSONDecodeError as error:
        hint = "; each line must hold one whole JSON object" if line.strip() in (b"[", b"{") else ""
        raise ValueError(f"is not JSON ({error.msg}, column {error.colno}){hint}") from None
    except RecursionError:
        raise ValueError("is not JSON that can be read (nested too deeply)") from None


def _texts(record: dict, key: str) -> list[str]:
    if key not in record:
        others = ", ".join(f'"{name[:40]}"' for name in list(record)[:5]) or "none at all"
        raise ValueError(f'has no key "{key}" (its keys: {others}; choose with --json-keys)')
    value = record[key]
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and all(isinstance(text, str) for text in value):
        return value
    raise ValueError(f'"{key}" is {_kind(value)}, not a string or a list of strings')


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def input_files(patterns: Sequence[str]) -> tuple[list[str], list[str]]:
    """The files that paths and globs name, each glob's in sorted order; and what is wrong with them."""
    files: list[str] = []
    problems: list[str] = []
    for pattern in patterns:
        found = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
        if not found:
            problems.append(f"--input {pattern}: no such file (looked in {os.getcwd()}); give a .jsonl file or a glob")
        for file in found:
            if os.path.isdir(file):
                if file == pattern:
                    problems.append(f"--input {file}: is a directory; give its files: {Path(file) / '*.jsonl'}")
            elif not os.access(file, os.R_OK):
                problems.append(f"--input {file}: cannot be read; check its permissions")
            elif file in files:
                problems.append(f"--input {pattern}: names {file} a second time; name each file once")
            else:
                files.append(file)
    return files, problems
