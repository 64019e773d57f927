"""What a run would read of its data, for a dry run: from a few numbers of each index, without samples or a cache.

It knows the data flags and sizes; it must not know tokenizers, process groups or batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron.data.blend_members import draws, members_of, read_in, samples_of_epoch, weights_of
from megatron.data.blended_dataset import SPLITS, Blend, EpochCounts, normalize, parse_split, split_range
from megatron.data.build import DEFAULT_SPLIT, DataFlags, read_blends
from megatron.data.data_paths import expand
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.packed_build import build_packed_datasets
from megatron.data.plan_table import Row
from megatron.data.token_files import (
    Part,
    ScatteredTokens,
    Span,
    TokenFile,
    check_heads,
    read_token_file,
    read_token_files,
)


@dataclass(frozen=True)
class Shortage:
    """A blend without weights that is read to its end before the run is over: samples it has of a split, and needs."""

    split: str
    samples: int
    needed: int


def planned_rows(data: DataFlags, sizes: Sequence[int | None], sequence_length: int, micro_batch_size: int = 1,
                 global_batch_size: int = 1) -> list[Row]:
    """A row for each data set and each split that is read, as the run prints them; none for --mock-data. Of packed samples,
    for which the batch sizes are needed, a row for each subset.

    `sizes`: samples needed of each split, None for one epoch. Samples of a mix in the epoch order, and of a large one in
    Megatron's, are its shares to a fraction; a run gives whole ones. Raises ValueError and FileNotFoundError for what would
    keep the run from starting, as it would.
    """
    if data.packed_samples:
        found: list[Row] = []
        build_packed_datasets(data, sequence_length=sequence_length, micro_batch_size=micro_batch_size,
                              global_batch_size=global_batch_size, sizes=sizes, vocab_size=None, rows=found)
        return found
    rows: list[Row] = []
    for split, blend, part, size in _splits(data, sizes):
        make = _rows_in_epochs if data.data_order == "epoch" else _rows
        rows += make(split, blend, part, size, sequence_length)
    return rows


def shortages(data: DataFlags, sizes: Sequence[int | None], sequence_length: int) -> list[Shortage]:
    """The splits of which the data flags name fewer samples than `sizes`. One data set, and a blend with weights, are read
    as often as needed; so is everything in the epoch order. Raises as `planned_rows` does."""
    found = []
    for split, blend, part, size in _splits(data, sizes):
        rows = list(_rows_in_epochs(split, blend, part, size, sequence_length) if data.data_order == "epoch" else
                    _rows(split, blend, part, size, sequence_length, drawn=False))
        samples = sum(row.samples for row in rows)
        if size is not None and round(samples) < size:
            found.append(Shortage(split, round(samples), size))
    return found


def check_ids(data: DataFlags, vocab_size: int) -> None:
    """Raise ValueError for a pair whose first tokens are no ids of the vocabulary."""
    blends = read_blends(data)
    words = {word: None for blend in (blends if isinstance(blends, list) else [blends]) if blend for word in blend[0]}
    for word in words:
        check_heads([_file(prefix, (0.0, 1.0)) for prefix in expand(word)], vocab_size)


def _splits(data: DataFlags, sizes: Sequence[int | None]) -> Iterator[tuple[str, Blend, Part, int | None]]:
    """(name, blend, part of each file, samples needed) of each split that is read; several of --multiple-validation-sets."""
    blends = read_blends(data)
    if blends is None:
        return
    if isinstance(blends, list):
        parts: list[Part] = [None if blend is None else (0.0, 1.0) for blend in blends]
    else:
        parts, blends = parse_split(data.split or DEFAULT_SPLIT), [blends] * len(SPLITS)
    for split, blend, part, size in zip(SPLITS, blends, parts, sizes, strict=True):
        if part is None or size == 0:
            continue
        if split == "valid" and data.multiple_validation_sets:
            for number, word in enumerate(blend[0]):
                yield f"valid-{number}", ([word], None), part, size
        else:
            yield split, blend, part, size


def _rows(split: str, blend: Blend, part: Part, size: int | None, sequence_length: int, drawn: bool = True) -> list[Row]:
    """In Megatron's order; with `drawn` False the samples of a mix are its shares."""
    members = members_of(blend)
    files = [_file(member.prefix, part) for member in members]
    tokens = [file.spans[0].tokens for file in files]
    numbers = read_in(split, members, tokens, sequence_length)
    read, counts = [members[n] for n in numbers], [tokens[n] for n in numbers]
    for n, count in zip(numbers, counts, strict=True):
        if count <= sequence_length:
            without = "" if split == "train" else ", set it to 0 to go without"
            raise ValueError(f"{members[n].prefix}: its {len(files[n].spans[0].sequences)} {split} sequences hold {count} "
                             f"tokens, one sample of --seq-length {sequence_length} needs {sequence_length + 1}; raise the "
                             f"share of {split} in --split{without}, use more data, or lower --seq-length")
    there = [samples_of_epoch(count, sequence_length) for count in counts]
    alone = len(members) == 1 and (members[0].weight is None or part == (0.0, 1.0))
    if alone:
        samples: Sequence[float] = there if size is None else [size]
    elif read[0].weight is None and (size is None or size >= sum(there)):
        samples = there
    elif size is None:
        raise ValueError(f"--data-path: weights need a number of {split} samples; drop the weights")
    else:
        weights = there if read[0].weight is None else weights_of(read, [files[n].tokens for n in numbers])
        samples = draws(weights, size) if drawn else [size * weight for weight in normalize(weights)]
    return [Row(split, member.prefix, files[n].spans[0].documents, tokens[n], count, sequence_length)
            for n, member, count in zip(numbers, read, samples, strict=True)]


def _file(prefix: str, part: Part) -> TokenFile:
    """The numbers of a pair, also of one that only Megatron's order can read."""
    try:
        return read_token_file(prefix, [part])
    except ScatteredTokens:
        corpus = IndexedDataset(prefix)
        sequences = split_range(part, len(corpus))
        ends = np.searchsorted(corpus.document_indices[:-1], (sequences.start, sequences.stop))
        tokens = int(corpus.sequence_lengths[sequences.start : sequences.stop].sum(dtype=np.int64))
        bytes_of_all = int(corpus.sequence_lengths.sum(dtype=np.int64)) * corpus.dtype.itemsize
        return TokenFile(prefix, corpus.dtype, len(corpus), len(corpus.document_indices) - 1, bytes_of_all, b"",
                         (Span(sequences, int(ends[1] - ends[0]), 0, tokens),))


def _rows_in_epochs(split: str, blend: Blend, part: Part, size: int | None, sequence_length: int) -> Iterator[Row]:
    """In the epoch order: a row for each word of the data flags."""
    words, weights = blend
    spans = [[file.spans[0] for file in read_token_files(expand(word), [part])] for word in words]
    tokens = [sum(span.tokens for span in some) for some in spans]
    for word, count in zip(words, tokens, strict=True):
        if not count:
            raise ValueError(f"{word}: its part of {split} holds 0 tokens; give {split} more data (--split)")
    for word, some, count, samples in zip(words, spans, tokens,
                                          _samples(split, weights, tokens, size, sequence_length), strict=True):
        yield Row(split, word, sum(span.documents for span in some), count, samples, sequence_length)


def _samples(split: str, weights: list[float] | None, tokens: Sequence[int], size: int | None,
             sequence_length: int) -> list[float]:  # fmt: skip
    """How many samples are read under each word, in the epoch order."""
    if isinstance(weights, EpochCounts) and split == "train":
        there = [count * epochs / sequence_length for count, epochs in zip(tokens, weights, strict=True)]
        if size is not None and size > sum(there):
            raise ValueError(
                f"--data-path: the epochs asked for make {sum(there):.0f} samples of --seq-length {sequence_length}, the "
                f"run reads {size}; raise epochs:, or lower --train-iters or --train-samples"
            )
        return there
    if weights is None or isinstance(weights, EpochCounts):
        shares = tokens
        size = sum(tokens) / sequence_length if size is None else size
    elif size is None:
        raise ValueError(f"--data-path: weights need a number of {split} samples; drop the weights")
    else:
        shares = normalize(weights)
    return [size * share / sum(shares) for share in shares]
