"""Samples of a stage: of each data set the tokens from where the stage before stopped.

A data set is an endless stream of tokens: in the epoch order its file, read as a circle; in
Megatron's order its documents, shuffled anew in each epoch. A stage takes the next tokens of each,
as many as its share of the samples has, cuts them into samples of its own length and shuffles
these. So where a data set stands is one number, tokens, whatever the lengths and mixes were; and of
no token a second copy is read before all of them were.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from megatron import launcher
from megatron.config.data import DataConfig
from megatron.config.plan.plan import batch_schedule
from megatron.config.tree import Config
from megatron.data.blend.blended_dataset import EpochCounts
from megatron.data.blend.members import Member, members_of, read_in, weights_of
from megatron.data.build import Splits
from megatron.data.dry_run import SplitFiles, read_splits
from megatron.data.epoch.permutation import Permutation
from megatron.data.epoch.proportional_draws import Shares, whole_weights
from megatron.data.epoch.token_files import FileSpan, check_heads, fingerprint
from megatron.data.epoch.token_reader import TokenReader
from megatron.data.gpt_dataset import GPTDataset
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.megatron_order import cache_of, open_corpus
from megatron.data.order_change import data_order_differences
from megatron.data.plan_table import Row
from megatron.data.request import Before, DataRequest
from megatron.data.sample_lookup import TokenSpan
from megatron.data.sources import DataSource

KIND = "StagedDataset"


class Stream(Protocol):
    """The tokens of a data set without end."""

    prefix: str
    tokens: int  # of an epoch

    def read(self, position: int, count: int) -> np.ndarray:
        """Tokens `position .. position + count`, int64."""

    def spans(self, position: int, count: int) -> Iterator[TokenSpan]:
        """Where they are stored."""


class Circle:
    """A file from its first token to its last, again and again: that of --data-order epoch."""

    def __init__(self, reader: TokenReader, number: int, split: int) -> None:
        span = reader.files[number].spans[split]
        self.prefix = reader.files[number].prefix
        self.tokens = span.tokens
        self._reader = reader
        self._number = number
        self._first = span.first

    def _ranges(self, position: int, count: int) -> Iterator[tuple[int, int]]:
        """(first token in the .bin, tokens) of each turn."""
        while count:
            inside = position % self.tokens
            taken = min(count, self.tokens - inside)
            yield self._first + inside, taken
            position += taken
            count -= taken

    def read(self, position: int, count: int) -> np.ndarray:
        """See `Stream`."""
        pieces = [self._reader.read(self._number, *each) for each in self._ranges(position, count)]
        return np.concatenate(pieces).astype(np.int64)

    def spans(self, position: int, count: int) -> Iterator[TokenSpan]:
        """See `Stream`."""
        corpus = IndexedDataset(self.prefix)
        for first, taken in self._ranges(position, count):
            yield from corpus.spans_between(first, first + taken)


class ShuffledDocuments:
    """A pair in Megatron's order: its documents, in another order in each epoch. The index of an
    epoch is that which a run of one epoch has, with a seed of its own."""

    def __init__(self, prefix: str, span: FileSpan, data: DataConfig, request: DataRequest) -> None:
        self.prefix = prefix
        self.tokens = span.tokens
        self.corpus = open_corpus(prefix, request.checked_vocab_size)
        self._sequences = span.sequences
        self._data = data
        self._request = request
        self._epochs: dict[int, GPTDataset] = {}

    def prepare(self, first: int, stop: int) -> None:
        """Build the index of every epoch between two positions, before workers are forked."""
        for epoch in range(first // self.tokens, stop // self.tokens + 1):
            self._epochs[epoch] = GPTDataset(
                self.corpus,
                sequence_length=self._request.sequence_length,
                num_samples=None,
                seed=(self._request.seed + epoch) % 2**32,
                sequences=self._sequences,
                cache=cache_of(self._data, self.prefix),
            )

    def _pieces(self, position: int, count: int) -> Iterator[tuple[int, int, int]]:
        """(sequence, offset, tokens) of each piece of a document."""
        while count:
            epoch, inside = divmod(position, self.tokens)
            index = self._epochs[epoch]
            row = min(inside // index.sequence_length, len(index))
            place, offset = index.sample_index[row].tolist()
            offset += inside - row * index.sequence_length
            while count and place < len(index.document_index):
                sequence = int(index.document_index[place])
                here = int(self.corpus.sequence_lengths[sequence]) - offset
                if here > 0:
                    taken = min(count, here)
                    yield sequence, offset, taken
                    position += taken
                    count -= taken
                offset = max(0, -here)
                place += 1

    def read(self, position: int, count: int) -> np.ndarray:
        """See `Stream`."""
        return np.concatenate(
            [
                self.corpus.gather(np.array([sequence]), offset, offset + taken)
                for sequence, offset, taken in self._pieces(position, count)
            ]
        )

    def spans(self, position: int, count: int) -> Iterator[TokenSpan]:
        """See `Stream`."""
        return (self.corpus.span(*piece) for piece in self._pieces(position, count))


class Part:
    """What a stage reads of a data set: `samples` samples of `length` tokens, the first of which
    begins with token `start` of the stream; those that end in the same epoch are shuffled."""

    def __init__(self, stream: Stream, start: int, samples: int, length: int, seed: int) -> None:
        self.name = stream.prefix
        self.stream = stream
        self.start = start
        self.samples = samples
        self.length = length
        self._seed = seed
        self._epoch = -1
        self._begin = 0
        self._order = Permutation(1)

    def position(self, draw: int) -> int:
        """The token of the stream with which sample `draw` begins."""
        tokens = self.stream.tokens
        epoch = (self.start + (draw + 1) * self.length - 1) // tokens
        if epoch != self._epoch:
            self._epoch = epoch
            # the samples that end before this epoch, and before the next
            self._begin = max(0, (epoch * tokens - self.start) // self.length)
            end = min(self.samples, ((epoch + 1) * tokens - self.start) // self.length)
            key = (self._seed, self.start, epoch, tokens)
            self._order = Permutation(end - self._begin, *key)
        unshuffled = self._begin + self._order[draw - self._begin]
        return self.start + unshuffled * self.length


class StagedDataset:
    """Samples `since .. until` of a run of `size` samples: `ds[i]` is int64 [sequence_length + 1].

    Workers read a little ahead: what is behind the end of the stage is its last sample once more,
    which no iteration gets.
    """

    index_split = "train"

    def __init__(self, parts: Sequence[Part], order: Mapping[str, Any], size: int) -> None:
        self.datasets: Sequence[Any] = parts
        self.size = size
        self._order = dict(order)
        self._since, self._until = order["since"], order["until"]
        self._shares = Shares(order["weights"])

    def __len__(self) -> int:
        return self.size

    def source(self, index: int) -> tuple[int, int]:
        """(number of the data set, number of its sample in this stage) of sample `index`."""
        if not self._since <= index < self.size:
            raise IndexError(f"train sample {index} of {self._since} .. {self.size}")
        return self._shares.source(min(index, self._until - 1) - self._since)

    def _place(self, index: int) -> tuple[Stream, int, int]:
        number, draw = self.source(index)
        part = self.datasets[number]
        return part.stream, part.position(draw), part.length + 1

    def __getitem__(self, index: int) -> np.ndarray:
        stream, position, count = self._place(index)
        return stream.read(position, count)

    def order(self) -> dict[str, object]:
        """See `sample_lookup.Dataset`."""
        return self._order

    def prefixes(self) -> list[str]:
        """See `sample_lookup.Dataset`."""
        return [part.name for part in self.datasets]

    def spans_of(self, index: int) -> list[TokenSpan]:
        """See `sample_lookup.Dataset`."""
        stream, position, count = self._place(index)
        return list(stream.spans(position, count))

    def samples_showing(self, prefix: str, document: int) -> dict[int, int]:
        """See `sample_lookup.Dataset`; looks through the whole stage."""
        showing: dict[int, int] = {}
        for index in range(self._since, self._until):
            for span in self.spans_of(index):
                if (span.prefix, span.document) == (prefix, document):
                    showing[index] = showing.get(index, 0) + span.length
        return showing


@dataclass(frozen=True)
class Reading:
    """What a stage reads: of each data set the pair, its weight and fingerprint, and how many
    samples; and what the order of all of them depends on."""

    split: SplitFiles
    members: Sequence[Member]
    samples: Sequence[int]
    order: Mapping[str, Any]

    @property
    def starts(self) -> list[int]:
        """The token of each stream at which the stage begins."""
        taken = self.order["taken"]
        return [taken.get(name, 0) for name in self.order["sources"]]


class StagedSource:
    """Training samples of the stage that a run is in; validation and test as `source` has them."""

    def __init__(self, source: DataSource, config: Config, ends: Sequence[int]) -> None:
        t = config.training
        world_size = t.world_size if t.dry_run else launcher.world_size()
        batch = batch_schedule(config, max(1, world_size or 1))
        self._source = source
        self._ends = [batch.samples_before(end + 1) for end in (*ends, t.train_iters or 0)]

    def build(self, data: DataConfig, request: DataRequest, rows: list[Row]) -> Splits:
        """See `DataSource`."""
        size, valid, test = request.sizes
        reading = self.reading(data, request)
        rows += _rows(reading, request)
        others = replace(request, sizes=(0, valid, test), trains=False, before=None)
        _, valid_set, test_set = self._source.build(data, others, rows)
        streams = _streams(reading, data, request)
        parts = [
            Part(stream, start, samples, request.sequence_length, request.seed)
            for stream, start, samples in zip(streams, reading.starts, reading.samples, strict=True)
        ]
        return StagedDataset(parts, reading.order, int(size or 0)), valid_set, test_set

    def plan_rows(self, data: DataConfig, request: DataRequest) -> list[Row]:
        """See `DataSource`; training data as from the start of the stage on."""
        _, valid, test = request.sizes
        others = replace(request, sizes=(0, valid, test), trains=False)
        reading = self.reading(data, request)
        return [*_rows(reading, request), *self._source.plan_rows(data, others)]

    def reading(self, data: DataConfig, request: DataRequest) -> Reading:
        """What the stage reads, and from where on. Raises ValueError and FileNotFoundError for data
        that it cannot read."""
        before = request.before
        consumed = before.consumed if before else 0
        stage = next((n for n, end in enumerate(self._ends) if consumed < end), len(self._ends) - 1)
        since, until = ([0, *self._ends])[stage : stage + 2]
        (split,) = read_splits(data, (until - since, 0, 0))
        members, weights = _weights(split, request.sequence_length)
        sources = [
            f"{fingerprint([split.files[m.prefix]])}:{split.span(m.prefix).sequences.start}"
            f":{split.span(m.prefix).sequences.stop}"
            for m in members
        ]
        for number, name in enumerate(sources):
            if name in sources[:number]:
                raise ValueError(
                    f"--data-path: {members[number].prefix} has the tokens of "
                    f"{members[sources.index(name)].prefix}: give each data set once, with the "
                    "sum of the weights [stage-data-twice]"
                )
        order = {
            "kind": KIND,
            "compares": True,
            "data_order": data.data_order,
            "sequence_length": request.sequence_length,
            "seed": request.seed,
            "since": since,
            "until": until,
            "weights": weights,
            "sources": sources,
        }
        order["taken"] = _taken(order, before)
        samples = Shares(weights).counts(until - since)
        _refuse_unread(members, samples)
        return Reading(split, members, samples, order)


def _weights(split: SplitFiles, length: int) -> tuple[list[Member], list[int]]:
    """The pairs that a stage reads and their weights as whole numbers; without weights those of
    their tokens. Raises ValueError for weights whose sum is no number."""
    given = split.blend[1]
    if isinstance(given, EpochCounts):
        raise ValueError(
            "--data-path epochs: cannot be kept in stages, which end where the file or the flag "
            "says; give weights [blend-malformed]"
        )
    if given is not None and not math.isfinite(sum(given)):
        raise ValueError(
            f"--data-path: the sum of the weights {' '.join(map(str, given))[:200]} is too large; "
            "give smaller ones [blend-malformed]"
        )
    members = members_of(split.blend)
    tokens = [split.span(member.prefix).tokens for member in members]
    numbers = read_in(split.name, members, tokens, length)
    read = [members[n] for n in numbers]
    for n in numbers:
        if tokens[n] <= length:
            raise ValueError(
                f"{members[n].prefix}: its training part holds {tokens[n]} tokens, one sample of "
                f"--seq-length {length} needs {length + 1}; give more data (--split) or lower "
                "--seq-length [data-too-small]"
            )
    if given is None:
        return read, [tokens[n] for n in numbers]
    return read, whole_weights(weights_of(read, [split.files[m.prefix].tokens for m in read]))


def _taken(order: Mapping[str, Any], before: Before | None) -> dict[str, int]:
    """Tokens that each data set gave before the stage, by fingerprint. Raises ValueError for a
    checkpoint that is within a stage of another order."""
    if before is None:
        return {}
    saved = before.order
    if saved.get("kind") != KIND:
        if before.consumed != order["since"]:
            raise ValueError(
                f"--load: the checkpoint was trained without stages, and {before.consumed} samples "
                "are within one, whose order is another; go on from a checkpoint at the end of a "
                "stage, or start again [data-order-differs]"
            )
        return {}  # which the comparison of all data orders judges
    taken: dict[str, int] = dict(saved["taken"])
    if before.consumed == saved["until"] == order["since"]:
        samples = Shares(saved["weights"]).counts(saved["until"] - saved["since"])
        for name, count in zip(saved["sources"], samples, strict=True):
            taken[name] = taken.get(name, 0) + count * saved["sequence_length"]
        return taken
    now = {**order, "taken": taken, "compares": False}  # they are compared here
    if wrong := data_order_differences({"train": {**saved, "compares": False}}, {"train": now}):
        raise ValueError(
            f"--load: the checkpoint is within a stage, after {before.consumed} samples, and with "
            f"these flags the rest of it would repeat or lose samples: {'; '.join(wrong)}. Give "
            "the flags of that stage; what comes after it may change [data-order-differs]"
        )
    return taken


def _refuse_unread(members: Sequence[Member], samples: Sequence[int]) -> None:
    """Raise ValueError for what the user named and a stage does not read."""
    read = {m.number for m, count in zip(members, samples, strict=True) if count}
    for member in members:
        if member.number not in read:
            raise ValueError(
                f"--data-path: {member.word} has none of the {sum(samples)} samples of the stage "
                f"with its weight {member.weight}; raise it, or omit the data set "
                "[stage-data-unread]"
            )


def _streams(reading: Reading, data: DataConfig, request: DataRequest) -> list[Stream]:
    """The tokens of each data set, in the order of --data-order."""
    split = reading.split
    if data.data_order == "epoch":
        files = [split.files[member.prefix] for member in reading.members]
        if request.checked_vocab_size is not None:
            check_heads(files, request.checked_vocab_size)
        reader = TokenReader(files)
        return [Circle(reader, number, split.number) for number in range(len(files))]
    streams: list[Stream] = []
    for member, start, samples in zip(
        reading.members, reading.starts, reading.samples, strict=True
    ):
        span = split.span(member.prefix)
        stream = ShuffledDocuments(member.prefix, span, data, request)
        if request.indices:
            stream.prepare(start, start + samples * request.sequence_length)
        streams.append(stream)
    return streams


def _rows(reading: Reading, request: DataRequest) -> list[Row]:
    """The table of what a stage reads."""
    spans = [reading.split.span(member.prefix) for member in reading.members]
    return [
        Row("train", m.prefix, span.documents, span.tokens, count, request.sequence_length)
        for m, span, count in zip(reading.members, spans, reading.samples, strict=True)
    ]
