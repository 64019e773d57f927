"""Builds the data sets of `--data-order megatron`: .bin/.idx pairs and blends of them."""

import os
from collections.abc import Mapping, Sequence

import numpy as np

from megatron import log, object_stores
from megatron.config.data import DataConfig
from megatron.data.blend.blended_dataset import BlendedDataset, blend_sizes
from megatron.data.blend.members import Member, members_of, read_in, weights_of
from megatron.data.blend.paths import expand
from megatron.data.blend.splits import SPLITS, SplitMatrix, split_range
from megatron.data.build import (
    DEFAULT_SPLIT,
    Blends,
    Builder,
    Splits,
    build_splits,
    read_blends,
)
from megatron.data.gpt_dataset import GPTDataset, TokenSequences
from megatron.data.index_cache import IndexCache
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.plan_table import Row
from megatron.data.request import DataRequest, number_needed
from megatron.data.tokenizers import metadata as provenance
from megatron.small_files import path_inside

EitherDataset = GPTDataset | BlendedDataset


def build_in_megatron_order(data: DataConfig, request: DataRequest, rows: list[Row]) -> Splits:
    """The data sets of `--data-order megatron`."""

    def make(blends: Blends, sizes: Sequence[int | None]) -> Sequence[EitherDataset | None]:
        builder = _FileBuilder(data, request)
        if isinstance(blends, tuple):
            datasets = builder.one_source(members_of(blends), sizes)
        else:
            datasets = builder.one_source_per_split(
                [blend and members_of(blend) for blend in blends], sizes
            )
        for dataset, size in zip(datasets, sizes, strict=True) if request.indices else ():
            rows.extend([] if dataset is None else dataset.plan_rows(size))
        return datasets

    return build_splits(data, request, rows, make)


class _FileBuilder(Builder):
    """Data sets of pairs."""

    def one_source(
        self, members: Sequence[Member], sizes: Sequence[int | None]
    ) -> Sequence[EitherDataset | None]:
        """All splits from the same data, each a part of every corpus."""
        matrix = self.set_split(self.data.split or DEFAULT_SPLIT)
        split_bounds = [
            None if size == 0 else bounds for bounds, size in zip(matrix, sizes, strict=True)
        ]
        if len(members) == 1 and members[0].weight is None:
            return self._alone(members[0], split_bounds, sizes)
        return self._blend(members, split_bounds, sizes)

    def one_source_per_split(
        self, blends: Sequence[Sequence[Member] | None], sizes: Sequence[int | None]
    ) -> Sequence[EitherDataset | None]:
        """Each split from its own data, all of it."""
        datasets: list[EitherDataset | None] = []
        for number, (members, size) in enumerate(zip(blends, sizes, strict=True)):
            if members is None or size == 0:
                datasets.append(None)
                continue
            split_bounds: SplitMatrix = [
                (0.0, 1.0) if split == number else None for split in range(len(SPLITS))
            ]
            splits: Sequence[EitherDataset | None] = (
                self._alone(members[0], split_bounds, sizes)
                if len(members) == 1
                else self._blend(members, split_bounds, sizes)
            )
            datasets.append(splits[number])
        return datasets

    def _alone(
        self, member: Member, split_bounds: SplitMatrix, sizes: Sequence[int | None]
    ) -> tuple[GPTDataset | None, ...]:
        """The wanted splits of one corpus that is no blend."""
        corpus = open_corpus(member.prefix, self.vocab_size)
        cache = cache_of(self.data, member.prefix)
        return tuple(
            None if bounds is None else self.dataset(GPTDataset, corpus, bounds, size, name, cache)
            for bounds, size, name in zip(split_bounds, sizes, SPLITS, strict=True)
        )

    def _blend(
        self, members: Sequence[Member], split_bounds: SplitMatrix, sizes: Sequence[int | None]
    ) -> tuple[BlendedDataset | None, ...]:
        """Blended datasets of the wanted splits."""
        corpora = [open_corpus(member.prefix, self.vocab_size) for member in members]
        return tuple(
            None if bounds is None else self._blend_split(members, corpora, bounds, size, name)
            for bounds, size, name in zip(split_bounds, sizes, SPLITS, strict=True)
        )

    def _blend_split(
        self,
        members: Sequence[Member],
        corpora: Sequence[TokenSequences],
        bounds: tuple[float, float],
        size: int | None,
        name: str,
    ) -> BlendedDataset:
        """One split of a blend, with megatron-core's sizes.

        With weights a split has sum(ceil(size * weight)) samples and each corpus a surplus;
        without, each corpus is built for one epoch and weighs its length, and the blend is no
        longer than all of them together.
        """
        tokens = [_tokens(corpus, split_range(bounds, len(corpus))) for corpus in corpora]
        numbers = read_in(name, members, tokens, self.sequence_length)
        if len(numbers) < len(members):
            small = len(members) - len(numbers)
            log.print_rank_0(
                f" > {name}: {small} of {len(members)} pairs are too small for a sample and are "
                "omitted"
            )
        read = [members[n] for n in numbers]
        surplus = self.data.mid_level_dataset_surplus
        built: Sequence[int | None] = [None] * len(read)
        weights: Sequence[float] | None = None
        if read[0].weight is not None:
            weights = weights_of(
                read, [_tokens(corpora[n], range(len(corpora[n]))) for n in numbers]
            )
            used, built = blend_sizes(weights, number_needed(size, name), surplus)
            size = sum(used)
        datasets = [
            self.dataset(
                GPTDataset, corpora[n], bounds, count, name, cache_of(self.data, member.prefix)
            )
            for n, member, count in zip(numbers, read, built, strict=True)
        ]
        if weights is None:
            weights = lengths = [len(dataset) for dataset in datasets]
            size = None if size is None else min(size, sum(lengths))
        cache = self.data.data_cache_path and IndexCache(
            self.data.data_cache_path, "--data-cache-path"
        )
        return BlendedDataset(
            datasets, weights, size, cache=cache or None, surplus=surplus, indices=self.indices
        )


def cache_of(data: DataConfig, prefix: str) -> IndexCache:
    """Where the indices of a pair are kept."""
    if data.data_cache_path:
        return IndexCache(data.data_cache_path, "--data-cache-path")
    folder, name = os.path.split(prefix)
    path = path_inside(folder, f"{name}/cache/GPTDataset_indices", below=True)
    return IndexCache(str(path))


def _tokens(corpus: TokenSequences, sequences: range) -> int:
    """Tokens of some sequences."""
    return int(corpus.sequence_lengths[sequences.start : sequences.stop].sum(dtype=np.int64))


def open_corpus(prefix: str, vocab_size: int | None = None) -> IndexedDataset:
    """Open a pair for training, announced in the log; with `vocab_size` the ids at its head must
    fit it.

    Raises ValueError for a pair of floats and for token ids outside the vocabulary.
    """
    corpus = IndexedDataset(prefix, announce=True)
    if corpus.dtype.kind not in "iu":
        raise ValueError(
            f"{prefix}.idx: holds {corpus.dtype.name}, not token ids; preprocess text into it "
            "[data-not-token-ids]"
        )
    _ = corpus.order_sha256  # compares the index with its checksum
    if vocab_size is not None:
        low, high = corpus.id_range()
        if low < 0:
            raise ValueError(
                f"{prefix}.bin: holds ids below 0, which are tokens without loss (chat data); "
                "train on it with --packed-samples [token-id-out-of-range]"
            )
        if high >= vocab_size:
            raise ValueError(
                f"{prefix}.bin: holds token ids {low} .. {high}, the vocabulary has {vocab_size}; "
                "give the tokenizer it was preprocessed with [token-id-out-of-range]"
            )
    return corpus


def check_tokenizer(data: DataConfig, identity: Mapping[str, object]) -> None:
    """Raise ValueError if a pair that the flags name was made by another tokenizer than this (see
    `Tokenizer.identity`)."""
    with object_stores.urls_in_errors(data):
        blends = read_blends(data)
        for blend in blends if isinstance(blends, list) else [blends]:
            for word in blend[0] if blend else ():
                for prefix in expand(word):
                    provenance.check(prefix, identity)
