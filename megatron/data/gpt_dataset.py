"""GPTDataset: sample k of a corpus as sequence_length + 1 tokens, in megatron-core's order."""

from __future__ import annotations

import json
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from megatron import host, log
from megatron.data.index_arrays import IndexArrays
from megatron.data.index_helpers import build_sample_index, document_index_dtype, shuffle
from megatron.data.sample_lookup import TokenSpan, check_document

if TYPE_CHECKING:
    from megatron.data.index_cache import IndexCache
    from megatron.data.plan_table import Row

LOGGER = "megatron.core.datasets.gpt_dataset"
CACHE_FORMAT = 1  # part of every cache key: raise it when the meaning of the cached arrays changes
INDEX_NAMES = ("document_index", "sample_index", "shuffle_index")
# a last epoch used less than this is shuffled on its own, so that it is not thinned out
SEPARATE_BELOW = 0.80
SAMPLE_BYTES = 12  # of a sample's start and place, while both are narrow


class TokenSequences(Protocol):
    """What a GPTDataset reads from: an IndexedDataset, or something that makes up its tokens."""

    path_prefix: str
    sequence_lengths: np.ndarray  # int32 [S]
    document_indices: np.ndarray  # [documents + 1]: the sequence at which each document begins

    @property
    def identity(self) -> dict[str, int | str]:
        """What distinguishes it from others, in any directory."""

    def __len__(self) -> int: ...

    def gather(self, sequences: np.ndarray, offset: int, end: int) -> np.ndarray:
        """Sequences one after the other, int64: of the first from token `offset` on, of the last
        those before `end`."""

    def check(self) -> None:
        """Raise ValueError if what `gather` would return is not what was written."""

    def sequences_of(self, document: int) -> range:
        """The sequences of a document. Raises ValueError for a document that does not exist."""

    def span(self, sequence: int, offset: int, length: int) -> TokenSpan:
        """Where tokens `offset .. offset + length` of a sequence are stored."""


@dataclass(frozen=True)
class EpochPlan:
    """How often a corpus is read for the requested samples, and which samples are shuffled
    together."""

    tokens_per_epoch: int
    num_epochs: int
    num_samples: int  # samples that exist: at least those requested
    separate_last_epoch: bool
    samples_before_last_epoch: int  # the first shuffle range ends here; num_samples unless separate


def plan_epochs(tokens_per_epoch: int, sequence_length: int, requested: int | None) -> EpochPlan:
    """Plan the epochs for `requested` samples of sequence_length + 1 tokens that overlap by one
    (None: one epoch).

    The last epoch is kept apart if fewer than int(0.8 * samples per epoch) of its samples are
    needed. Source: megatron-core's GPTDataset.
    """
    assert tokens_per_epoch > sequence_length > 0
    num_epochs = 1
    if requested is not None:
        num_epochs = max(1, -(-(requested * sequence_length + 1) // tokens_per_epoch))
    num_samples = (num_epochs * tokens_per_epoch - 1) // sequence_length
    separate = False
    before_last = num_samples
    if num_epochs > 1:
        without_last = ((num_epochs - 1) * tokens_per_epoch - 1) // sequence_length
        per_epoch = (tokens_per_epoch - 1) // sequence_length
        assert requested is not None
        from_last = requested - without_last
        assert 0 <= from_last <= per_epoch + 1
        separate = from_last < int(SEPARATE_BELOW * per_epoch)
        before_last = without_last if separate else num_samples
    return EpochPlan(tokens_per_epoch, num_epochs, num_samples, separate, before_last)


def build_indices(
    lengths: np.ndarray, sequences: range, sequence_length: int, seed: int, plan: EpochPlan
) -> dict[str, np.ndarray]:
    """The three indices of one split, in megatron-core's order of random calls (documents first,
    then samples).

    `lengths` int32 [all sequences]; `sequences` are those of the split. Returns document_index
    int32 (int64 beyond 2**31 sequences) [epochs * sequences], sample_index [n + 1, 2],
    shuffle_index uint32 (int64 from 2**32 - 2 samples on) [n].
    """
    random = np.random.RandomState(seed)
    dtype = document_index_dtype(sequences.stop)
    nbytes = plan.num_epochs * len(sequences) * dtype.itemsize + plan.num_samples * SAMPLE_BYTES
    if nbytes > host.total_memory():
        raise ValueError(
            f"{plan.num_samples:,} samples: their index takes {nbytes / 2**30:,.0f} GiB, more than "
            "this host has; ask for less (--train-iters, --eval-iters), or --data-order epoch, "
            "which has none [not-enough-memory]"
        )
    epoch = np.arange(sequences.start, sequences.stop, dtype=dtype)
    repeats = [plan.num_epochs - 1, 1] if plan.separate_last_epoch else [plan.num_epochs]
    copies = [np.tile(epoch, n) for n in repeats]
    for entries in copies:
        shuffle(random, entries)
    document_index = np.concatenate(copies) if len(copies) > 1 else copies[0]
    sample_index = build_sample_index(lengths, document_index, sequence_length, plan.num_samples)
    wide = plan.num_samples >= np.iinfo(np.uint32).max - 1
    shuffle_index = np.arange(plan.num_samples, dtype=np.int64 if wide else np.uint32)
    shuffle(random, shuffle_index[: plan.samples_before_last_epoch])
    if plan.separate_last_epoch:
        shuffle(random, shuffle_index[plan.samples_before_last_epoch :])
    return {
        "document_index": document_index,
        "sample_index": sample_index,
        "shuffle_index": shuffle_index,
    }


def describe(
    class_name: str,
    path_prefix: str,
    num_samples: int | None,
    index_split: str,
    random_seed: int,
    sequence_length: int,
    split: str | None,
    split_matrix: list[tuple[float, float] | None] | None,
    **extra: object,
) -> dict[str, object]:
    """The keys Megatron of January 2024 hashes into its cache file names, in its order, then
    `extra`.

    Our own cache entries (`GPTDataset.description`) use these keys and three more: the format of
    the arrays, the range of sequences, and the sha256 of the .idx header and lengths. The arrays
    are a function of exactly that, so an entry cannot be stale, and since Megatron hashes no
    contents its entries and ours never meet under one name.
    """
    return {
        "class": class_name,
        "path_prefix": path_prefix,
        "num_samples": num_samples,
        "index_split": index_split,
        "random_seed": random_seed,
        "sequence_length": sequence_length,
        "split": split,
        "split_matrix": split_matrix,
        **extra,
    }


class GPTDataset:
    """Samples of one split of one corpus: `ds[i]` is int64 [sequence_length + 1], `len(ds)` what
    the epochs hold.

    `num_samples` is how many are needed at least (None: one epoch); `sequences` the corpus'
    sequences of this split; `split` and `split_matrix` only enter the cache key. `cache` None keeps
    the indices in memory; without `indices` there are none, and no sample can be read. Raises
    ValueError for a split that cannot fill one sample.
    """

    def __init__(
        self,
        corpus: TokenSequences,
        *,
        sequence_length: int,
        num_samples: int | None,
        seed: int,
        sequences: range | None = None,
        index_split: str = "train",
        split: str | None = None,
        split_matrix: list[tuple[float, float] | None] | None = None,
        cache: IndexCache | None = None,
        indices: bool = True,
    ) -> None:
        self.corpus = corpus
        self.sequence_length = sequence_length
        self.num_samples = num_samples
        self.seed = seed
        self.index_split = index_split
        self.sequences = range(len(corpus)) if sequences is None else sequences
        self._check_request(split)
        tokens = int(
            corpus.sequence_lengths[self.sequences.start : self.sequences.stop].sum(dtype=np.int64)
        )
        if tokens <= sequence_length:
            raise ValueError(
                f"{corpus.path_prefix}: its {len(self.sequences)} {index_split} sequences hold "
                f"{tokens} tokens, one sample of --seq-length {sequence_length} needs "
                f"{sequence_length + 1}; give {index_split} more data (--split) or lower "
                "--seq-length [data-too-small]"
            )
        self.plan = plan_epochs(tokens, sequence_length, num_samples)
        self.description = describe(
            type(self).__name__,
            corpus.path_prefix,
            num_samples,
            index_split,
            seed,
            sequence_length,
            split,
            split_matrix,
            format=CACHE_FORMAT,
            sequences=[self.sequences.start, self.sequences.stop],
            idx_sha256=corpus.identity["idx_sha256"],
        )
        self._indices = IndexArrays({})
        if indices:
            self._indices = self._load(cache) or self._build(cache)
        log.info(LOGGER, f"> total number of samples: {len(self)}")
        log.info(LOGGER, f"> total number of epochs: {self.plan.num_epochs}")

    def _check_request(self, split: str | None) -> None:
        name = self.index_split
        corpus = self.corpus
        if self.num_samples is not None and self.num_samples < 1:
            raise ValueError(
                f"the {name} dataset is to give {self.num_samples} samples; --train-iters, "
                "--train-samples, --eval-iters and --global-batch-size must make at least one "
                "[value-out-of-range]"
            )
        if self.sequence_length < 1:
            raise ValueError(
                f"--seq-length {self.sequence_length}: must be at least 1 [value-out-of-range]"
            )
        if not 0 <= self.seed < 1 << 32:
            raise ValueError(
                f"--seed {self.seed}: the data order needs a seed from 0 to 2**32 - 1 "
                "[value-out-of-range]"
            )
        if len(corpus) == 0:
            raise ValueError(
                f"{corpus.path_prefix}.idx: holds no sequences; preprocess a file that has text "
                "[data-too-small]"
            )
        if len(self.sequences) == 0:
            raise ValueError(
                f"--split {split}: gives {name} none of the {len(corpus)} sequences of "
                f"{corpus.path_prefix}; raise its share, set it to 0 to go without, or use more "
                "data [split-leaves-no-data]"
            )

    def _load(self, cache: IndexCache | None) -> IndexArrays | None:
        if cache is None:
            return None
        kind, description = self._cache_key()
        indices = cache.load(kind, description, INDEX_NAMES)
        if indices is None:
            return None
        shapes = [indices[name].shape for name in INDEX_NAMES]
        n = self.plan.num_samples
        if shapes != [(self.plan.num_epochs * len(self.sequences),), (n + 1, 2), (n,)]:
            log.warn_once(
                f"{cache.folder}: the cached {cache.stem(kind, description)} has odd shapes; it "
                "is rebuilt"
            )
            return None
        log.info(LOGGER, f"Load the {kind} {self.index_split} indices")
        for name in INDEX_NAMES:
            file = f"{cache.stem(kind, description)}-{name}.npy"
            log.info(LOGGER, f"\tLoad the {name.replace('_', ' ')} from {file}")
        return indices

    def _build(self, cache: IndexCache | None) -> IndexArrays:
        kind, description = self._cache_key()
        if cache is None or not cache.writable():
            log.info(LOGGER, f"Build the {kind} {self.index_split} indices")
            return IndexArrays(self._arrays())
        with cache.building(kind, description):
            indices = self._load(cache)  # by another process, while this one waited
            if indices is not None:
                return indices
            log.info(LOGGER, f"Build and save the {kind} {self.index_split} indices")
            arrays = self._arrays()
            for name in INDEX_NAMES:
                file = f"{cache.stem(kind, description)}-{name}.npy"
                log.info(LOGGER, f"\tBuild and save the {name.replace('_', ' ')} to {file}")
            return cache.store(kind, description, arrays)

    def _arrays(self) -> dict[str, np.ndarray]:
        self.corpus.check()
        return build_indices(
            self.corpus.sequence_lengths, self.sequences, self.sequence_length, self.seed, self.plan
        )

    def _cache_key(self) -> tuple[str, str]:
        return type(self).__name__, json.dumps(self.description, indent=4)

    @property
    def document_index(self) -> np.ndarray:
        """int32 [epochs * sequences]: the sequences in the order they are read."""
        return self._indices["document_index"]

    @property
    def sample_index(self) -> np.ndarray:
        """[n + 1, 2]: where each sample starts, as (place in document_index, token offset)."""
        return self._indices["sample_index"]

    @property
    def shuffle_index(self) -> np.ndarray:
        """[n]: the row of sample_index that sample i is."""
        return self._indices["shuffle_index"]

    @property
    def num_documents(self) -> int:
        """Documents that begin among the sequences of this split."""
        # numpy's own search would copy it where it is not aligned
        starts = self.corpus.document_indices
        first, stop = (
            bisect_left(starts, end, hi=len(starts) - 1)
            for end in (self.sequences.start, self.sequences.stop)
        )
        return stop - first

    def __len__(self) -> int:
        return self.plan.num_samples

    def _read(self, index: int) -> tuple[np.ndarray, int, int]:
        """(the sequences of sample `index`, where it begins in the first, where it ends in the
        last)."""
        if not 0 <= index < self.plan.num_samples:
            raise IndexError(f"{self.index_split} sample {index} of {len(self)}")
        indices = self._indices
        indices.check_files()
        row = indices["shuffle_index"][index]
        (first, offset), (last, end) = indices["sample_index"][row : row + 2].tolist()
        return indices["document_index"][first : last + 1], offset, end + 1

    def locate(self, index: int) -> list[tuple[int, int, int]]:
        """Where the tokens of sample `index` lie: pieces of (sequence in the .idx, token offset,
        length)."""
        documents, offset, end = self._read(index)
        lengths = self.corpus.sequence_lengths[documents].tolist()
        lengths[-1] = end
        lengths[0] -= offset
        starts = [offset] + [0] * (len(lengths) - 1)
        return [
            span for span in zip(documents.tolist(), starts, lengths, strict=True) if span[2] > 0
        ]

    def __getitem__(self, index: int) -> np.ndarray:
        """The tokens of sample `index`: int64 [sequence_length + 1]; tokens are [:-1], labels
        [1:]."""
        tokens = self.corpus.gather(*self._read(index))
        assert len(tokens) == self.sequence_length + 1
        return tokens

    def order(self) -> dict[str, object]:
        """Everything the order of this dataset's samples depends on, in JSON types; paths are not
        among it."""
        return {
            "kind": type(self).__name__,
            "corpus": self.corpus.identity,
            "sequences": [self.sequences.start, self.sequences.stop],
            "sequence_length": self.sequence_length,
            "seed": self.seed,
            "num_epochs": self.plan.num_epochs,
            "separate_last_epoch": self.plan.separate_last_epoch,
        }

    def prefixes(self) -> list[str]:
        """See `sample_lookup.Dataset`."""
        return [self.corpus.path_prefix]

    def spans_of(self, index: int) -> list[TokenSpan]:
        """See `sample_lookup.Dataset`."""
        return [self.corpus.span(*position) for position in self.locate(index)]

    def samples_showing(self, prefix: str, document: int) -> dict[int, int]:
        """See `sample_lookup.Dataset`."""
        if prefix != self.corpus.path_prefix:
            return {}
        sequences = self.corpus.sequences_of(document)
        counts = {
            sample: sum(n for sequence, _, n in self.locate(sample) if sequence in sequences)
            for sample in self._samples_near(sequences)
        }
        return {sample: count for sample, count in counts.items() if count}

    def _samples_near(self, sequences: range) -> list[int]:
        """The samples that may hold tokens of these sequences, in rising order: all that do, and a
        few more."""
        order = self.document_index
        starts = self.sample_index[:, 0]
        entries = np.flatnonzero((order >= sequences.start) & (order < sequences.stop))
        # Row r reaches from the place where it starts to that where row r + 1 does, whose first
        # token is its last label.
        first = np.maximum(np.searchsorted(starts, entries, side="left") - 1, 0)
        last = np.searchsorted(starts, entries, side="right") - 1
        near = np.zeros(len(starts), bool)
        for low, high in zip(first.tolist(), last.tolist(), strict=True):
            near[low : high + 1] = True
        return np.flatnonzero(near[self.shuffle_index]).tolist()

    def plan_rows(self, size: int | None) -> list[Row]:
        """The row of the data table if `size` samples (None: all) are read."""
        from megatron.data.plan_table import Row

        return [
            Row(
                self.index_split,
                self.corpus.path_prefix,
                self.num_documents,
                self.plan.tokens_per_epoch,
                len(self) if size is None else size,
                self.sequence_length,
            )
        ]


class MockSequences:
    """A corpus of 100000 sequences of 1 to 4095 tokens: 1, 2, 3, ... modulo the vocabulary,
    then EOD.

    Lengths are those of megatron-core's mock data. The next token is the last one plus one, so a
    model can learn it.
    """

    path_prefix = "--mock-data"
    SEED = 0
    SEQUENCES = 100_000
    LONGEST = 4096

    def __init__(self, vocab_size: int, eod: int) -> None:
        self.vocab_size = vocab_size
        self.eod = eod
        self.sequence_lengths = np.random.default_rng(self.SEED).integers(
            1, self.LONGEST, self.SEQUENCES, dtype=np.int32
        )
        self.document_indices = np.arange(self.SEQUENCES + 1)
        self.identity: dict[str, int | str] = {
            "sequences": self.SEQUENCES,
            "vocab_size": vocab_size,
            "eod": eod,
            "idx_sha256": "mock",
        }

    def __len__(self) -> int:
        return self.SEQUENCES

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Tokens `offset .. offset + length` of sequence `index`, int64."""
        available = int(self.sequence_lengths[index])
        stop = available if length is None else offset + length
        if not 0 <= offset <= stop <= available:
            raise IndexError(
                f"tokens {offset} .. {stop} of mock sequence {index}, which has {available}"
            )
        tokens = np.arange(offset + 1, stop + 1, dtype=np.int64) % self.vocab_size
        if stop == available and stop > offset:
            tokens[-1] = self.eod
        return tokens

    def gather(self, sequences: np.ndarray, offset: int, end: int) -> np.ndarray:
        """Sequences one after the other: of the first the tokens from `offset` on, of the last
        those before `end`."""
        following = len(sequences) - 1
        starts = [offset, *[0] * following]
        lengths = [*[None] * following, end - starts[-1]]
        return np.concatenate([*map(self.get, sequences.tolist(), starts, lengths)])

    def check(self) -> None:
        """Nothing can be damaged."""

    def sequences_of(self, document: int) -> range:
        """Each sequence is a document. Raises ValueError for a document that does not exist."""
        check_document(document, self.path_prefix, len(self))
        return range(document, document + 1)

    def span(self, sequence: int, offset: int, length: int) -> TokenSpan:
        """Tokens of a sequence, which no file holds."""
        return TokenSpan(self.path_prefix, sequence, offset, length, None, None)


class MockGPTDataset(GPTDataset):
    """GPTDataset over MockSequences: a pure function of (seed, index, split, vocabulary); needs no
    files."""

    def plan_rows(self, size: int | None) -> list[Row]:
        """No row: no file is read."""
        return []
