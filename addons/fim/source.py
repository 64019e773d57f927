"""Samples with the middle filled in: those of another source, each rearranged by random numbers of
its own, a function of the seed, the split and the number of the sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import NamedTuple

import numpy as np

from megatron.config.data import DataConfig
from megatron.data.blend.splits import SPLITS
from megatron.data.build import Splits
from megatron.data.plan_table import Row
from megatron.data.request import DataRequest
from megatron.data.sample_lookup import Dataset, TokenSpan, is_blend
from megatron.data.samples import Samples
from megatron.data.sources import DataSource
from megatron.data.subsets import subset_names
from megatron.data.tokenizers.build import tokenizer_from

from .middle import FillInMiddle, Flags, Ids

_LOW = (1 << 32) - 1


class Member(NamedTuple):
    """A data set of a blend, as far as names go. Bytes per token are not known of it: documents
    that were rearranged have other tokens."""

    name: str


class FimDataset:
    """The samples of `dataset`, rearranged: `ds[i]` is int64 [sequence_length + 1]."""

    def __init__(
        self, dataset: Dataset, fill: FillInMiddle, flags: Flags, seed: int, vocab_size: int
    ) -> None:
        self._dataset = dataset
        self._checked = Samples(dataset, vocab_size)
        self._fill = fill
        self._flags = flags
        self._seed = seed
        self.index_split = dataset.index_split
        names = subset_names(dataset)
        self.name = names[0]
        self.set_name = getattr(dataset, "set_name", "")
        if is_blend(dataset):
            self.datasets: Sequence[Member] = [Member(name) for name in names]
            self.source = dataset.source

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> np.ndarray:
        split = SPLITS.index(self.index_split)
        numbers = (self._seed, split, index)
        halves = [half for number in numbers for half in (number & _LOW, number >> 32 & _LOW)]
        return self._fill.apply(self._checked[index].tokens, np.random.RandomState(halves))

    def order(self) -> dict[str, object]:
        """See `sample_lookup.Dataset`."""
        flags = {
            f"--{name.replace('_', '-')}": value for name, value in asdict(self._flags).items()
        }
        return {**self._dataset.order(), "fim": {**flags, "ids": [*self._fill.ids]}}

    def prefixes(self) -> list[str]:
        """See `sample_lookup.Dataset`."""
        return self._dataset.prefixes()

    def spans_of(self, index: int) -> list[TokenSpan]:
        """Where the tokens are stored that the sample was made of."""
        return self._dataset.spans_of(index)

    def samples_showing(self, prefix: str, document: int) -> dict[int, int]:
        """See `sample_lookup.Dataset`, of the tokens that samples were made of."""
        return self._dataset.samples_showing(prefix, document)


class FimSource:
    """The samples of `source`, rearranged."""

    def __init__(self, source: DataSource, flags: Flags) -> None:
        self._source = source
        self._flags = flags

    def build(self, data: DataConfig, request: DataRequest, rows: list[Row]) -> Splits:
        """See `DataSource`."""
        tokenizer = tokenizer_from(data)
        fill = FillInMiddle(self._flags, tokenizer)

        def filled(dataset: Dataset) -> Dataset:
            return FimDataset(dataset, fill, self._flags, request.seed, tokenizer.vocab_size)

        train, valid, test = self._source.build(data, request, rows)
        if isinstance(valid, list):
            valids: Dataset | list[Dataset] | None = [filled(each) for each in valid]
        else:
            valids = valid and filled(valid)
        return train and filled(train), valids, test and filled(test)

    def plan_rows(self, data: DataConfig, request: DataRequest) -> list[Row]:
        """See `DataSource`. Raises ValueError for a tokenizer that lacks a token, if it is here."""
        try:
            tokenizer = tokenizer_from(data)
        except (ValueError, OSError):  # which the notes of a dry run say
            pass
        else:
            Ids.of(self._flags, tokenizer)
        return self._source.plan_rows(data, request)
