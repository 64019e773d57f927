"""Token files as a start needs them: a few numbers of each index, read in a handful of small reads.

Whatever the number of documents, an index is not read: its pointers are running sums
already, and the first and the last say enough.
"""

import contextlib
import hashlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from megatron.data.blend.splits import split_range
from megatron.data.file_access import open_to_read, unreadable
from megatron.data.indexed_dataset import (
    DTYPES,
    HEADER,
    MAGIC,
    VERSION,
    IndexedDataset,
    bin_path,
    idx_path,
)
from megatron.data.parts import part_set
from megatron.data.parts.joined import Joined
from megatron.data.token_bytes import TokenBytes, exists, open_tokens

THREADS = 8  # that read indexes side by side: a cold start waits for the disk
BLOCK_BYTES = 16384  # of an index read at once
HEAD_BYTES = 4096  # of a .bin, hashed to distinguish data of equal sizes
Bounds = tuple[float, float] | None  # of a corpus, as `blended_dataset.parse_split` makes them


@dataclass(frozen=True)
class FileSpan:
    """One split's part of a token file: its sequences and documents, and where its tokens are in
    the .bin."""

    sequences: range
    documents: int
    first: int  # token number in the .bin
    tokens: int


@dataclass(frozen=True)
class TokenFile:
    """What a start knows of a pair; `spans` by the number of the split, of those requested."""

    prefix: str
    dtype: np.dtype
    sequences: int
    documents: int
    bin_bytes: int
    head: bytes
    spans: Mapping[int, FileSpan]

    @property
    def tokens(self) -> int:
        """All tokens of the file."""
        return self.bin_bytes // self.dtype.itemsize

    def fingerprint(self) -> bytes:
        """What distinguishes it from other data, in any directory: sizes and the first tokens."""
        return (
            repr((self.sequences, self.documents, self.dtype.name, self.bin_bytes)).encode()
            + self.head
        )


class ScatteredTokens(ValueError):
    """A good pair whose sequences do not lie one behind the other, or whose .bin holds more than
    them."""


def _odd(prefix: str, problem: str) -> ScatteredTokens:
    """The reader's own message if it finds fault with the pair, else `problem`."""
    IndexedDataset(prefix)
    return ScatteredTokens(
        f"{prefix}: {problem}; --data-order epoch reads tokens in place: write the pair again "
        "with tools/merge_datasets.py, or use --data-order megatron [data-not-contiguous]"
    )


class _Index:
    """An open .idx, of which a few numbers are read."""

    def __init__(self, prefix: str, file: int) -> None:
        self.prefix = prefix
        self._file = file
        self._blocks: dict[int, bytes] = {}
        header = os.pread(file, HEADER.size, 0)
        magic, version, code, sequences, entries = (
            HEADER.unpack(header) if len(header) == HEADER.size else (b"", 0, 0, 0, 0)
        )
        size = os.fstat(file).st_size
        expected = HEADER.size + 12 * sequences + 8 * entries
        if (
            magic != MAGIC
            or version != VERSION
            or code not in DTYPES
            or size not in (expected, expected + sequences)
        ):
            raise _odd(prefix, "its index has odd sizes")
        self._describe(np.dtype(DTYPES[code]), sequences, entries)

    def _describe(self, dtype: np.dtype, sequences: int, entries: int) -> None:
        self.dtype = dtype
        self.sequences = sequences
        self.documents = entries - 1
        if dtype.kind not in "iu":
            raise ValueError(
                f"{self.prefix}.idx: holds {dtype.name}, not token ids; preprocess text into it "
                "[data-not-token-ids]"
            )

    def _number(self, position: int, size: int) -> int:
        """The signed integer of `size` bytes at byte `at`. Read in blocks: numbers that are asked
        for are neighbours."""
        number, inside = divmod(position, BLOCK_BYTES)
        if inside + size > BLOCK_BYTES:
            return int.from_bytes(os.pread(self._file, size, position), "little", signed=True)
        block = self._blocks.get(number)
        if block is None:
            block = self._blocks[number] = os.pread(self._file, BLOCK_BYTES, number * BLOCK_BYTES)
        return int.from_bytes(block[inside : inside + size], "little", signed=True)

    def pointer(self, sequence: int) -> int:
        """The byte of the .bin where `sequence` starts."""
        return self._number(HEADER.size + 4 * self.sequences + 8 * sequence, 8)

    def start(self, document: int) -> int:
        """An entry of the document index: the sequence where `document` starts."""
        return self._number(HEADER.size + 12 * self.sequences + 8 * document, 8)

    def end(self, sequence: int) -> int:
        """The byte behind `sequence`."""
        return (
            self.pointer(sequence)
            + self._number(HEADER.size + 4 * sequence, 4) * self.dtype.itemsize
        )

    def cut(self, sequence: int) -> int:
        """The byte where `sequence` starts and the one before it ends."""
        if sequence == 0:
            return 0
        end = self.end(sequence - 1)
        if sequence < self.sequences and self.pointer(sequence) != end:
            raise _odd(self.prefix, f"its sequence {sequence} does not follow the one before")
        return end

    def documents_before(self, sequence: int) -> int:
        """How many documents begin before `sequence`."""
        if self.documents == self.sequences and self.start(sequence) == sequence:
            return sequence
        low = 0
        high = self.documents
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self.start(middle) < sequence else (low, middle)
        return low


class _SetIndex(_Index):
    """The same of a set of parts: its joined index, and its tokens."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.tokens = open_corpus(prefix)
        assert isinstance(self.tokens, Joined)
        arrays = self.tokens.arrays
        self._lengths = arrays["sequence_lengths"]
        self._pointers = arrays["sequence_pointers"]
        self._starts = arrays["document_indices"]
        self._describe(self.tokens.dtype, len(self._lengths), len(self._starts))

    def pointer(self, sequence: int) -> int:
        """See `_Index`."""
        return int(self._pointers[sequence])

    def start(self, document: int) -> int:
        """See `_Index`."""
        return int(self._starts[document])

    def end(self, sequence: int) -> int:
        """See `_Index`."""
        return self.pointer(sequence) + int(self._lengths[sequence]) * self.dtype.itemsize


def open_corpus(prefix: str) -> TokenBytes:
    """Open the tokens of a pair, or of a set of parts. Raises ValueError."""
    if part_set.is_set(prefix):
        return Joined(prefix, IndexedDataset)
    return open_tokens(bin_path(prefix))


def read_token_file(prefix: str, split_bounds: Sequence[Bounds]) -> TokenFile:
    """The numbers of one pair, or of a set of parts. Raises FileNotFoundError or ValueError as
    IndexedDataset does, and ValueError for sequences that do not lie one behind the other, as far
    as the ends of the parts show it."""
    if part_set.is_set(prefix):
        joined = _SetIndex(prefix)
        with contextlib.closing(joined.tokens) as tokens:
            return _token_file(joined, tokens, split_bounds)
    try:
        file = open_to_read(idx_path(prefix))
    except ValueError:
        IndexedDataset(prefix)  # has the message
        raise
    try:
        index = _Index(prefix, file)
        if not exists(bin_path(prefix)):
            raise _odd(prefix, "has no .bin")
        with contextlib.closing(open_tokens(bin_path(prefix))) as tokens:
            return _token_file(index, tokens, split_bounds)
    except OSError as error:
        if error.errno is None:  # has its own message
            raise
        raise unreadable(idx_path(prefix), error) from error
    finally:
        os.close(file)


def _token_file(index: _Index, tokens: TokenBytes, split_bounds: Sequence[Bounds]) -> TokenFile:
    prefix = index.prefix
    count = index.sequences
    head = tokens.read(0, min(HEAD_BYTES, tokens.size))
    ends = (index.start(0), index.start(index.documents)) if index.documents >= 0 else (1, 1)
    if ends != (0, count) or (count and index.pointer(0) != 0):
        raise _odd(prefix, "its first sequence does not begin the .bin")
    if index.cut(count) != tokens.size:
        raise _odd(prefix, f"its index ends at byte {index.cut(count)}, its .bin at {tokens.size}")
    spans = {n: _span(index, bounds) for n, bounds in enumerate(split_bounds) if bounds is not None}
    return TokenFile(prefix, index.dtype, count, index.documents, tokens.size, head, spans)


def _span(index: _Index, bounds: tuple[float, float]) -> FileSpan:
    sequences = split_range(bounds, index.sequences)
    size = index.dtype.itemsize
    first = index.cut(sequences.start)
    end = index.cut(sequences.stop)
    documents = index.documents_before(sequences.stop) - index.documents_before(sequences.start)
    return FileSpan(sequences, documents, first // size, (end - first) // size)


def read_token_files(prefixes: Sequence[str], split_bounds: Sequence[Bounds]) -> list[TokenFile]:
    """`read_token_file` of many, side by side; the first error in the order of `prefixes` is
    raised."""
    if len(prefixes) < 2 * THREADS:
        return [read_token_file(prefix, split_bounds) for prefix in prefixes]
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(lambda prefix: read_token_file(prefix, split_bounds), prefixes))


def fingerprint(files: Sequence[TokenFile]) -> str:
    """One sha256 of all files in their order."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.fingerprint())
    return digest.hexdigest()


def check_heads(files: Sequence[TokenFile], vocab_size: int) -> None:
    """The first ids of each file must be in the vocabulary. Raises ValueError with the file and its
    ids."""
    for file in files:
        head = np.frombuffer(file.head, file.dtype, len(file.head) // file.dtype.itemsize)
        if len(head) and (int(head.min()) < 0 or int(head.max()) >= vocab_size):
            raise ValueError(
                f"{file.prefix}.bin: holds token ids {head.min()} .. {head.max()}, the vocabulary "
                f"has {vocab_size}; give the tokenizer it was preprocessed with "
                "[token-id-out-of-range]"
            )
