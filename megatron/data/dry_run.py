"""The table of what a run would read, from a few numbers of each index, without samples or a cache.
For the checks before torch is imported, and for --dry-run.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron.config.data import DataConfig
from megatron.data.blend.members import draws, members_of, read_in, samples_of_epoch, weights_of
from megatron.data.blend.paths import expand
from megatron.data.blend.splits import SPLITS, Blend, normalize, parse_split, split_range
from megatron.data.build import DEFAULT_SPLIT, read_blends
from megatron.data.epoch.token_files import (
    Bounds,
    FileSpan,
    ScatteredTokens,
    TokenFile,
    check_heads,
    read_token_files,
)
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.plan_table import Row
from megatron.data.request import DataRequest, number_needed


@dataclass(frozen=True)
class Shortage:
    """A blend without weights that is read to its end before the run is over: samples it has of a
    split, and needs."""

    split: str
    samples: int
    needed: int


@dataclass(frozen=True)
class SplitFiles:
    """A split that is read: its blend, the samples needed (None: one epoch), and by prefix what a
    start knows of its files, whose part for this split is `spans[number]`. `own`: its data are
    named for it alone, and all of them are its."""

    name: str
    blend: Blend
    size: int | None
    files: Mapping[str, TokenFile]
    number: int
    own: bool

    def span(self, prefix: str) -> FileSpan:
        """This split's part of a file."""
        return self.files[prefix].spans[self.number]


def rows_in_megatron_order(data: DataConfig, request: DataRequest) -> list[Row]:
    """A row for each data set and each split that is read, as the run prints them; none for
    --mock-data.

    Samples of a large mix are its shares to a fraction; a run gives whole ones. Raises ValueError
    and FileNotFoundError for what would keep the run from starting, as it would.
    """
    return [
        row
        for split in read_splits(data, request.sizes)
        for row in _rows(split, request.sequence_length)
    ]


def read_splits(data: DataConfig, sizes: Sequence[int | None]) -> list[SplitFiles]:
    """The splits that are read, of --multiple-validation-sets each; none for --mock-data. A few
    numbers of each index are read, once. Raises as `rows_in_megatron_order` does."""
    blends = read_blends(data)
    splits: list[SplitFiles] = []
    if isinstance(blends, list):
        for name, blend, size in zip(SPLITS, blends, sizes, strict=True):
            if blend is not None and size != 0:
                splits.append(
                    SplitFiles(name, blend, size, read_files(data, blend, [(0.0, 1.0)]), 0, True)
                )
    else:
        split_bounds = [
            None if size == 0 else bounds
            for bounds, size in zip(parse_split(data.split or DEFAULT_SPLIT), sizes, strict=True)
        ]
        files = read_files(data, blends, split_bounds)
        splits = [
            SplitFiles(name, blends, size, files, number, False)
            for number, (name, bounds, size) in enumerate(
                zip(SPLITS, split_bounds, sizes, strict=True)
            )
            if bounds is not None
        ]
    if not data.multiple_validation_sets:
        return splits
    return [
        named_split
        for split in splits
        for named_split in (_sets(split) if split.name == "valid" else [split])
    ]


def _sets(split: SplitFiles) -> Iterator[SplitFiles]:
    """The sets of --multiple-validation-sets."""
    for number, word in enumerate(split.blend[0]):
        yield replace(split, name=f"valid-{number}", blend=([word], None))


def read_files(
    data: DataConfig, blend: Blend, split_bounds: Sequence[Bounds]
) -> dict[str, TokenFile]:
    """The numbers of all pairs of a blend by their prefixes, in Megatron's order also of those that
    it alone can read."""
    prefixes = [prefix for word in blend[0] for prefix in expand(word)]
    try:
        return dict(zip(prefixes, read_token_files(prefixes, split_bounds), strict=True))
    except ScatteredTokens:
        if data.data_order == "epoch":
            raise
        return {prefix: _scattered(prefix, split_bounds) for prefix in prefixes}


def _scattered(prefix: str, split_bounds: Sequence[Bounds]) -> TokenFile:
    """The numbers of a pair whose sequences lie anywhere in it."""
    corpus = IndexedDataset(prefix)

    def span(sequences: range) -> FileSpan:
        ends = np.searchsorted(corpus.document_indices[:-1], (sequences.start, sequences.stop))
        tokens = int(corpus.sequence_lengths[sequences.start : sequences.stop].sum(dtype=np.int64))
        return FileSpan(sequences, int(ends[1] - ends[0]), 0, tokens)

    spans = {
        number: span(split_range(bounds, len(corpus)))
        for number, bounds in enumerate(split_bounds)
        if bounds is not None
    }
    size = span(range(len(corpus))).tokens * corpus.dtype.itemsize
    return TokenFile(
        prefix, corpus.dtype, len(corpus), len(corpus.document_indices) - 1, size, b"", spans
    )


def shortages(splits: Sequence[SplitFiles], sequence_length: int) -> list[Shortage]:
    """The splits, in Megatron's order, that have fewer samples than the run needs. One data set,
    and a blend with weights, are read as often as needed. Raises ValueError for a pair that fills
    no sample."""
    problems = []
    for split in splits:
        samples = sum(row.samples for row in _rows(split, sequence_length, drawn=False))
        if split.size is not None and round(samples) < split.size:
            problems.append(Shortage(split.name, round(samples), split.size))
    return problems


def check_ids(splits: Sequence[SplitFiles], vocab_size: int) -> None:
    """Raise ValueError for a file whose first tokens are no ids of the vocabulary."""
    check_heads(
        list({prefix: file for split in splits for prefix, file in split.files.items()}.values()),
        vocab_size,
    )


def _rows(split: SplitFiles, sequence_length: int, drawn: bool = True) -> list[Row]:
    """In Megatron's order; with `drawn` False the samples of a mix are its shares."""
    members = members_of(split.blend)
    name = split.name
    size = split.size
    spans = [split.span(member.prefix) for member in members]
    numbers = read_in(name, members, [span.tokens for span in spans], sequence_length)
    read = [members[n] for n in numbers]
    for n in numbers:
        _check_filled(name, members[n].prefix, spans[n], sequence_length)
    available = [samples_of_epoch(spans[n].tokens, sequence_length) for n in numbers]
    if len(members) == 1 and (read[0].weight is None or split.own):
        samples: Sequence[float] = available if size is None else [size]
    elif read[0].weight is None and (size is None or size >= sum(available)):
        samples = available
    else:
        size = number_needed(size, name)
        tokens = [split.files[member.prefix].tokens for member in read]
        weights = available if read[0].weight is None else weights_of(read, tokens)
        samples = (
            draws(weights, size) if drawn else [size * weight for weight in normalize(weights)]
        )
    return [
        Row(name, member.prefix, spans[n].documents, spans[n].tokens, count, sequence_length)
        for n, member, count in zip(numbers, read, samples, strict=True)
    ]


def _check_filled(split: str, prefix: str, span: FileSpan, sequence_length: int) -> None:
    if span.tokens <= sequence_length:
        without = "" if split == "train" else ", set it to 0 to go without"
        raise ValueError(
            f"{prefix}: its {len(span.sequences)} {split} sequences hold {span.tokens} tokens, "
            f"one sample of --seq-length {sequence_length} needs {sequence_length + 1}; raise the "
            f"share of {split} in --split{without} (it takes whole documents: cut few long ones "
            "into several), use more data, or lower --seq-length "
            "[data-too-small]"
        )
