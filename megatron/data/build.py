"""From the data flags to the train, valid and test datasets.

One function for each source of `megatron.data.sources` that reads .bin/.idx pairs or mock data.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from megatron import log
from megatron.data.blend.blended_dataset import (
    SPLITS,
    Blend,
    BlendedDataset,
    SplitMatrix,
    blend_sizes,
    parse_blend,
    parse_split,
    read_blend_file,
    read_split_blends,
    split_range,
)
from megatron.data.blend.members import Member, members_of, read_in, weights_of
from megatron.data.blend.paths import expand
from megatron.data.gpt_dataset import (
    GPTDataset,
    MockGPTDataset,
    MockSequences,
    TokenSequences,
    open_corpus,
)
from megatron.data.index_cache import IndexCache
from megatron.data.plan_table import Row
from megatron.data.request import DataRequest, number_needed
from megatron.data.sample_lookup import Dataset
from megatron.data.tokenizers import metadata as provenance

LOGGER = "megatron.core.datasets.blended_megatron_dataset_config"
DEFAULT_SPLIT = "969, 30, 1"
MOCK_SPLIT = "1,1,1"
Blends = Blend | list[Blend | None] | None
Splits = tuple[Dataset | None, Dataset | list[Dataset] | None, Dataset | None]


class DataFlags(Protocol):
    """The flags this file reads, by Megatron's names (`megatron.config.data.DataConfig` has
    them)."""

    data_path: Sequence[str] | None
    train_data_path: Sequence[str] | None
    valid_data_path: Sequence[str] | None
    test_data_path: Sequence[str] | None
    data_args_path: str | None
    per_split_data_args_path: str | None
    mock_data: bool
    split: str | None
    data_cache_path: str | None
    data_order: str
    packed_samples: bool
    multiple_validation_sets: bool
    mid_level_dataset_surplus: float


def read_blends(data: DataFlags) -> Blend | list[Blend | None] | None:
    """The blend for all splits, or one (or None) for each split, or None for mock data.

    Raises ValueError if the flags name no data, or name it twice.
    """
    per_split = {f"--{name}-data-path": getattr(data, f"{name}_data_path") for name in SPLITS}
    sources = {
        "--data-path": data.data_path,
        "--data-args-path": data.data_args_path,
        "--per-split-data-args-path": data.per_split_data_args_path,
        "--train-data-path, --valid-data-path or --test-data-path": any(per_split.values()),
        "--mock-data": data.mock_data,
    }
    given = [flag for flag, value in sources.items() if value]
    if not given:
        raise ValueError(
            "--data-path: no data is named; give a prefix written by "
            "tools/preprocess_data.py, or use --mock-data [data-missing]"
        )
    if len(given) > 1:
        raise ValueError(
            f"{' and '.join(given)}: each names the data; give only one of them [two-data-sources]"
        )
    if data.mock_data:
        return None
    if data.data_path:
        return parse_blend(data.data_path)
    if data.data_args_path:
        return read_blend_file(data.data_args_path)
    if data.split is not None:
        raise ValueError(
            f"--split {data.split}: has no meaning with {given[0]} (data of each split); drop it "
            "[split-with-data-per-split]"
        )
    if data.per_split_data_args_path:
        return read_split_blends(data.per_split_data_args_path)
    return [parse_blend(items, flag) if items else None for flag, items in per_split.items()]


def build_splits(
    data: DataFlags,
    request: DataRequest,
    rows: list[Row],
    make: Callable[[Blends, Sequence[int | None]], tuple[Dataset | None, ...]],
) -> Splits:
    """The data sets of train, valid and test that `make` gives, None where the flags give a split
    nothing or 0 samples are requested. With --multiple-validation-sets, valid is a list: `make` is
    called for each.

    `rows` gets the table of the plan, of which `make` appends its part. Every rank may call this at
    once: of those that share a cache one builds, the others wait for it. Raises ValueError or
    FileNotFoundError with flag or file, what is wrong and what to do.
    """
    sizes = [None if size is None else int(size) for size in request.sizes]
    if sizes[0] is not None and sizes[0] < 1:
        raise ValueError(
            f"--train-iters, --train-samples: make {sizes[0]} training samples; at least 1 is "
            "needed [value-out-of-range]"
        )
    blends = read_blends(data)
    if not data.multiple_validation_sets:
        return make(blends, sizes)
    if not isinstance(blends, list) or blends[1] is None or blends[1][1] is not None:
        raise ValueError(
            "--multiple-validation-sets: needs --valid-data-path, or per-split paths, without "
            "weights [validation-sets-not-named]"
        )
    train, _, test = make([blends[0], None, blends[2]], sizes)
    valid = []
    for number, word in enumerate(blends[1][0]):
        start = len(rows)
        valid.append(make([None, ([word], None), None], sizes)[1])
        rows[start:] = [replace(row, split=f"valid-{number}") for row in rows[start:]]
    return train, valid, test


def build_mock(data: DataFlags, request: DataRequest, rows: list[Row]) -> Splits:
    """The data sets of --mock-data."""

    def make(blends: Blends, sizes: Sequence[int | None]) -> tuple[Dataset | None, ...]:
        return _Builder(data, request).mock(sizes, request.vocab_size, request.eod)

    return build_splits(data, request, rows, make)


def build_in_megatron_order(data: DataFlags, request: DataRequest, rows: list[Row]) -> Splits:
    """The data sets of `--data-order megatron`."""

    def make(blends: Blends, sizes: Sequence[int | None]) -> tuple[Dataset | None, ...]:
        builder = _Builder(data, request)
        if isinstance(blends, tuple):
            found = builder.one_source(members_of(blends), sizes)
        else:
            found = builder.one_source_per_split(
                [blend and members_of(blend) for blend in blends], sizes
            )
        for dataset, size in zip(found, sizes, strict=True):
            rows.extend([] if dataset is None else dataset.plan_rows(size))
        return found

    return build_splits(data, request, rows, make)


class _Builder:
    """What all splits have in common while they are built."""

    def __init__(self, data: DataFlags, request: DataRequest) -> None:
        self.data = data
        self.sequence_length = request.sequence_length
        self.seed = request.seed
        self.vocab_size = request.checked_vocab_size
        self.split: str | None = None
        self.matrix: SplitMatrix | None = None

    def _set_split(self, split: str) -> SplitMatrix:
        self.split = split
        self.matrix = parse_split(split)
        log.info(LOGGER, f"Let split_matrix = {self.matrix}")
        return self.matrix

    def mock(
        self, sizes: Sequence[int | None], vocab_size: int, eod: int
    ) -> tuple[Dataset | None, ...]:
        """Three equal parts of the mock corpus."""
        corpus = MockSequences(vocab_size, eod)
        matrix = self._set_split(MOCK_SPLIT)
        return tuple(
            None if size == 0 else self._dataset(MockGPTDataset, corpus, part, size, name, None)
            for part, size, name in zip(matrix, sizes, SPLITS, strict=True)
        )

    def one_source(
        self, members: Sequence[Member], sizes: Sequence[int | None]
    ) -> tuple[Dataset | None, ...]:
        """All splits from the same data, each a part of every corpus."""
        matrix = self._set_split(self.data.split or DEFAULT_SPLIT)
        wanted = [None if size == 0 else part for part, size in zip(matrix, sizes, strict=True)]
        if len(members) == 1 and members[0].weight is None:
            return self._alone(members[0], wanted, sizes)
        return self._blend(members, wanted, sizes)

    def one_source_per_split(
        self, blends: Sequence[Sequence[Member] | None], sizes: Sequence[int | None]
    ) -> tuple[Dataset | None, ...]:
        """Each split from its own data, all of it."""
        found: list[Dataset | None] = []
        for number, (members, size) in enumerate(zip(blends, sizes, strict=True)):
            if members is None or size == 0:
                found.append(None)
                continue
            wanted: SplitMatrix = [
                (0.0, 1.0) if place == number else None for place in range(len(SPLITS))
            ]
            make = self._alone if len(members) == 1 else self._blend
            found.append(make(members[0] if len(members) == 1 else members, wanted, sizes)[number])
        return tuple(found)

    def _alone(
        self, member: Member, wanted: SplitMatrix, sizes: Sequence[int | None]
    ) -> tuple[GPTDataset | None, ...]:
        """The wanted splits of one corpus that is no blend."""
        corpus = open_corpus(member.prefix, self.vocab_size)
        cache = self._cache(member.prefix)
        return tuple(
            None if part is None else self._dataset(GPTDataset, corpus, part, size, name, cache)
            for part, size, name in zip(wanted, sizes, SPLITS, strict=True)
        )

    def _blend(
        self, members: Sequence[Member], wanted: SplitMatrix, sizes: Sequence[int | None]
    ) -> tuple[Dataset | None, ...]:
        """Blended datasets of the wanted splits."""
        corpora = [open_corpus(member.prefix, self.vocab_size) for member in members]
        return tuple(
            None if part is None else self._blend_split(members, corpora, part, size, name)
            for part, size, name in zip(wanted, sizes, SPLITS, strict=True)
        )

    def _blend_split(
        self,
        members: Sequence[Member],
        corpora: Sequence[TokenSequences],
        part: tuple[float, float],
        size: int | None,
        name: str,
    ) -> BlendedDataset:
        """One split of a blend, with megatron-core's sizes.

        With weights a split has sum(ceil(size * weight)) samples and each corpus a surplus;
        without, each corpus is built for one epoch and weighs its length, and the blend is no
        longer than all of them together.
        """
        tokens = [_tokens(corpus, split_range(part, len(corpus))) for corpus in corpora]
        numbers = read_in(name, members, tokens, self.sequence_length)
        if len(numbers) < len(members):
            small = len(members) - len(numbers)
            log.print_rank_0(
                f" > {name}: {small} of {len(members)} pairs are too small for a sample and are "
                "omitted"
            )
        read = [members[n] for n in numbers]
        surplus = self.data.mid_level_dataset_surplus
        built = [None] * len(read)
        weights = None
        if read[0].weight is not None:
            weights = weights_of(
                read, [_tokens(corpora[n], range(len(corpora[n]))) for n in numbers]
            )
            used, built = blend_sizes(weights, number_needed(size, name), surplus)
            size = sum(used)
        datasets = [
            self._dataset(GPTDataset, corpora[n], part, count, name, self._cache(member.prefix))
            for n, member, count in zip(numbers, read, built, strict=True)
        ]
        if weights is None:
            weights = [len(dataset) for dataset in datasets]
            size = None if size is None else min(size, sum(weights))
        cache = self.data.data_cache_path and IndexCache(
            self.data.data_cache_path, "--data-cache-path"
        )
        return BlendedDataset(datasets, weights, size, cache=cache or None, surplus=surplus)

    def _dataset(
        self,
        kind: type[GPTDataset],
        corpus: TokenSequences,
        part: tuple[float, float],
        size: int | None,
        name: str,
        cache: IndexCache | None,
    ) -> GPTDataset:
        return kind(
            corpus,
            sequence_length=self.sequence_length,
            num_samples=size,
            seed=self.seed,
            sequences=split_range(part, len(corpus)),
            index_split=name,
            split=self.split,
            split_matrix=self.matrix,
            cache=cache,
        )

    def _cache(self, prefix: str) -> IndexCache:
        if self.data.data_cache_path:
            return IndexCache(self.data.data_cache_path, "--data-cache-path")
        return IndexCache(os.path.join(prefix, "cache", "GPTDataset_indices"))


def _tokens(corpus: TokenSequences, sequences: range) -> int:
    """Tokens of some sequences."""
    return int(corpus.sequence_lengths[sequences.start : sequences.stop].sum(dtype=np.int64))


def check_tokenizer(data: DataFlags, identity: Mapping[str, object]) -> None:
    """Raise ValueError if a pair that the flags name was made by another tokenizer than this (see
    `Tokenizer.identity`)."""
    blends = read_blends(data)
    for blend in blends if isinstance(blends, list) else [blends]:
        for word in blend[0] if blend else ():
            for prefix in expand(word):
                provenance.check(prefix, identity)
