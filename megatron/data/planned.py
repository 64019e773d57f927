"""What a run would read of its data, for a dry run: from a few numbers of each index, without samples or a cache.

It knows the data flags and sizes; it must not know tokenizers, process groups or batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron.data.blended_dataset import SPLITS, Blend, EpochCounts, normalize, parse_split
from megatron.data.build import DEFAULT_SPLIT, DataFlags, read_blends
from megatron.data.data_paths import expand
from megatron.data.packed_build import build_packed_datasets
from megatron.data.plan_table import Row
from megatron.data.token_files import Part, Span, read_token_files


def planned_rows(data: DataFlags, sizes: Sequence[int | None], sequence_length: int, micro_batch_size: int = 1,
                 global_batch_size: int = 1) -> list[Row]:
    """A row for each word of the data flags and each split that is read; none for --mock-data. Of packed samples, for which
    the batch sizes are needed, a row for each subset.

    `sizes`: samples needed of each split, None for one epoch. Samples of a mix are its shares to a fraction; a run gives
    whole ones. Raises ValueError and FileNotFoundError for what would keep the run from starting, as it would.
    """
    if data.packed_samples:
        found: list[Row] = []
        build_packed_datasets(data, sequence_length=sequence_length, micro_batch_size=micro_batch_size,
                              global_batch_size=global_batch_size, sizes=sizes, vocab_size=None, rows=found)
        return found
    blends = read_blends(data)
    if blends is None:
        return []
    if isinstance(blends, list):
        parts: list[Part] = [None if blend is None else (0.0, 1.0) for blend in blends]
    else:
        parts, blends = parse_split(data.split or DEFAULT_SPLIT), [blends] * len(SPLITS)
    rows: list[Row] = []
    for split, blend, part, size in zip(SPLITS, blends, parts, sizes, strict=True):
        if part is None or size == 0:
            continue
        if split == "valid" and data.multiple_validation_sets:
            for number, word in enumerate(blend[0]):
                rows += _rows(f"valid-{number}", data.data_order, ([word], None), part, size, sequence_length)
        else:
            rows += _rows(split, data.data_order, blend, part, size, sequence_length)
    return rows


def _rows(split: str, order: str, blend: Blend, part: Part, size: int | None, sequence_length: int) -> Iterator[Row]:
    words, weights = blend
    if isinstance(weights, EpochCounts) and order != "epoch":
        raise ValueError("--data-path epochs: is kept by --data-order epoch only; add it, or give weights")
    spans = [[file.spans[0] for file in read_token_files(expand(word), [part])] for word in words]
    tokens = [sum(span.tokens for span in some) for some in spans]
    for word, count in zip(words, tokens, strict=True):
        if not count:
            raise ValueError(f"{word}: its part of {split} holds 0 tokens; give {split} more data (--split)")
    for word, some, count, samples in zip(words, spans, tokens,
                                          _samples(split, order, weights, spans, size, sequence_length), strict=True):
        yield Row(split, word, sum(span.documents for span in some), count, samples, sequence_length)


def _samples(split: str, order: str, weights: list[float] | None, spans: Sequence[Sequence[Span]], size: int | None,
             sequence_length: int) -> list[float]:  # fmt: skip
    """How many samples are read under each word."""
    tokens = [sum(span.tokens for span in some) for some in spans]
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
        whole = sum(tokens) / sequence_length
        if size is None or (order == "megatron" and sum(map(len, spans)) > 1):
            size = whole if size is None else min(size, whole)  # Megatron reads several without weights once
    elif size is None:
        raise ValueError(f"--data-path: weights need a number of {split} samples; drop the weights")
    else:
        shares = normalize(weights)
    return [size * share / sum(shares) for share in shares]
