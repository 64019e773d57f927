"""The texts, or the token ids, in a line of JSON, and what is wrong with a line."""

import codecs
import contextlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron.data.document_sources import fields_with_json

try:
    import orjson
# the standard library's parser takes its place: the same texts, about half as fast
except ImportError:
    orjson = None

# of a record of text, each of which takes some 100 bytes of memory, and 3 of the line
MOST_VALUES = 1 << 22
_STRING_OR_MARK = re.compile(rb'"(?:[^"\\]++|\\.)*+"|([,[{])', re.DOTALL)


def json_value(text: bytes) -> object:
    """What JSON in UTF-8 says. Raises json.JSONDecodeError and UnicodeDecodeError."""
    if orjson is not None:
        with contextlib.suppress(orjson.JSONDecodeError):  # as in `record_of`
            return orjson.loads(text)
    return json.loads(text.decode("utf-8"))


def json_text(value: object) -> bytes:
    """A value as JSON in UTF-8. Raises TypeError for one that JSON has no way to write."""
    return orjson.dumps(value) if orjson is not None else json.dumps(value).encode("utf-8")


def texts_of(
    line: bytes | memoryview, keys: Sequence[str], metadata_keys: Sequence[str] = ()
) -> list[list[Any]]:
    """For each key the texts under it: one, or as many as its list has; and what is kept of
    `metadata_keys`. Raises ValueError saying what is wrong."""
    record = bounded_record_of(line)
    if not isinstance(record, dict):
        raise ValueError(f"holds {_kind(record)}, not a JSON object")
    return [*(texts_under(record, key) for key in keys), *fields_with_json(record, metadata_keys)]


def ids_of(line: bytes) -> np.ndarray:
    """The token ids under "tokens", int64. Raises ValueError saying what is wrong."""
    record = record_of(line)
    if not isinstance(record, dict) or not isinstance(record.get("tokens"), list):
        raise ValueError('is not a JSON object with a list of ids under "tokens"')
    values = record["tokens"]
    try:
        ids = np.array(values, np.int64 if not values else None)
    except ValueError:  # lists of several lengths in it
        ids = np.empty(0, object)
    if ids.dtype != np.int64 or ids.ndim != 1:
        raise ValueError('holds something else than whole numbers below 2**63 under "tokens"')
    return ids


def bounded_record_of(line: bytes | memoryview) -> object:
    """`record_of` a line, also ValueError for one with more than MOST_VALUES values."""
    if len(line) > MOST_VALUES:
        text = bytes(line)
        if sum(map(text.count, (b",", b"[", b"{"))) > MOST_VALUES:  # also those in strings
            marks = (match for match in _STRING_OR_MARK.finditer(text) if match.lastindex)
            if next(itertools.islice(marks, MOST_VALUES, None), None):
                raise ValueError(f"holds more than {MOST_VALUES} values; cut it in parts")
        del text
    return record_of(line)


def record_of(line: bytes | memoryview) -> object:
    """The value of a line of JSON. Raises ValueError saying what is wrong."""
    if orjson is not None:
        # what it does not take (NaN), the other may, or say better
        with contextlib.suppress(orjson.JSONDecodeError):
            return orjson.loads(line)
    line = bytes(line)
    if line.startswith(codecs.BOM_UTF8):
        raise ValueError(
            "begins with a byte order mark, which only the first line of a file may have; remove it"
        )
    if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ValueError("is UTF-16; convert the file first (iconv -f UTF-16 -t UTF-8)")
    try:
        # no line end, so that an open string is called that
        return json.loads(line.decode("utf-8").rstrip("\r\n"))
    except UnicodeDecodeError as error:
        raise ValueError(
            f"is not UTF-8 (byte {error.start + 1} of the line is 0x{line[error.start]:02x})"
        ) from None
    except json.JSONDecodeError as error:
        hint = "; each line must hold one whole JSON object" if line.strip() in (b"[", b"{") else ""
        raise ValueError(f"is not JSON ({error.msg}, column {error.colno}){hint}") from None
    except RecursionError:
        raise ValueError("is not JSON that can be read (nested too deeply)") from None


def texts_under(record: Mapping[str, Any], key: str) -> list[str]:
    """The texts under one key of a record. Raises ValueError saying what is wrong."""
    if key not in record:
        keys = ", ".join(f'"{name[:40]}"' for name in list(record)[:5]) or "none at all"
        raise ValueError(f'has no key "{key}" (its keys: {keys}; choose with --json-keys)')
    value = record[key]
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and all(isinstance(text, str) for text in value):
        return value
    raise ValueError(f'"{key}" is {_kind(value)}, not a string or a list of strings')


def _kind(value: object) -> str:
    names = {
        dict: "an object",
        list: "a list",
        str: "a string",
        bool: "true or false",
        type(None): "null",
    }
    return names.get(type(value), "a number")
