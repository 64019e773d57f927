"""Builds the train, valid and test datasets from the data flags: what all sources of
`megatron.data.sources` share, and mock data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from megatron import log, object_stores
from megatron.config.checkpoint import is_url
from megatron.config.data import DataConfig
from megatron.data.blend.splits import SPLITS, Blend, SplitMatrix, parse_split, split_range
from megatron.data.gpt_dataset import GPTDataset, MockGPTDataset, MockSequences, TokenSequences
from megatron.data.request import DataRequest
from megatron.data.sample_lookup import Dataset

if TYPE_CHECKING:
    from megatron.data.index_cache import IndexCache
    from megatron.data.plan_table import Row

LOGGER = "megatron.core.datasets.blended_megatron_dataset_config"
DEFAULT_SPLIT = "969, 30, 1"
MOCK_SPLIT = "1,1,1"
Blends = Blend | list[Blend | None]  # for all splits, or for each
Splits = tuple[Dataset | None, Dataset | list[Dataset] | None, Dataset | None]


def read_blends(data: DataConfig) -> Blends:
    """The blend for all splits, or one (or None) for each split; mock data have none. What is in an
    object store is named by the paths that stand for it here.

    Raises ValueError if the flags name no data, or name it twice; ValueError and FileNotFoundError
    for a store that does not give it.
    """
    blends = _named_blends(data)
    if isinstance(blends, list):
        return [blend and _on_this_machine(data, blend) for blend in blends]
    return _on_this_machine(data, blends)


def _on_this_machine(data: DataConfig, blend: Blend) -> Blend:
    words, weights = blend
    if not any(map(is_url, words)):
        return blend
    return object_stores.part("mirror").local_words(words, data), weights


def _named_blends(data: DataConfig) -> Blends:
    per_split = {f"--{name}-data-path": getattr(data, f"{name}_data_path") for name in SPLITS}
    sources = {
        "--data-path": data.data_path,
        "--data-args-path": data.data_args_path,
        "--per-split-data-args-path": data.per_split_data_args_path,
        "--train-data-path, --valid-data-path or --test-data-path": any(per_split.values()),
        "--mock-data": data.mock_data,
    }
    named = [flag for flag, value in sources.items() if value]
    if not named:
        raise ValueError(
            "--data-path: no data is named; give a prefix written by "
            "tools/preprocess_data.py, or use --mock-data [data-missing]"
        )
    if len(named) > 1:
        raise ValueError(
            f"{' and '.join(named)}: each names the data; give only one of them [two-data-sources]"
        )
    if data.mock_data:
        return [None] * len(SPLITS)
    from megatron.data.blend import blended_dataset as blend

    if data.data_path:
        return blend.parse_blend(data.data_path)
    if data.data_args_path:
        return blend.read_blend_file(data.data_args_path)
    if data.split is not None:
        raise ValueError(
            f"--split {data.split}: has no meaning with {named[0]} (data of each split); drop it "
            "[split-with-data-per-split]"
        )
    if data.per_split_data_args_path:
        return blend.read_split_blends(data.per_split_data_args_path)
    return [blend.parse_blend(items, flag) if items else None for flag, items in per_split.items()]


def build_splits(
    data: DataConfig,
    request: DataRequest,
    rows: list[Row],
    make: Callable[[Blends, Sequence[int | None]], Sequence[Dataset | None]],
) -> Splits:
    """The data sets of train, valid and test that `make` gives, None where the flags give a split
    nothing or 0 samples are requested. With --multiple-validation-sets, valid is a list: `make` is
    called for each.

    `rows` gets the table of the plan, of which `make` appends its part. Every rank may call this at
    once: of those that share a cache one builds, the others wait for it. Raises ValueError or
    FileNotFoundError with flag or file, what is wrong and what to do.
    """
    sizes = [None if size is None else int(size) for size in request.sizes]
    if request.trains and sizes[0] is not None and sizes[0] < 1:
        raise ValueError(
            f"--train-iters, --train-samples: make {sizes[0]} training samples; at least 1 is "
            "needed [value-out-of-range]"
        )
    blends = read_blends(data)
    if not data.multiple_validation_sets:
        train, valid, test = make(blends, sizes)
        return train, valid, test
    if not isinstance(blends, list) or blends[1] is None or blends[1][1] is not None:
        raise ValueError(
            "--multiple-validation-sets: needs --valid-data-path, or per-split paths, without "
            "weights [validation-sets-not-named]"
        )
    train, _, test = make([blends[0], None, blends[2]], sizes)
    if sizes[1] == 0:
        return train, None, test
    sets: list[Dataset] = []
    for number, word in enumerate(blends[1][0]):
        start = len(rows)
        dataset = make([None, ([word], None), None], sizes)[1]
        assert dataset is not None
        sets.append(dataset)
        rows[start:] = [replace(row, split=f"valid-{number}") for row in rows[start:]]
    return train, sets, test


def build_mock(data: DataConfig, request: DataRequest, rows: list[Row]) -> Splits:
    """The data sets of --mock-data."""

    def make(blends: Blends, sizes: Sequence[int | None]) -> Sequence[Dataset | None]:
        # of a tokenizer whose ids mock data are made of
        assert request.vocab_size is not None and request.eod is not None
        return Builder(data, request).mock(sizes, request.vocab_size, request.eod)

    return build_splits(data, request, rows, make)


class Builder:
    """What all splits in Megatron's order have in common while they are built."""

    def __init__(self, data: DataConfig, request: DataRequest) -> None:
        self.data = data
        self.sequence_length = request.sequence_length
        self.seed = request.seed
        self.vocab_size = request.checked_vocab_size
        self.indices = request.indices
        self.split: str | None = None
        self.matrix: SplitMatrix | None = None

    def set_split(self, split: str) -> SplitMatrix:
        """The part of each split, which cache keys name from now on."""
        self.split = split
        self.matrix = parse_split(split)
        log.info(LOGGER, f"Let split_matrix = {self.matrix}")
        return self.matrix

    def mock(
        self, sizes: Sequence[int | None], vocab_size: int, eod: int
    ) -> tuple[Dataset | None, ...]:
        """Three equal parts of the mock corpus."""
        corpus = MockSequences(vocab_size, eod)
        matrix = self.set_split(MOCK_SPLIT)
        return tuple(
            None
            if bounds is None or size == 0
            else self.dataset(MockGPTDataset, corpus, bounds, size, name, None)
            for bounds, size, name in zip(matrix, sizes, SPLITS, strict=True)
        )

    def dataset(
        self,
        kind: type[GPTDataset],
        corpus: TokenSequences,
        bounds: tuple[float, float],
        size: int | None,
        name: str,
        cache: IndexCache | None,
    ) -> GPTDataset:
        """One split of one corpus; `bounds` are its bounds."""
        return kind(
            corpus,
            sequence_length=self.sequence_length,
            num_samples=size,
            seed=self.seed,
            sequences=split_range(bounds, len(corpus)),
            index_split=name,
            split=self.split,
            split_matrix=self.matrix,
            cache=cache,
            indices=self.indices,
        )
