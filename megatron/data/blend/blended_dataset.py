"""BlendedDataset: one stream of samples drawn from several datasets by weight, and the parser of
blends.
"""

import json
import math
from collections.abc import Sequence

import numpy as np

from megatron import log
from megatron.config.checks.data_paths import (
    EPOCHS,
    blend_problem,
    blend_words,
    prefixes_in,
    split_words,
)
from megatron.config.checks.listing import text_lines
from megatron.data.blend.indices import build_blending_indices, build_exhaustive_blending_indices
from megatron.data.blend.splits import SPLITS, Blend, normalize
from megatron.data.gpt_dataset import CACHE_FORMAT, GPTDataset
from megatron.data.index_arrays import IndexArrays
from megatron.data.index_cache import IndexCache
from megatron.data.plan_table import Row
from megatron.data.sample_lookup import TokenSpan

LOGGER = "megatron.core.datasets.blended_dataset"
INDEX_NAMES = ("dataset_index", "dataset_sample_index")


class EpochCounts(list[float]):
    """How often each data set is read: what a blend has in the place of weights where the user
    wrote `epochs:`."""


def parse_blend(words: Sequence[str], flag: str = "--data-path") -> Blend:
    """megatron-core's grammar: an odd number of words, or no weight where pairs would have one, is
    prefixes; else pairs of weight and prefix. Ours: `epochs:2` in the place of every weight is how
    often the data are read. Raises ValueError for a mixture and for weights that are not positive
    numbers.
    """
    words = [str(word).strip() for word in words]
    if problem := blend_problem(words):
        raise ValueError(f"{flag}: {problem}")
    prefixes = prefixes_in(words)
    if prefixes is words:
        return words, None
    if words[0].startswith(EPOCHS):
        return prefixes, EpochCounts(float(word.removeprefix(EPOCHS)) for word in words[::2])
    return prefixes, list(map(float, words[::2]))


def read_blend_file(path: str) -> Blend:
    """The file of --data-args-path, with the words of --data-path as `blend_words` reads it."""
    flag = f"--data-args-path {path}"
    lines = text_lines(path)
    if isinstance(lines, str):
        raise ValueError(f"{flag}: {lines}")
    return parse_blend(blend_words(lines), flag)


def read_split_blends(path: str) -> list[Blend | None]:
    """That of --per-split-data-args-path, for each split."""
    flag = f"--per-split-data-args-path {path}"
    found = split_words(path)
    if isinstance(found, str):
        raise ValueError(f"{flag}: {found}")
    blends: list[Blend | None] = []
    for name in SPLITS:
        words = found.get(name)
        if isinstance(words, str):
            raise ValueError(f"{flag}, {name}: {words}")
        blends.append(None if words is None else parse_blend(words, f"{flag}, {name}"))
    return blends


def blend_sizes(weights: Sequence[float], size: int, surplus: float) -> tuple[list[int], list[int]]:
    """(samples used, samples built) of each dataset for a blend of `size`: ceil(N w), and that with
    the surplus."""
    used = [math.ceil(size * weight) for weight in weights]
    return used, [math.ceil(count * (1 + surplus)) for count in used]


class BlendedDataset:
    """`ds[i]` is a sample (int64 [sequence_length + 1]) of one of `datasets`; which one is a pure
    function of i.

    With `size`, datasets are drawn greedily so that each keeps to its weight; `size` None uses
    every sample of every dataset once, `weights` being their lengths. Without `indices` no sample
    can be read. Raises ValueError if the blend needs more samples of a dataset than it has. Source:
    megatron-core's BlendedDataset.
    """

    def __init__(
        self,
        datasets: Sequence[GPTDataset],
        weights: Sequence[float],
        size: int | None,
        *,
        cache: IndexCache | None = None,
        surplus: float = 0.005,
        indices: bool = True,
    ) -> None:
        assert len(datasets) == len(weights) > 0
        if not all(0 < weight < math.inf for weight in weights):
            raise ValueError(
                f"--data-path: weights {list(weights)} must all be positive numbers "
                "[blend-malformed]"
            )
        if size is not None and size < 1:
            raise ValueError(f"the blend is to give {size} samples; it must be at least one")
        self.datasets = list(datasets)
        self.size = size
        self.index_split = datasets[0].index_split
        self.weights = list(weights) if size is None else normalize(weights)
        self.description = {
            "class": "BlendedDataset",
            "datasets": [dataset.description for dataset in self.datasets],
            "split": self.index_split,
            "weights": self.weights,
            "size": size,
            "format": CACHE_FORMAT,
        }
        self._indices = IndexArrays({})
        if indices:
            self._indices = self._load(cache) or self._build(cache)
            self._check_supply(surplus)
        log.info(LOGGER, f"> BlendedDataset length: {len(self)}")

    def _load(self, cache: IndexCache | None) -> IndexArrays | None:
        if cache is None:
            return None
        indices = cache.load("BlendedDataset", self._cache_key(), INDEX_NAMES)
        size = sum(self.weights) if self.size is None else self.size
        if indices is None or any(indices[name].shape != (size,) for name in INDEX_NAMES):
            return None
        log.info(LOGGER, "Load the BlendedDataset indices")
        return indices

    def _build(self, cache: IndexCache | None) -> IndexArrays:
        if cache is None or not cache.writable():
            log.info(LOGGER, "Build the BlendedDataset indices")
            return IndexArrays(self._arrays())
        with cache.building("BlendedDataset", self._cache_key()):
            indices = self._load(cache)  # by another process, while this one waited
            if indices is not None:
                return indices
            log.info(LOGGER, "Build and save the BlendedDataset indices")
            return cache.store("BlendedDataset", self._cache_key(), self._arrays())

    def _arrays(self) -> dict[str, np.ndarray]:
        if self.size is None:
            indices = build_exhaustive_blending_indices([len(dataset) for dataset in self.datasets])
        else:
            indices = build_blending_indices(self.weights, self.size)
        return dict(zip(INDEX_NAMES, indices, strict=True))

    def _cache_key(self) -> str:
        return json.dumps(self.description, indent=4)

    def _check_supply(self, surplus: float) -> None:
        drawn = np.bincount(self.dataset_index, minlength=len(self.datasets))
        for dataset, count in zip(self.datasets, drawn.tolist(), strict=True):
            if count > len(dataset):
                raise ValueError(
                    f"--mid-level-dataset-surplus {surplus}: the {self.index_split} blend needs "
                    f"{count} samples of {dataset.corpus.path_prefix}, {len(dataset)} were built; "
                    "raise the surplus, for example tenfold [dataset-surplus-too-small]"
                )

    @property
    def dataset_index(self) -> np.ndarray:
        """int16 (int32 beyond 32,766 datasets) [n]: the dataset sample i comes from."""
        return self._indices["dataset_index"]

    @property
    def dataset_sample_index(self) -> np.ndarray:
        """int64 [n]: which sample of that dataset it is."""
        return self._indices["dataset_sample_index"]

    def __len__(self) -> int:
        return int(sum(self.weights)) if self.size is None else self.size

    def source(self, index: int) -> tuple[int, int]:
        """(number of the dataset, number of its sample) that sample `index` is."""
        if not 0 <= index < len(self):
            raise IndexError(f"{self.index_split} sample {index} of {len(self)}")
        self._indices.check_files()
        return int(self.dataset_index[index]), int(self.dataset_sample_index[index])

    def locate(self, index: int) -> list[tuple[int, int, int]]:
        """As GPTDataset.locate, in the dataset that `source(index)` names."""
        dataset, sample = self.source(index)
        return self.datasets[dataset].locate(sample)

    def __getitem__(self, index: int) -> np.ndarray:
        dataset, sample = self.source(index)
        return self.datasets[dataset][sample]

    def order(self) -> dict[str, object]:
        """Everything the order of the samples depends on, in JSON types. A longer blend only goes
        on, so its size is not among it unless the blend is exhaustive."""
        return {
            "kind": "BlendedDataset",
            "exhaustive": self.size is None,
            "weights": self.weights,
            "datasets": [dataset.order() for dataset in self.datasets],
        }

    def prefixes(self) -> list[str]:
        """See `sample_lookup.Dataset`."""
        return list(dict.fromkeys(dataset.corpus.path_prefix for dataset in self.datasets))

    def spans_of(self, index: int) -> list[TokenSpan]:
        """See `sample_lookup.Dataset`."""
        dataset, sample = self.source(index)
        return self.datasets[dataset].spans_of(sample)

    def samples_showing(self, prefix: str, document: int) -> dict[int, int]:
        """See `sample_lookup.Dataset`."""
        token_counts: dict[int, int] = {}
        for number, dataset in enumerate(self.datasets):
            counts = dataset.samples_showing(prefix, document)
            draws = np.flatnonzero(
                (self.dataset_index == number) & np.isin(self.dataset_sample_index, list(counts))
            )
            samples = self.dataset_sample_index[draws].tolist()
            token_counts |= {p: counts[s] for p, s in zip(draws.tolist(), samples, strict=True)}
        return dict(sorted(token_counts.items()))

    def plan_rows(self, size: int | None) -> list[Row]:
        """The rows of the data table if `size` samples (None: all) are read."""
        counts = np.bincount(self.dataset_index[:size], minlength=len(self.datasets)).tolist()
        return [
            row
            for dataset, count in zip(self.datasets, counts, strict=True)
            for row in dataset.plan_rows(count)
        ]
