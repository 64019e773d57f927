"""Packed samples: rows of `rows` x `sequence_length` tokens, filled with whole samples one behind
the other.

The samples of a file are shuffled, put end to end and cut every row; what is left of a file is
dropped, so a row never mixes files. The rows of all files are reshuffled each epoch.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import numpy as np

from megatron.data.index_helpers import shuffle
from megatron.data.sample_formats import SampleFile
from megatron.data.sample_lookup import (
    LABELS,
    NO_LABEL,
    POSITIONS,
    SUBSET,
    TOKENS,
    TokenSpan,
    check_document,
)
from megatron.data.sampler import SequentialSampler

from .loss_mask import labels_of, tokens_of

Mode = Literal["pieces", "blocks", "padded"]
SEED = 1024  # of both shuffles, whatever --seed is: a file's samples lie alike in every run


@dataclass(frozen=True)
class PackingRule:
    """How samples fill a row of `rows` x `sequence_length` tokens; those of fewer than `min_length`
    tokens are omitted.

    mode "pieces": a sample that a row's end cuts continues in the next row; what is in one row is a
    piece, cut again every `sequence_length` tokens, and attention stays inside a piece. "blocks":
    the same tokens, but attention stays inside the blocks of `sequence_length` tokens and crosses
    samples. "padded": `rows` samples, each cut to
    `sequence_length`, the rest of the row zeros.
    """

    sequence_length: int
    rows: int
    mode: Mode = "pieces"
    min_length: int = 0

    @property
    def length(self) -> int:
        """Tokens of a row."""
        return self.sequence_length * self.rows


class PackedFile:
    """The rows of one file: `file_rows[k]` is int64 [4, tokens], see `PackedDataset`."""

    def __init__(self, file: SampleFile, subset: int, rule: PackingRule) -> None:
        self.file = file
        self.subset = subset
        self.rule = rule
        lengths = np.asarray(file.lengths)
        long_enough = np.flatnonzero(lengths >= rule.min_length)
        positions = np.arange(len(long_enough))
        shuffle(np.random.RandomState(SEED), positions)
        self.order = long_enough[positions].astype(np.int32 if len(lengths) < 1 << 31 else np.int64)
        used = lengths[self.order].astype(np.int64)
        self.ends = np.cumsum(
            np.minimum(used, rule.sequence_length) if rule.mode == "padded" else used
        )
        self.tokens = int(self.ends[-1]) if len(long_enough) else 0

    def __len__(self) -> int:
        return (
            len(self.order) // self.rule.rows
            if self.rule.mode == "padded"
            else self.tokens // self.rule.length
        )

    def spans(self, row: int) -> Iterator[tuple[int, int, int]]:
        """What a row is made of, as (sample, first token, tokens)."""
        if self.rule.mode == "padded":
            for sample in self.order[row * self.rule.rows : (row + 1) * self.rule.rows].tolist():
                if self.file.lengths[sample] > 0:
                    yield sample, 0, min(int(self.file.lengths[sample]), self.rule.sequence_length)
            return
        position = row * self.rule.length
        end = (row + 1) * self.rule.length
        number = int(np.searchsorted(self.ends, position, side="right"))
        start = int(self.ends[number - 1]) if number else 0
        while position < end:
            stop = int(self.ends[number])
            if stop > position:  # else the sample is empty
                yield int(self.order[number]), position - start, min(stop, end) - position
                position = min(stop, end)
            start = stop
            number = number + 1

    def showing(self, sample: int) -> dict[int, int]:
        """{row: how many tokens of this sample it holds}."""
        counts: dict[int, int] = {}
        for number in np.flatnonzero(self.order == sample).tolist():
            if self.rule.mode == "padded":
                rows: Sequence[int] = [number // self.rule.rows]
            else:
                start = int(self.ends[number - 1]) if number else 0
                end = int(self.ends[number])
                rows = range(start // self.rule.length, -(-end // self.rule.length))
            for row in rows:
                if row < len(self):
                    counts[row] = sum(
                        count for shown, _, count in self.spans(row) if shown == sample
                    )
        return counts

    def __getitem__(self, row: int) -> np.ndarray:
        rule = self.rule
        lines = np.zeros((4, rule.length), np.int64)
        lines[SUBSET] = self.subset
        position = 0
        for sample, first, count in self.spans(row):
            # the next id is the last label
            with_label = rule.mode != "padded" and first + count < self.file.lengths[sample]
            ids = self.file.read(sample, first, count + with_label)
            span = slice(position, position + count)
            lines[TOKENS, span] = tokens_of(ids[:count])
            lines[LABELS, position : position + len(ids) - 1] = labels_of(ids[1:])
            lines[POSITIONS, span] = np.arange(count) % rule.sequence_length
            position += count
        lines[POSITIONS, position:] = np.arange(rule.length - position) % rule.sequence_length
        if rule.mode == "blocks":
            lines[LABELS, -1] = NO_LABEL
            lines[POSITIONS] = np.arange(rule.length) % rule.sequence_length
        return lines


class PackedSampler(SequentialSampler):
    """`--packed-samples`: as one pass, but what `micro_batch_size` samples would be is one row of
    the data set.

    `total_rows` is the length of the data set. Row numbers, too, are the same whatever the
    data-parallel size is: it takes rows consumed / micro_batch_size + r on rank r, which are
    indices[r::size] of an epoch's rows.
    """

    def __init__(
        self, total_rows: int, micro_batch_size: int, dp_rank: int = 0, dp_size: int = 1
    ) -> None:
        super().__init__(total_rows * micro_batch_size, micro_batch_size, dp_rank, dp_size)

    def micro_batch(self, consumed: int) -> list[int]:
        """The number of the row, alone in a list. Raises ValueError when they are used up or
        `consumed` ends within one."""
        if consumed % self.micro_batch_size:
            raise ValueError(
                f"--packed-samples: {consumed} consumed samples are not a multiple of "
                f"--micro-batch-size {self.micro_batch_size}, the samples of a row; resume with "
                "the batch sizes of the checkpoint [resume-inside-a-row]"
            )
        return [super().micro_batch(consumed)[0] // self.micro_batch_size]


class PackedDataset:
    """Row k of a run, for k from 0 to `size` - 1 (None: one epoch), as a pure function of the
    files, the rule and k.

    `dataset[k]` is int64 [4, tokens]: ids, labels (0: none, -1: id 0), positions (0 where a piece
    begins), number of the subset. An epoch is as many whole global batches of `rows_per_batch` rows
    as there are, in an order that one RandomState(1024) continues to shuffle from epoch to
    epoch. Raises ValueError, in which `name` stands for the data, if there is none.
    """

    def __init__(
        self,
        name: str,
        files: Sequence[PackedFile],
        subsets: Sequence[str],
        rule: PackingRule,
        *,
        size: int | None,
        rows_per_batch: int = 1,
        index_split: str = "train",
    ) -> None:
        self.name = name
        self.rule = rule
        self.subsets = tuple(subsets)
        self.index_split = index_split
        self.files = [file for file in files if len(file)]
        self._ends = [0, *accumulate(len(file) for file in self.files)]
        self.rows = self._ends[-1]
        self.rows_per_batch = rows_per_batch
        self.rows_per_epoch = self.rows // rows_per_batch * rows_per_batch
        if not self.rows_per_epoch:
            tokens = sum(file.tokens for file in files)
            samples = sum(len(file.order) for file in files)
            raise ValueError(
                f"{name}: its {samples} {index_split} samples of at least {rule.min_length} "
                f"tokens hold {tokens}, which make {self.rows} whole rows of {rule.rows} x "
                f"{rule.sequence_length} tokens (each file alone); one global batch needs "
                f"{rows_per_batch}; use more data, or a lower --seq-length, --micro-batch-size, "
                "--global-batch-size or --min-sample-length [data-too-small]"
            )
        self.size = self.rows if size is None else size
        if size is None:
            self.rows_per_epoch = self.rows
        self._random = np.random.RandomState(SEED)
        self._epoch = -1
        self._order = np.empty(0, np.int64)

    def __len__(self) -> int:
        return self.size

    def sampler(self, micro_batch_size: int, dp_rank: int, dp_size: int) -> PackedSampler:
        """Reads a row in place of `micro_batch_size` samples."""
        return PackedSampler(self.size, micro_batch_size, dp_rank, dp_size)

    def _turn_to(self, epoch: int) -> np.ndarray:
        """The order of an epoch, all rows of it."""
        if epoch < self._epoch:
            self._random = np.random.RandomState(SEED)
            self._epoch = -1
        while self._epoch < epoch:
            self._order = np.arange(self.rows)
            shuffle(self._random, self._order)
            self._epoch += 1
        return self._order

    def source(self, index: int) -> tuple[PackedFile, int]:
        """(file, row of the file) that row `index` of the run is."""
        if not 0 <= index < self.size:
            raise IndexError(f"{self.index_split} row {index} of {self.size}")
        epoch, position = divmod(index, self.rows_per_epoch)
        number = int(self._turn_to(epoch)[position])
        file_number = bisect_right(self._ends, number) - 1
        return self.files[file_number], number - self._ends[file_number]

    def __getitem__(self, index: int) -> np.ndarray:
        file, row = self.source(index)
        return file[row]

    def spans_of(self, index: int) -> list[TokenSpan]:
        """See `sample_lookup.Dataset`."""
        file, row = self.source(index)
        return [
            TokenSpan(
                file.file.prefix,
                *range_of_sample,
                *(file.file.bytes_of(*range_of_sample) or (None, None)),
            )
            for range_of_sample in file.spans(row)
        ]

    def samples_showing(self, prefix: str, document: int) -> dict[int, int]:
        """See `sample_lookup.Dataset`; a sample of the run is a row."""
        count = next(len(file.file.lengths) for file in self.files if file.file.prefix == prefix)
        check_document(document, prefix, count)
        return self.showing(prefix, document)

    def prefixes(self) -> list[str]:
        """Its files, each once, in their order."""
        return list(dict.fromkeys(file.file.prefix for file in self.files))

    def showing(self, prefix: str, sample: int) -> dict[int, int]:
        """{row of the run: how many tokens of this sample of `prefix` it holds}, in rising
        order."""
        counts = {
            self._ends[file_number] + row: count
            for file_number, file in enumerate(self.files)
            if file.file.prefix == prefix
            for row, count in file.showing(sample).items()
        }
        rows = {}
        for epoch in range(-(-self.size // self.rows_per_epoch)) if counts else ():
            order = self._turn_to(epoch)[: self.rows_per_epoch]
            for position in np.flatnonzero(np.isin(order, list(counts))).tolist():
                index = epoch * self.rows_per_epoch + position
                if index < self.size and counts[int(order[position])]:
                    rows[index] = counts[int(order[position])]
        return rows

    def order(self) -> dict[str, object]:
        """Everything the order of the rows and what is in them depends on, in JSON types."""
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(file.file.fingerprint() + self.subsets[file.subset].encode())
        return {
            "kind": "PackedDataset",
            "corpus": {"files": len(self.files), "sha256": digest.hexdigest()},
            "sequence_length": self.rule.sequence_length,
            "rows": self.rule.rows,
            "mode": self.rule.mode,
            "min_length": self.rule.min_length,
            "rows_per_batch": self.rows_per_batch,
        }
