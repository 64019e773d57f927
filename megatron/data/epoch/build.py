"""From the data flags to the datasets of `--data-order epoch`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from megatron import log
from megatron.config.data import DataConfig
from megatron.data.blend.blended_dataset import EpochCounts
from megatron.data.blend.paths import expand
from megatron.data.blend.splits import SPLITS, Blend, SplitMatrix, normalize, parse_split
from megatron.data.build import DEFAULT_SPLIT, LOGGER, Blends, Splits, build_splits
from megatron.data.dry_run import SplitFiles, read_splits
from megatron.data.epoch.epoch_dataset import EpochBlend, EpochDataset
from megatron.data.epoch.proportional_draws import Shares, whole_weights
from megatron.data.epoch.token_files import check_heads, read_token_files
from megatron.data.epoch.token_reader import TokenReader
from megatron.data.plan_table import Row
from megatron.data.request import Before, DataRequest, number_needed
from megatron.data.sample_lookup import Dataset


def build_in_epoch_order(data: DataConfig, request: DataRequest, rows: list[Row]) -> Splits:
    """The data sets of `--data-order epoch`."""
    builder = EpochBuilder(
        request.sequence_length, request.seed, request.checked_vocab_size, request.before, rows
    )

    def make(blends: Blends, sizes: Sequence[int | None]) -> Sequence[Dataset | None]:
        if isinstance(blends, tuple):
            matrix = parse_split(data.split or DEFAULT_SPLIT)
            log.info(LOGGER, f"Let split_matrix = {matrix}")
            return builder.one_source(blends, matrix, sizes)
        return [
            None if blend is None or size == 0 else builder.one_split(blend, number, size)
            for number, (blend, size) in enumerate(zip(blends, sizes, strict=True))
        ]

    return build_splits(data, request, rows, make)


def rows_in_epoch_order(data: DataConfig, request: DataRequest) -> list[Row]:
    """As `dry_run.rows_in_megatron_order`, for `--data-order epoch`; a row for each word of the
    data flags, samples to a fraction."""
    return [
        row
        for split in read_splits(data, request.sizes)
        for row in _rows_in_epochs(split, request.sequence_length)
    ]


@dataclass(frozen=True)
class Members:
    """The files of a blend, and by the word that named them which of them are its."""

    reader: TokenReader
    named: list[tuple[str, range]]


class EpochBuilder:
    """Makes the datasets of all splits of one run."""

    def __init__(
        self,
        sequence_length: int,
        seed: int,
        vocab_size: int | None,
        before: Before | None,
        rows: list[Row],
    ) -> None:
        """`rows` gets the table of the plan."""
        self.sequence_length = sequence_length
        self.seed = seed
        self.vocab_size = vocab_size
        self.before = before
        self.rows = rows

    def one_source(
        self, blend: Blend, split_bounds: SplitMatrix, sizes: Sequence[int | None]
    ) -> list[EpochBlend | None]:
        """All splits from the same data, each a part of every file."""
        members = self._read(
            blend[0], split_bounds
        )  # one for all splits, so that a file is open once
        return [
            None if bounds is None or size == 0 else self._split(blend, members, number, size)
            for number, (bounds, size) in enumerate(zip(split_bounds, sizes, strict=True))
        ]

    def one_split(self, blend: Blend, number: int, size: int | None) -> EpochBlend:
        """One split from its own data, all of it."""
        split_bounds = [(0.0, 1.0) if split == number else None for split in range(len(SPLITS))]
        return self._split(blend, self._read(blend[0], split_bounds), number, size)

    def _read(self, words: Sequence[str], split_bounds: SplitMatrix) -> Members:
        prefixes = [expand(word) for word in words]
        files = read_token_files([prefix for some in prefixes for prefix in some], split_bounds)
        if self.vocab_size is not None:
            check_heads(files, self.vocab_size)
        ends = list(accumulate(len(some) for some in prefixes))
        return Members(
            TokenReader(files),
            [
                (word, range(end - len(some), end))
                for word, some, end in zip(words, prefixes, ends, strict=True)
            ],
        )

    def _split(self, blend: Blend, members: Members, number: int, size: int | None) -> EpochBlend:
        weights = blend[1]
        split = SPLITS[number]
        repeats = isinstance(weights, EpochCounts)
        if weights is None or (repeats and split != "train"):
            return self._together(members, number, size)
        datasets = [
            self._dataset(name, members.reader, files, number) for name, files in members.named
        ]
        if repeats:
            shares = [
                dataset.samples(count) for dataset, count in zip(datasets, weights, strict=True)
            ]
            for dataset, count, samples in zip(datasets, weights, shares, strict=True):
                if samples == 0:
                    raise ValueError(
                        f"--data-path: epochs:{count:g} of {dataset.name} make no "
                        "sample; raise it, or omit it [epochs-too-few]"
                    )
        else:
            size = number_needed(size, split)
            shares = whole_weights(weights)
        blended = self._blend(datasets, shares, size, split, limited=repeats)
        used = blended.shares.counts(blended.size - blended.since)
        for dataset, samples in zip(blended.datasets, used, strict=True):
            self.rows.append(
                Row(
                    split,
                    dataset.name,
                    dataset.documents,
                    dataset.tokens,
                    samples,
                    self.sequence_length,
                )
            )
        return blended

    def _together(self, members: Members, number: int, size: int | None) -> EpochBlend:
        """Data without weights are one corpus: each is read in proportion to its tokens."""
        split = SPLITS[number]
        named = members.named
        reader = members.reader
        name = named[0][0] if len(named) == 1 else f"the {len(named)} data sets of --data-path"
        dataset = self._dataset(name, reader, range(len(reader.files)), number)
        blended = self._blend([dataset], [1], dataset.samples() if size is None else size, split)
        for name, files in named:
            spans = [reader.files[file].spans[number] for file in files]
            tokens = sum(span.tokens for span in spans)
            samples = blended.size * tokens / dataset.tokens
            self.rows.append(
                Row(
                    split,
                    name,
                    sum(s.documents for s in spans),
                    tokens,
                    samples,
                    self.sequence_length,
                )
            )
        return blended

    def _dataset(self, name: str, reader: TokenReader, files: range, number: int) -> EpochDataset:
        return EpochDataset(
            name,
            reader,
            files,
            number,
            sequence_length=self.sequence_length,
            seed=self.seed,
            index_split=SPLITS[number],
        )

    def _blend(
        self,
        datasets: list[EpochDataset],
        weights: list[int],
        size: int | None,
        split: str,
        limited: bool = False,
    ) -> EpochBlend:
        """A mix from its start, or from where the checkpoint left it. A `limited` one ends when
        each data set has given its weight in samples."""
        since, drawn_before = self._position(datasets, weights) if split == "train" else (0, {})
        available = since + sum(weights)
        if limited:
            if size is not None and size > available:
                raise ValueError(
                    f"--data-path: the given epochs have {available} samples of --seq-length "
                    f"{self.sequence_length}, the run reads {size}; raise epochs:, or lower "
                    "--train-iters or --train-samples [epochs-too-few]"
                )
            size = available
        assert size is not None  # only a limited mix has an end of its own
        return EpochBlend(datasets, weights, size, since=since, drawn_before=drawn_before)

    def _position(
        self, datasets: list[EpochDataset], weights: list[int]
    ) -> tuple[int, dict[str, int]]:
        """(sample of the run at which this mix begins, samples that each data set gave before)."""
        before = self.before
        if before is None or before.order.get("kind") != "EpochBlend":
            return 0, {}
        saved = before.order
        orders = [dataset.order() for dataset in datasets]
        if (saved["weights"], saved["datasets"]) == (weights, orders):
            return saved["since"], saved["taken"]
        if not before.other_mix:
            return 0, {}
        saved_orders = {order["corpus"]["sha256"]: order for order in saved["datasets"]}
        for dataset, order in zip(datasets, orders, strict=True):
            if saved_orders.get(dataset.fingerprint, order) != order:
                raise ValueError(
                    f"--continue-data-mix: {dataset.name} was read with --seq-length and --seed "
                    f"of {saved_orders[dataset.fingerprint]}; another mix can continue only with "
                    "the same [data-mix-order-differs]"
                )
        draws = Shares(saved["weights"]).counts(before.consumed - saved["since"])
        drawn = dict(zip(saved_orders, draws, strict=True))
        saved_drawn = saved["taken"]
        return before.consumed, saved_drawn | {
            name: saved_drawn.get(name, 0) + count for name, count in drawn.items()
        }


def _rows_in_epochs(split: SplitFiles, sequence_length: int) -> Iterator[Row]:
    """In the epoch order: a row for each word of the data flags."""
    words, weights = split.blend
    spans = [[split.span(prefix) for prefix in expand(word)] for word in words]
    tokens = [sum(span.tokens for span in some) for some in spans]
    for word, count in zip(words, tokens, strict=True):
        if not count:
            raise ValueError(
                f"{word}: its part of {split.name} holds 0 tokens; give {split.name} more data "
                "(--split) [split-leaves-no-data]"
            )
    for word, some, count, samples in zip(
        words,
        spans,
        tokens,
        _samples(split.name, weights, tokens, split.size, sequence_length),
        strict=True,
    ):
        yield Row(
            split.name, word, sum(span.documents for span in some), count, samples, sequence_length
        )


def _samples(
    split: str,
    weights: list[float] | None,
    tokens: Sequence[int],
    size: int | None,
    sequence_length: int,
) -> list[float]:
    """How many samples are read under each word, in the epoch order."""
    if isinstance(weights, EpochCounts) and split == "train":
        available = [
            count * epochs / sequence_length for count, epochs in zip(tokens, weights, strict=True)
        ]
        if size is not None and size > sum(available):
            raise ValueError(
                f"--data-path: the given epochs have {sum(available):.0f} samples of --seq-length "
                f"{sequence_length}, the run reads {size}; raise epochs:, or lower --train-iters "
                "or --train-samples [epochs-too-few]"
            )
        return available
    if weights is None or isinstance(weights, EpochCounts):
        shares: Sequence[float] = tokens
        needed = sum(tokens) / sequence_length if size is None else size
    else:
        shares = normalize(weights)
        needed = number_needed(size, split)
    return [needed * share / sum(shares) for share in shares]
