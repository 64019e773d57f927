"""`--data-order epoch`: sample k of a corpus, and of a mix of corpora, as a pure function with no
index anywhere.

The tokens of a corpus, file after file, are read as a circle: unshuffled, sample j holds tokens j *
sequence_length to (j + 1) * sequence_length, the last one being only a label. Those that end in the
same round are an epoch and come in the order of a permutation keyed by seed and epoch. So nothing
is built or stored, no token is omitted between epochs, the cuts move from epoch to epoch, and the
order depends on the data, the seed and the sequence length alone: not on how long the run is. What
Megatron's order has and this one has not: documents of one sample are neighbours in the file.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate

import numpy as np

from megatron.data import sample_lookup as lookup
from megatron.data.epoch.permutation import Permutation
from megatron.data.epoch.proportional_draws import Shares
from megatron.data.epoch.token_files import fingerprint
from megatron.data.epoch.token_reader import TokenReader
from megatron.data.indexed_dataset import IndexedDataset

TokenRange = tuple[str, int, int]  # (prefix, token number in its .bin, tokens)


class EpochDataset:
    """Samples without end of one split (`split`: its number in `TokenFile.spans`) of token files:
    `ds[i]` is int64 [sequence_length + 1]. The files are those of `reader`, which data sets share,
    with these `numbers`; `name` is what messages call the data. Raises ValueError if they cannot
    fill one sample.
    """

    def __init__(
        self,
        name: str,
        reader: TokenReader,
        numbers: Sequence[int],
        split: int,
        *,
        sequence_length: int,
        seed: int,
        index_split: str,
    ) -> None:
        self.name = name
        self.sequence_length = sequence_length
        self.seed = seed
        self.index_split = index_split
        files = [reader.files[number] for number in numbers]
        self.reader = reader
        self._numbers = [number for number in numbers if reader.files[number].spans[split].tokens]
        spans = [reader.files[number].spans[split] for number in self._numbers]
        self.documents = sum(file.spans[split].documents for file in files)
        self._first = [span.first for span in spans]
        self._ends = [0, *accumulate(span.tokens for span in spans)]
        self.tokens = self._ends[-1]
        if self.tokens <= sequence_length:
            raise ValueError(
                f"{name}: its {index_split} part holds {self.tokens} tokens, one sample of "
                f"--seq-length {sequence_length} needs {sequence_length + 1}; give {index_split} "
                "more data (--split) or lower --seq-length [data-too-small]"
            )
        self.num_files = len(files)
        self.fingerprint = fingerprint(files)
        self._epoch = self._begin = -1
        self._order = Permutation(1)

    def samples(self, epochs: float = 1) -> int:
        """Whole samples in that many epochs."""
        return int(Fraction(str(epochs)) * self.tokens) // self.sequence_length

    def prefixes(self) -> list[str]:
        """Its token files that have a part in this split, in their order."""
        return [self.reader.files[number].prefix for number in self._numbers]

    def token_counts(self) -> dict[str, int]:
        """How many tokens of this split each of its token files has, by prefix."""
        ends = self._ends
        return {
            prefix: end - begin
            for prefix, begin, end in zip(self.prefixes(), ends, ends[1:], strict=False)
        }

    def position(self, index: int) -> int:
        """Which token of the corpus sample `index` begins with."""
        self._turn_to(index)
        return (self._begin + self._order[index - self._begin]) * self.sequence_length % self.tokens

    def _turn_to(self, index: int) -> None:
        """Set up the permutation of the epoch of sample `index`, shuffled or not."""
        length = self.sequence_length
        tokens = self.tokens
        # the round of its last token; before it come the samples that end in earlier rounds
        epoch = ((index + 1) * length - 1) // tokens
        if epoch != self._epoch:
            begin = epoch * tokens // length
            size = (epoch + 1) * tokens // length - begin
            self._epoch = epoch
            self._begin = begin
            self._order = Permutation(size, self.seed, epoch, tokens, self.index_split)

    def showing(self, prefix: str, first: int, end: int, samples: int) -> set[int]:
        """Of the first `samples` samples those that hold any of the tokens `first .. end` of
        `prefix`.bin."""
        numbers = set()
        length = self.sequence_length
        for number, file in enumerate(self._numbers):
            shift = self._ends[number] - self._first[number]
            low = max(first + shift, self._ends[number])
            high = min(end + shift, self._ends[number + 1])
            if self.reader.files[file].prefix != prefix or low >= high:
                continue
            for turn in range(0, samples * length + self.tokens + 1, self.tokens):
                for unshuffled in range(
                    max(0, -(-(low + turn) // length) - 1), (high - 1 + turn) // length + 1
                ):
                    self._turn_to(unshuffled)
                    numbers.add(self._begin + self._order.index(unshuffled - self._begin))
        return {sample for sample in numbers if sample < samples}

    def ranges_of(self, index: int) -> list[TokenRange]:
        """Where the tokens of sample `index` lie."""
        ranges = []
        position = self.position(index)
        missing = self.sequence_length + 1
        while missing:
            file = bisect_right(self._ends, position) - 1
            count = min(missing, self._ends[file + 1] - position)
            ranges.append(
                (
                    self.reader.files[self._numbers[file]].prefix,
                    self._first[file] + position - self._ends[file],
                    count,
                )
            )
            missing -= count
            position = (position + count) % self.tokens
        return ranges

    def __getitem__(self, index: int) -> np.ndarray:
        position = self.position(index)
        length = self.sequence_length + 1
        ends = self._ends
        file = bisect_right(ends, position) - 1
        start = self._first[file] + position - ends[file]
        if position + length <= ends[file + 1]:
            return self.reader.read(self._numbers[file], start, length).astype(np.int64)
        tokens = np.empty(length, np.int64)
        filled = 0
        while filled < length:
            file = bisect_right(ends, position) - 1
            start = self._first[file] + position - ends[file]
            count = min(length - filled, ends[file + 1] - position)
            tokens[filled : filled + count] = self.reader.read(self._numbers[file], start, count)
            filled += count
            position = (position + count) % self.tokens
        return tokens

    def order(self) -> dict[str, object]:
        """Everything the order of the samples depends on, in JSON types."""
        return {
            "kind": "EpochDataset",
            "corpus": {"files": self.num_files, "tokens": self.tokens, "sha256": self.fingerprint},
            "sequence_length": self.sequence_length,
            "seed": self.seed,
        }


class EpochBlend:
    """`len(self)` samples drawn from EpochDatasets in exact proportion to whole-number `weights`.

    A mix may begin at sample `since` of the run, after other mixes: `drawn_before` is then how many
    samples each data set gave before, by fingerprint (also of those it has no more), so that each
    resumes where it stopped.
    """

    def __init__(
        self,
        datasets: Sequence[EpochDataset],
        weights: Sequence[int],
        size: int,
        *,
        since: int = 0,
        drawn_before: dict[str, int] | None = None,
    ) -> None:
        assert len(datasets) == len(weights) > 0
        self.datasets = list(datasets)
        self.size = size
        self.since = since
        self.drawn_before = dict(drawn_before or {})
        self.shares = Shares(weights)
        self.index_split = self.datasets[0].index_split
        self._before = [self.drawn_before.get(dataset.fingerprint, 0) for dataset in self.datasets]

    def __len__(self) -> int:
        return self.size

    def source(self, index: int) -> tuple[int, int]:
        """(number of the data set, number of its sample) that sample `index` is."""
        if not self.since <= index < self.size:
            raise IndexError(f"{self.index_split} sample {index} of {self.since} .. {self.size}")
        dataset, draw = self.shares.source(index - self.since)
        return dataset, self._before[dataset] + draw

    def showing(self, prefix: str, first: int, end: int) -> list[int]:
        """The samples that hold any of the tokens `first .. end` of `prefix`.bin, in rising
        order."""
        numbers = []
        for number, (dataset, before) in enumerate(zip(self.datasets, self._before, strict=True)):
            draws = range(self.size - self.since)
            drawn = self.shares.counts(len(draws))[number]
            for sample in dataset.showing(prefix, first, end, before + drawn):
                if sample >= before:
                    count = sample - before + 1
                    numbers.append(
                        self.since
                        + bisect_left(draws, count, key=lambda n: self.shares.counts(n + 1)[number])
                    )  # noqa: B023
        return sorted(numbers)

    def ranges_of(self, index: int) -> list[TokenRange]:
        """Where the tokens of sample `index` lie: (prefix, token number in its .bin, tokens)."""
        dataset, sample = self.source(index)
        return self.datasets[dataset].ranges_of(sample)

    def __getitem__(self, index: int) -> np.ndarray:
        dataset, sample = self.source(index)
        return self.datasets[dataset][sample]

    def order(self) -> dict[str, object]:
        """Everything the order of the samples depends on, in JSON types."""
        return {
            "kind": "EpochBlend",
            "weights": self.shares.weights,
            "since": self.since,
            "taken": self.drawn_before,
            "datasets": [dataset.order() for dataset in self.datasets],
        }

    def prefixes(self) -> list[str]:
        """See `sample_lookup.Dataset`."""
        return list(
            dict.fromkeys(prefix for dataset in self.datasets for prefix in dataset.prefixes())
        )

    def spans_of(self, index: int) -> list[lookup.TokenSpan]:
        """See `sample_lookup.Dataset`."""
        return [
            token_span
            for prefix, first, count in self.ranges_of(index)
            for token_span in IndexedDataset(prefix).spans_between(first, first + count)
        ]

    def samples_showing(self, prefix: str, document: int) -> dict[int, int]:
        """See `sample_lookup.Dataset`."""
        corpus = IndexedDataset(prefix)
        sequences = corpus.sequences_of(document)
        if not sequences:
            return {}
        size = corpus.dtype.itemsize
        last = sequences[-1]
        first = int(corpus.sequence_pointers[sequences[0]]) // size
        end = int(corpus.sequence_pointers[last]) // size + int(corpus.sequence_lengths[last])
        return {
            sample: sum(
                max(0, min(position + count, end) - max(position, first))
                for name, position, count in self.ranges_of(sample)
                if name == prefix
            )
            for sample in self.showing(prefix, first, end)
        }
