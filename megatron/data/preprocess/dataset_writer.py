"""The index of a tokenized corpus, written, and the dtype of its tokens."""

import os
from collections.abc import Callable, Iterable
from typing import BinaryIO

import numpy as np

from megatron.data.indexed_dataset import (
    CODES,
    HEADER,
    MAGIC,
    VERSION,
)


def optimal_dtype(vocab_size: int | None) -> np.dtype:
    """The dtype Megatron's preprocessing stores tokens in: uint16 below 65500 entries, else (or
    unknown) int32.

    `vocab_size` is the tokenizer's own size, before padding.
    """
    return np.dtype("<i4" if vocab_size is None or vocab_size >= 65500 else "<u2")


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
