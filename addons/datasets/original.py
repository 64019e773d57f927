"""The record that a document was made of, as its input file has it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from io import BufferedReader
from typing import Any

from megatron.data.document_sources import fields_of, json_of
from megatron.data.preprocess.jsonl import json_value
from megatron.data.preprocess.readers import RECORD_BYTES, packed_as, skip
from megatron.data.preprocess.unpack import BROKEN, ParquetRows, unpacked


def original_record(source: Mapping[str, Any]) -> str:
    """The line, the text, or the row as JSON. `source`: what `DocumentSources.document` says of the
    document. Raises OSError, and ValueError for a file that is damaged or is not what it was."""
    name = source["input"]
    with open(name, "rb") as raw:
        if os.fstat(raw.fileno()).st_size != source["input_bytes"]:
            raise _changed(name)
        try:
            text = _row(raw, source["row"]) if "row" in source else _line(raw, source)
            fields = source["fields"]
            if not fields:
                return text
            record = json_value(text.encode("utf-8", "surrogatepass"))
        except (*BROKEN, UnicodeDecodeError, json.JSONDecodeError, StopIteration):
            raise _changed(name) from None
    if json_of(fields_of(record, tuple(fields))) != json_of(fields):
        raise _changed(name)
    return text


def _line(raw: BufferedReader, source: Mapping[str, Any]) -> str:
    stream = unpacked(raw, packed_as(raw.peek(8), source["input"])[0])
    if stream is raw:
        raw.seek(source["offset"])
    else:
        skip(stream, source["offset"])
    return stream.read(source["bytes"]).decode("utf-8").rstrip("\r\n")


def _row(raw: BufferedReader, number: int) -> str:
    names = ParquetRows(raw, ()).names
    rows = ParquetRows(raw, names)
    _, _, values = next(rows.blocks(number, RECORD_BYTES, number + 1))
    record = dict(zip(names, (column[0] for column in values or ()), strict=True))
    return json.dumps(record, ensure_ascii=False, default=str)


def _changed(name: str) -> ValueError:
    return ValueError(
        f"{name}: is not the file that was tokenized, it has changed since; the place is that in "
        "the file as it was [source-changed]"
    )
