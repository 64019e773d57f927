"""Samples of the groups: each part of a group is a data set, of some documents of a pair, and the
group their blend."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from megatron.config.data import DataConfig
from megatron.data.blend.blended_dataset import BlendedDataset, blend_sizes
from megatron.data.blend.members import draws
from megatron.data.blend.splits import SPLITS, normalize, split_range
from megatron.data.build import Splits
from megatron.data.dry_run import read_files
from megatron.data.epoch.epoch_dataset import EpochBlend, EpochDataset
from megatron.data.epoch.proportional_draws import whole_weights
from megatron.data.epoch.token_files import FileSpan, check_heads, read_token_file
from megatron.data.epoch.token_reader import TokenReader
from megatron.data.gpt_dataset import GPTDataset
from megatron.data.index_cache import IndexCache
from megatron.data.megatron_order import cache_of, open_corpus
from megatron.data.plan_table import Row
from megatron.data.request import DataRequest
from megatron.data.sample_lookup import Dataset
from megatron.data.tokenizers import metadata

from .groups import Group


class Named(BlendedDataset):
    """A group in Megatron's order; validation calls it by `set_name`."""

    set_name = ""


class NamedEpochs(EpochBlend):
    """A group in the epoch order."""

    set_name = ""


def spans(
    data: DataConfig, split: str, groups: Sequence[Group], length: int
) -> list[list[FileSpan]]:
    """What each group has of its pairs. Raises ValueError for documents that fill no sample, and
    ValueError and FileNotFoundError for pairs that cannot be read."""
    found = []
    for group in groups:
        found.append(
            [
                read_files(data, ([part.prefix], None), [part.bounds])[part.prefix].spans[0]
                for part in group.parts
            ]
        )
        for part, span in zip(group.parts, found[-1], strict=True):
            if span.tokens <= length:
                raise ValueError(
                    f"--{split}-weighted-split-paths {group.name}: the documents "
                    f"{part.bounds[0]:g}:{part.bounds[1]:g} of {part.prefix} hold {span.tokens} "
                    f"tokens, one sample of --seq-length {length} needs {length + 1}; widen the "
                    "range, give more data, or lower --seq-length [data-too-small]"
                )
    return found


class WeightedSource:
    """The groups of each split."""

    def __init__(self, groups: Callable[[], Mapping[str, list[Group]]]) -> None:
        self._groups = groups

    def build(self, data: DataConfig, request: DataRequest, rows: list[Row]) -> Splits:
        """See `DataSource`."""
        groups = self._groups()
        for prefix in dict.fromkeys(
            part.prefix for each in groups.values() for group in each for part in group.parts
        ):
            if request.identity is not None:
                metadata.check(prefix, request.identity)
        rows += self.plan_rows(data, request)
        make = _in_epochs if data.data_order == "epoch" else _in_megatron_order
        built: list[list[Dataset]] = []
        for number, split in enumerate(SPLITS):
            size = request.sizes[number]
            built.append(
                [make(data, request, number, group, int(size)) for group in groups[split]]
                if size
                else []
            )
        train, valid, test = built
        return next(iter(train), None), valid or None, next(iter(test), None)

    def plan_rows(self, data: DataConfig, request: DataRequest) -> list[Row]:
        """See `DataSource`."""
        return [*_rows(self._groups(), data, request)]


def _rows(
    groups: Mapping[str, list[Group]], data: DataConfig, request: DataRequest
) -> Iterator[Row]:
    length = request.sequence_length
    for split, size in zip(SPLITS, request.sizes, strict=True):
        if not size:
            continue
        found = spans(data, split, groups[split], length)
        for group, files in zip(groups[split], found, strict=True):
            name = f"valid-{group.name}" if split == "valid" else split
            counts = draws([part.weight for part in group.parts], size)
            for part, span, count in zip(group.parts, files, counts, strict=True):
                yield Row(name, part.prefix, span.documents, span.tokens, count, length)


def _in_megatron_order(
    data: DataConfig, request: DataRequest, number: int, group: Group, size: int
) -> Dataset:
    """A group with megatron-core's sizes: each data set of several has a surplus."""
    weights = normalize([part.weight for part in group.parts])
    surplus = data.mid_level_dataset_surplus
    counts = [size]
    if len(group.parts) > 1:
        used, counts = blend_sizes(weights, size, surplus)
        size = sum(used)
    datasets = []
    for part, count in zip(group.parts, counts, strict=True):
        corpus = open_corpus(part.prefix, request.checked_vocab_size)
        dataset = GPTDataset(
            corpus,
            sequence_length=request.sequence_length,
            num_samples=count,
            seed=request.seed,
            sequences=split_range(part.bounds, len(corpus)),
            index_split=SPLITS[number],
            cache=cache_of(data, part.prefix),
            indices=request.indices,
        )
        datasets.append(dataset)
    folder = data.data_cache_path
    cache = IndexCache(folder, "--data-cache-path") if folder else None
    blend = Named(datasets, weights, size, cache=cache, surplus=surplus, indices=request.indices)
    blend.set_name = group.name
    return blend


def _in_epochs(
    data: DataConfig, request: DataRequest, number: int, group: Group, size: int
) -> Dataset:
    """A group in the epoch order."""
    bounds = [part.bounds for part in group.parts]
    files = [read_token_file(part.prefix, bounds) for part in group.parts]
    if request.checked_vocab_size is not None:
        check_heads(files, request.checked_vocab_size)
    reader = TokenReader(files)
    datasets = [
        EpochDataset(
            part.prefix,
            reader,
            [place],
            place,
            sequence_length=request.sequence_length,
            seed=request.seed,
            index_split=SPLITS[number],
        )
        for place, part in enumerate(group.parts)
    ]
    weights = whole_weights([part.weight for part in group.parts])
    blend = NamedEpochs(datasets, weights, size)
    blend.set_name = group.name
    return blend
