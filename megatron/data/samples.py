"""What a loader reads: the samples of a dataset, each checked against the vocabulary and, for a
ledger, hashed."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from megatron.data.sample_lookup import (
    LABELS,
    LOSS_MASK,
    NO_LABEL,
    POSITIONS,
    SUBSET,
    TOKENS,
    Dataset,
)
from megatron.data.subsets import subset_of


class Sample(NamedTuple):
    """One sample of a data set, int64.

    A sequence of s + 1 `tokens`, in which each token's label is the next one, has no `labels` and
    no `positions`. A row of packed samples has `tokens`, `labels` (0: none, -1: id 0) and
    `positions` (0 where a sample begins), [s] each. `subset`: which data set of a blend, or of
    packed samples [s], each token is of; None where nobody counts. `hash`: 0 where no ledger is
    written. A script's own sample is as a packed row, but its labels are plain ids and count as
    `loss_mask` says, which is the bits of fp32 numbers.
    """

    tokens: np.ndarray
    labels: np.ndarray | None = None
    positions: np.ndarray | None = None
    subset: int | np.ndarray | None = None
    hash: int = 0
    loss_mask: np.ndarray | None = None


def sample_of(row: np.ndarray, subset: int | None = None, hash: int = 0) -> Sample:
    """The sample that a data set gives as one array: [s + 1], packed [4, s], or with
    its own loss mask [5, s]."""
    if row.ndim == 1:
        return Sample(row, subset=subset, hash=hash)
    loss_mask = row[LOSS_MASK] if len(row) > LOSS_MASK else None
    return Sample(row[TOKENS], row[LABELS], row[POSITIONS], row[SUBSET], hash, loss_mask)


class Samples:
    """`samples[i]` is sample i of `dataset`; with `hash_of`, a function of its number and its
    array, it has its hash, with `with_subset` (of packed samples always) its subset.

    Raises ValueError for an id that is not below `vocab_size`, with the file and the place where it
    stands.
    """

    def __init__(
        self,
        dataset: Dataset,
        vocab_size: int,
        hash_of: Callable[[int, np.ndarray], int] | None = None,
        with_subset: bool = False,
    ) -> None:
        self.dataset = dataset
        self.vocab_size = vocab_size
        self.hash_of = hash_of
        self.with_subset = with_subset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Sample:
        row = self.dataset[index]
        # As unsigned numbers negative ids are large ones: one pass finds both.
        if int(ids_of(row).view(np.uint64).max()) >= self.vocab_size:
            raise self._outside(index, row)
        return sample_of(
            row,
            subset_of(self.dataset, index) if self.with_subset and row.ndim == 1 else None,
            self.hash_of(index, row) if self.hash_of else 0,
        )

    def _outside(self, index: int, row: np.ndarray) -> ValueError:
        lines = np.atleast_2d(ids_of(row))
        line, position = np.argwhere(lines.view(np.uint64) >= self.vocab_size)[0].tolist()
        offset = position
        for span in self.dataset.spans_of(index):
            if offset < span.length:
                break
            offset -= span.length
        return ValueError(
            f"{span.prefix}.bin: token {span.offset + offset + line} of document "
            f"{span.document} is the id {lines[line, position]}, the vocabulary has "
            f"{self.vocab_size}; give the tokenizer it was preprocessed "
            "with, or preprocess it again with tools/preprocess_data.py [token-id-out-of-range]"
        )


def ids_of(row: np.ndarray) -> np.ndarray:
    """What of a sample are token ids: all of it, of a packed row its tokens and labels (the label
    of id 0 as 0)."""
    if row.ndim == 1:
        return row
    return np.stack((row[TOKENS], np.maximum(row[LABELS], NO_LABEL)))
