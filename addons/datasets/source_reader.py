"""Readers of where each document of a pair or a set came from."""

import json
import os
import struct
import zlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from megatron.data.document_sources import (
    ENTRY,
    HEADER,
    MAGIC,
    ROW,
    VERSION,
    Trailer,
    bytes_of,
    hash_of,
    id_of,
    sources_path,
)
from megatron.data.parts import part_set
from megatron.data.tokenizers import metadata


class SourcesFile:
    """A PREFIX.sources, mapped. Raises OSError, and ValueError for a damaged one."""

    def __init__(self, prefix: str, note: Mapping[str, Any]) -> None:
        self.path = sources_path(prefix)
        recorded = note.get(metadata.FILES, {}).get("sources")
        if recorded is None:
            raise ValueError(
                f"{prefix}: has no {os.path.basename(self.path)}, which says where each document "
                "came from; make the data again with preprocess_data.py --metadata-keys "
                "[document-sources-missing]"
            )
        try:
            data: Any = np.memmap(self.path, np.uint8, "r")
            head = HEADER.unpack(data[: HEADER.size].tobytes())
            magic, version, checksum, self.count, ids, fields, size = head
            ends = list(accumulate((HEADER.size, ROW.itemsize * self.count, 8 * ids, 8 * ids)))
            text = data[ends[-1] + fields :].tobytes()
            if (magic, version) != (MAGIC, VERSION) or (len(data), len(text)) != (
                recorded["bytes"],
                size,
            ):
                raise ValueError("header or size differ")
            if zlib.crc32(text) != checksum:
                raise ValueError("the checksum of its last part differs")
            self.trailer = Trailer(**json.loads(text))
        except (ValueError, TypeError, struct.error) as error:
            raise self._damaged(error) from None
        self._rows = data[ends[0] : ends[1]].view(ROW)
        self._hashes = data[ends[1] : ends[2]].view("<u8")
        self._numbers = data[ends[2] : ends[3]].view("<u8")
        self._fields = data[ends[3] : ends[3] + fields]

    def _damaged(self, error: object) -> ValueError:
        return ValueError(
            f"{self.path}: is damaged ({error}); copy it again, or make the data again with "
            "tools/preprocess_data.py [data-file-damaged]"
        )

    @property
    def fields_size(self) -> int:
        """Bytes of the fields."""
        return len(self._fields)

    def shifted(
        self, inputs: Sequence[int], document: int, start: int
    ) -> tuple[memoryview, memoryview, memoryview]:
        """Rows, entries and fields as they are in a file whose inputs have these numbers, behind so
        many documents and bytes of fields."""
        rows = self._rows.copy()
        if self.count and int(rows["file"].max()) >= len(inputs):
            raise self._damaged("a number of an input is too large")
        rows["file"] = np.asarray(inputs, "<u4")[rows["file"]]
        rows["fields"] += start
        entries = np.empty(len(self._hashes), ENTRY)
        entries["hash"] = self._hashes
        entries["document"] = self._numbers + np.uint64(document)
        return rows.data, entries.data, self._fields.data

    def row(self, number: int) -> np.void:
        """The ROW of a document."""
        return self._rows[number]

    def fields(self, number: int) -> dict[str, Any]:
        """The fields of a document."""
        inside = slice(self._fields_start(number), self._fields_start(number + 1))
        try:
            text = self._fields[inside].tobytes().decode("utf-8", "surrogatepass")
            return dict(json.loads(text))
        except (ValueError, TypeError) as error:
            raise self._damaged(error) from None

    def _fields_start(self, number: int) -> int:
        return int(self._rows[number]["fields"]) if number < self.count else len(self._fields)

    def documents(self, name: bytes) -> list[int]:
        """The documents of this id, in ascending order."""
        value = np.uint64(hash_of(name))  # a Python integer would have numpy copy the whole table
        first = int(np.searchsorted(self._hashes, value, "left"))
        end = int(np.searchsorted(self._hashes, value, "right"))
        numbers = [int(number) for number in self._numbers[first:end]]
        if any(number >= self.count for number in numbers):
            raise self._damaged("a number of a document is too large")
        keys = self.trailer.keys
        return [number for number in numbers if id_of(self.fields(number), keys) == name]


class DocumentSources:
    """The sources of the documents of a pair, or of a set of parts. Raises OSError, and ValueError
    for data without them, damaged ones and a set that is not whole."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        if part_set.is_set(prefix):
            plan = part_set.read_plan(prefix)
            self._files = [
                SourcesFile(part, note)
                for part, note in zip(plan.parts(), plan.records(), strict=True)
            ]
        else:
            self._files = [SourcesFile(prefix, metadata.note(prefix) or {})]
        self._ends = list(accumulate(file.count for file in self._files))

    def __len__(self) -> int:
        return self._ends[-1]

    def document(self, number: int) -> dict[str, Any]:
        """Of a document: `input`, `input_bytes` (of the whole file), `row` or `offset` and `bytes`
        (with the end of the line) in the unpacked file, `line` (None where it is not known),
        `fields`. Raises ValueError for a number that is too large."""
        if number >= len(self):
            raise ValueError(
                f"--document {number}: {self._prefix} has {len(self)} documents, numbered from 0 "
                "[document-not-found]"
            )
        index = bisect_right(self._ends, number)
        file = self._files[index]
        within = number - (self._ends[index - 1] if index else 0)
        offset, line, _, input_number, size = file.row(within).item()
        if input_number >= len(file.trailer.files):
            raise file._damaged("a number of an input is too large")
        path, input_bytes = file.trailer.files[input_number]
        position = {"offset": offset, "bytes": size, "line": line or None}
        return {
            "document": number,
            "input": path,
            "input_bytes": input_bytes,
            **(position if size else {"row": offset}),
            "fields": file.fields(within),
        }

    def with_id(self, name: str) -> list[int]:
        """The documents with this id, in ascending order."""
        text = bytes_of(name)
        starts = [0, *self._ends]
        return [
            start + number
            for start, file in zip(starts, self._files, strict=False)
            for number in file.documents(text)
        ]
