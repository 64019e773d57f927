"""Writes the `.bin` / `.idx` pair of a tokenized corpus atomically."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np

from megatron.data.indexed_dataset import (
    CODES,
    HEADER,
    MAGIC,
    VERSION,
    IndexedDataset,
    bin_path,
    idx_path,
)


def optimal_dtype(vocab_size: int | None) -> np.dtype:
    """The dtype Megatron's preprocessing stores tokens in: uint16 below 65500 entries, else (or
    unknown) int32.

    `vocab_size` is the tokenizer's own size, before padding.
    """
    small = vocab_size is not None and vocab_size < 65500
    return np.dtype("<u2" if small else "<i4")


def write_index(
    path: str,
    dtype: np.dtype,
    sizes: tuple[int, int],
    lengths: Callable[[], Iterable[np.ndarray]],
    counts: Iterable[np.ndarray],
) -> int:
    """Write an index of `sizes` (sequences, documents), durably, and return its tokens: `lengths`
    gives those of the sequences, array by array, `counts` are the documents' numbers of
    sequences."""
    with open(path, "wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, CODES[dtype], sizes[0], sizes[1] + 1))
        for numbers in lengths():
            file.write(numbers.astype("<i4").tobytes())
        tokens = _write_starts(file, lengths(), dtype.itemsize)
        file.write(np.int64(_write_starts(file, counts, 1)).tobytes())
        file.flush()
        os.fsync(file.fileno())
    return tokens


def _write_starts(file: BinaryIO, arrays: Iterable[np.ndarray], unit: int) -> int:
    """Where each of these sizes begins if they lie side by side, int64, times `unit`; their sum."""
    before = 0
    for sizes in filter(len, arrays):
        ends = before + np.cumsum(sizes, dtype=np.int64)
        file.write(((ends - sizes) * unit).astype("<i8").tobytes())
        before = int(ends[-1])
    return before


class IndexedDatasetBuilder:
    """Writes a pair under temporary names and renames it in `finalize`; as a context manager it
    finalizes on success and leaves nothing behind on an exception.

    Raises FileNotFoundError for a missing directory, ValueError for tokens that do not fit `dtype`.
    """

    def __init__(
        self, path_prefix: str | os.PathLike[str], dtype: np.dtype | type | str = np.int32
    ) -> None:
        self.path_prefix = os.fspath(path_prefix)
        self.dtype = np.dtype(dtype)
        if self.dtype not in CODES:
            raise ValueError(
                f"dtype {self.dtype} cannot be stored (can be: {', '.join(d.name for d in CODES)})"
            )
        folder = os.path.dirname(self.path_prefix) or "."
        if not os.path.isdir(folder):
            raise FileNotFoundError(
                f"{folder}: no such directory to write {self.path_prefix}.bin to; make it first "
                "[directory-missing]"
            )
        partial = f"{self.path_prefix}.partial-{uuid.uuid4().hex}"
        self._partial_bin = bin_path(partial)
        self._partial_idx = idx_path(partial)
        self._bin = open(self._partial_bin, "wb", buffering=1 << 20)  # noqa: SIM115 (closed in finalize or discard)
        self._lengths = array("i")
        self._documents = array("q", [0])

    def add_item(self, tokens: np.ndarray | list[int]) -> None:
        """Append one sequence of tokens [n]."""
        stored = self._to_dtype(tokens)
        self._append_length(len(stored))
        self._bin.write(stored.tobytes())

    def end_document(self) -> None:
        """Close the current document: all sequences added since the last call (possibly none)."""
        self._documents.append(len(self._lengths))

    def add_document(self, tokens: np.ndarray | list[int], lengths: list[int] | np.ndarray) -> None:
        """Append one document at once: its tokens [sum(lengths)] and the length of each of its
        sequences."""
        stored = self._to_dtype(tokens)
        if int(np.sum(lengths)) != len(stored) or any(n < 0 for n in lengths):
            raise ValueError(
                f"{self.path_prefix}: {len(stored)} tokens do not make sequences of {list(lengths)}"
            )
        for length in lengths:
            self._append_length(int(length))
        self._bin.write(stored.tobytes())
        self.end_document()

    def add_index(self, path_prefix: str | os.PathLike[str]) -> None:
        """Append all documents of another pair of the same dtype."""
        source = IndexedDataset(path_prefix)
        if source.dtype != self.dtype:
            raise ValueError(
                f"{source.path_prefix}: holds {source.dtype.name}, {self.path_prefix} holds "
                f"{self.dtype.name}; only pairs of one dtype can be merged: preprocess both with "
                "the same tokenizer [data-dtype-differs]"
            )
        source.check()
        shift = len(self._lengths)
        self._lengths.frombytes(source.sequence_lengths.tobytes())
        self._documents.frombytes((source.document_indices[1:] + shift).tobytes())
        self._bin.flush()
        ends = np.cumsum(source.sequence_lengths, dtype=np.int64) * self.dtype.itemsize
        if (
            len(source)
            and ends[-1] == source.bin_bytes
            and (source.sequence_pointers[1:] == ends[:-1]).all()
        ):
            with open(source.bin_file, "rb") as bin_file:
                shutil.copyfileobj(bin_file, self._bin, 16 << 20)
        else:  # sequences out of order or with gaps: legal in the format, never written by us
            for index in range(len(source)):
                self._bin.write(source[index].tobytes())

    def finalize(self) -> None:
        """Write the index, make both files durable, and give them their final names."""
        lengths = np.frombuffer(self._lengths, np.int32) if self._lengths else np.zeros(0, np.int32)
        counts = np.diff(self._documents)
        sizes = len(lengths), len(counts)
        write_index(self._partial_idx, self.dtype, sizes, lambda: [lengths], [counts])
        self._bin.flush()
        os.fsync(self._bin.fileno())
        self._bin.close()
        # The old index goes first: a reader meets the old pair, no index, or the new pair, never a
        # mixture.
        Path(idx_path(self.path_prefix)).unlink(missing_ok=True)
        os.replace(self._partial_bin, bin_path(self.path_prefix))
        os.replace(self._partial_idx, idx_path(self.path_prefix))
        folder = os.open(os.path.dirname(self.path_prefix) or ".", os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def discard(self) -> None:
        """Throw away everything added; files under the final names stay as they were."""
        # what is buffered may not fit on a full disk; the file is closed then too
        with contextlib.suppress(OSError):
            self._bin.close()
        for path in (self._partial_bin, self._partial_idx):
            Path(path).unlink(missing_ok=True)

    def __enter__(self) -> IndexedDatasetBuilder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None and not self._bin.closed:
                self.finalize()
        finally:
            # the partial files no longer exist once they are renamed: then there is nothing to
            # throw away
            self.discard()

    def _append_length(self, length: int) -> None:
        if length > np.iinfo(np.int32).max:
            raise ValueError(
                f"{self.path_prefix}: one sequence of {length} tokens; the format holds 2**31 - 1 "
                "at most [sequence-too-long]"
            )
        self._lengths.append(length)

    def _to_dtype(self, tokens: np.ndarray | list[int]) -> np.ndarray:
        values = np.asarray(tokens)
        if values.dtype == self.dtype or len(values) == 0:
            return values.astype(self.dtype, copy=False)
        if self.dtype.kind in "iu":
            low = values.min()
            high = values.max()
            limits = np.iinfo(self.dtype)
            if values.dtype.kind not in "iu" or low < limits.min or high > limits.max:
                raise ValueError(
                    f"{self.path_prefix}: token ids {low} .. {high} do not fit {self.dtype.name}; "
                    "use the dtype of the tokenizer's vocabulary size [token-id-out-of-range]"
                )
        return values.astype(self.dtype)
