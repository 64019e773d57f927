"""The `.bin` / `.idx` pair of a tokenized corpus, or a set of parts in its place, read in pieces;
data/preprocess/dataset_writer.py writes it."""

from __future__ import annotations

import functools
import hashlib
import mmap
import os
import struct
import weakref
from bisect import bisect_right
from collections.abc import Callable, Sequence

import numpy as np

from megatron import log
from megatron.data import pair_checksums, token_bytes
from megatron.data.file_access import check_mapped, map_file
from megatron.data.parts import part_set
from megatron.data.parts.joined import Joined
from megatron.data.sample_lookup import TokenSpan, check_document

LOGGER = "megatron.core.datasets.indexed_dataset"
MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
# magic, version, dtype code, sequences, length of the document index
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
CODES = {np.dtype(name): code for code, name in DTYPES.items()}
BLOCK = 1 << 20  # entries looked at together, so that a check of a huge index needs little memory
PROBES = 16
PROBE_BYTES = 4096
MANY_BYTES = 64 << 20  # read together where all tokens are looked at
REMEDY = "copy the file again, or make the pair again with tools/preprocess_data.py"


def idx_path(prefix: str) -> str:
    """The path of the index file of `prefix`."""
    return f"{prefix}.idx"


def bin_path(prefix: str) -> str:
    """The path of the token file of `prefix`."""
    return f"{prefix}.bin"


def _damaged(path: str, problem: str) -> ValueError:
    return ValueError(f"{path}: {problem}; {REMEDY} [data-file-damaged]")


def _missing(prefix: str, path: str) -> FileNotFoundError:
    """A missing file, with the likeliest slip: a suffix typed, a key suffix forgotten, a blend of
    odd length."""
    hint = "make it with tools/preprocess_data.py"
    stem, suffix = os.path.splitext(prefix)
    if suffix in (".bin", ".idx"):
        hint = f"a data path is the prefix of the pair, without {suffix}: {stem}"
    elif os.path.exists(idx_path(f"{prefix}_text_document")):
        hint = f"did you mean {prefix}_text_document?"
    elif prefix.replace(".", "", 1).isdigit():
        hint = f"{prefix} looks like a weight: a weighted --data-path is pairs of weight and prefix"
    return FileNotFoundError(f"{path}: no such file; {hint} [data-not-found]")


class IndexedDataset:
    """A corpus of `len(self)` token sequences.

    The index is memory-mapped, and its size is looked at before each read; tokens are read by
    system calls, since those report a failing disk or a file cut short as errors, where mapped
    memory ends the process. Opening does constant-time checks only; `check` reads the whole index.
    Sources: Megatron-LM's format.

    Attributes: `sequence_lengths` int32 [S] in tokens, `sequence_pointers` int64 [S] in bytes,
    `document_indices` int64 [documents + 1] (sequence number each document starts at), `dtype`,
    `bin_bytes`, `path_prefix`. Raises FileNotFoundError or ValueError (file, what is wrong,
    remedy). A modes array behind the document index, as multimodal datasets have it, is ignored.
    """

    def __init__(self, path_prefix: str | os.PathLike[str], *, announce: bool = False) -> None:
        self.path_prefix = os.fspath(path_prefix)
        self.idx_file = idx_path(self.path_prefix)
        self.bin_file = bin_path(self.path_prefix)
        in_parts = part_set.is_set(self.path_prefix)
        for path in () if in_parts else (self.idx_file, self.bin_file):
            if not token_bytes.exists(path):
                raise _missing(self.path_prefix, path)
        if announce:
            log.info(LOGGER, f"Load the _IndexReader from {self.idx_file}")
        self._index: mmap.mmap | None = None  # of a pair
        self._check_index: Callable[[], None]  # raises ValueError if the index was cut short
        self._bytes_at: Callable[[int, int], bytes]  # of the .bin: first byte, how many
        self._probe: Callable[[Sequence[tuple[int, int]]], list[bytes]]  # the same of many places
        if in_parts:
            self._open_parts()
        else:
            self._open_pair()
        self._check_ends()
        if announce:
            for arrays in ("sequence lengths", "sequence pointers", "document indices"):
                log.info(LOGGER, f"\tExtract the {arrays}")
            log.info(LOGGER, f"> total number of sequences: {len(self)}")
            log.info(LOGGER, f"> total number of documents: {self.num_documents}")

    def _open_pair(self) -> None:
        mapped = map_file(self.idx_file)
        index = memoryview(mapped)
        self.dtype, sequences, entries = self._read_header(index)
        assert isinstance(mapped, mmap.mmap)  # else it would be empty, without a header
        self._index = mapped
        self._check_index = functools.partial(check_mapped, self.idx_file, mapped)
        self._read_arrays(index, sequences, entries)
        tokens = token_bytes.open_tokens(self.bin_file)
        weakref.finalize(self, tokens.close)
        self.bin_bytes = tokens.size
        self._bytes_at = tokens.read
        self._probe = tokens.probe

    def _open_parts(self) -> None:
        joined = Joined(self.path_prefix, IndexedDataset)
        weakref.finalize(self, joined.close)
        self.dtype = joined.dtype
        self._check_index = joined.arrays.check_files
        self.sequence_lengths = joined.arrays["sequence_lengths"]
        self.sequence_pointers = joined.arrays["sequence_pointers"]
        self.document_indices = joined.arrays["document_indices"]
        self.bin_bytes = joined.size
        self._bytes_at = joined.read
        self._probe = joined.probe

    def _read_header(self, index: memoryview) -> tuple[np.dtype, int, int]:
        if len(index) < HEADER.size:
            raise _damaged(
                self.idx_file, f"has {len(index)} bytes, its header alone needs {HEADER.size}"
            )
        magic, version, code, sequences, entries = HEADER.unpack_from(index)
        if magic != MAGIC:
            raise _damaged(
                self.idx_file, f"is not an index file (it begins with {magic!r}, not {MAGIC!r})"
            )
        if version != VERSION:
            raise _damaged(self.idx_file, f"has version {version}, this reader knows {VERSION}")
        if code not in DTYPES:
            raise _damaged(
                self.idx_file,
                f"has the unknown dtype code {code} (known: {', '.join(map(str, DTYPES))})",
            )
        expected = HEADER.size + 12 * sequences + 8 * entries
        if len(index) not in (expected, expected + sequences):
            state = "is cut short" if len(index) < expected else "is too long"
            raise _damaged(
                self.idx_file, f"{state}: {len(index)} bytes, its header requires {expected}"
            )
        return np.dtype(DTYPES[code]), sequences, entries

    def _read_arrays(self, index: memoryview, sequences: int, entries: int) -> None:
        offset = HEADER.size
        self.sequence_lengths = np.frombuffer(index, "<i4", count=sequences, offset=offset)
        self.sequence_pointers = np.frombuffer(
            index, "<i8", count=sequences, offset=offset + 4 * sequences
        )
        self.document_indices = np.frombuffer(
            index, "<i8", count=entries, offset=offset + 12 * sequences
        )

    def _check_ends(self) -> None:
        """What can be seen without reading the index: where the documents and the last sequence
        end."""
        documents = self.document_indices
        sequences = len(self)
        if len(documents) == 0 or documents[0] != 0 or documents[-1] != sequences:
            raise _damaged(
                self.idx_file,
                f"its document index does not run from 0 to its {sequences} sequences",
            )
        last = sequences - 1
        while last > max(0, sequences - 1024) and self.sequence_lengths[last] == 0:
            last -= 1
        end = self._end(last, last + 1)
        if end < self.bin_bytes:  # sequences may be in any order
            end = max(
                self._end(first, first + BLOCK) for first in range(0, max(1, sequences), BLOCK)
            )
        if end != self.bin_bytes:
            raise _damaged(
                self.bin_file,
                f"has {self.bin_bytes} bytes, its index requires {end}; one was cut short, or "
                "they are of two pairs",
            )

    def _end(self, first: int, stop: int) -> int:
        """The byte where the last token of sequences first .. stop ends; 0 without any."""
        lengths = self.sequence_lengths[first:stop].astype(np.int64)
        ends = self.sequence_pointers[first:stop] + lengths * self.dtype.itemsize
        return int(ends.max(initial=0, where=lengths != 0))

    @functools.cached_property
    def order_sha256(self) -> str:
        """The sha256 of the header and all lengths, which is all that the sample order is made of.
        Raises ValueError if the index differs from its recorded checksum."""
        if self._index is None:  # the parts were compared when they were joined
            head = (MAGIC, VERSION, CODES[self.dtype], len(self), len(self.document_indices))
            digest = hashlib.sha256(HEADER.pack(*head))
            digest.update(np.ascontiguousarray(self.sequence_lengths).data)
            return digest.hexdigest()
        index = memoryview(self._index)
        return pair_checksums.verify_index(self.path_prefix, index) or pair_checksums.order_sha256(
            index
        )

    def check(self) -> None:
        """Read the whole index and raise ValueError if it differs from its recorded checksum, if
        any sequence is outside the token file, or if sequences overlap."""
        _ = self.order_sha256
        size = self.dtype.itemsize
        contiguous = True
        end = 0
        for first in range(0, len(self), BLOCK):
            lengths = self.sequence_lengths[first : first + BLOCK].astype(np.int64)
            pointers = self.sequence_pointers[first : first + BLOCK]
            wrong = (lengths < 0) | (pointers < 0) | (pointers % size != 0)
            wrong |= pointers > self.bin_bytes - lengths * size
            if wrong.any():
                offset = int(wrong.argmax())
                subject = (
                    f"sequence {first + offset} ({lengths[offset]} tokens from byte "
                    f"{pointers[offset]})"
                )
                raise _damaged(
                    self.idx_file, f"{subject} is outside {self.bin_file} ({self.bin_bytes} bytes)"
                )
            ends = end + np.cumsum(lengths) * size
            contiguous &= bool((pointers + lengths * size == ends).all())
            end = int(ends[-1])
        if not contiguous:
            self._check_overlap()
        for first in range(0, len(self.document_indices) - 1, BLOCK):
            if (np.diff(self.document_indices[first : first + BLOCK + 1]) < 0).any():
                raise _damaged(self.idx_file, "its document index runs backwards")

    def _check_overlap(self) -> None:
        """Sequences that are not stored in their order must not overlap: raise ValueError."""
        order = np.argsort(self.sequence_pointers, kind="stable")
        order = order[self.sequence_lengths[order] > 0]
        starts = self.sequence_pointers[order]
        ends = starts + self.sequence_lengths[order].astype(np.int64) * self.dtype.itemsize
        wrong = starts[1:] < ends[:-1]
        if wrong.any():
            position = int(wrong.argmax())
            raise _damaged(
                self.idx_file,
                f"its pointers are not the running sum of its lengths: sequence "
                f"{order[position + 1]} begins at byte {starts[position + 1]}, inside sequence "
                f"{order[position]}",
            )
        used = int((ends - starts).sum())
        if used < self.bin_bytes:
            log.warn_once(
                f"{self.idx_file}: {self.bin_bytes - used} bytes of {self.bin_file} are in no "
                "sequence; if that is not meant, make the pair again with tools/preprocess_data.py"
            )

    def __len__(self) -> int:
        """The number of sequences."""
        return len(self.sequence_lengths)

    @property
    def num_documents(self) -> int:
        """The number of documents, empty ones included."""
        return len(self.document_indices) - 1

    def document_of(self, sequence: int) -> tuple[int, int]:
        """(the document that a sequence belongs to, tokens of that document before it)."""
        # numpy's would copy numbers at odd addresses
        document = bisect_right(self.document_indices, sequence) - 1
        return document, int(
            self.sequence_lengths[self.document_indices[document] : sequence].sum(dtype=np.int64)
        )

    def sequences_of(self, document: int) -> range:
        """The sequences of a document. Raises ValueError for a document that does not exist."""
        check_document(document, self.path_prefix, self.num_documents)
        return range(*self.document_indices[document : document + 2].tolist())

    def span(self, sequence: int, offset: int, length: int) -> TokenSpan:
        """Where tokens `offset .. offset + length` of a sequence are stored."""
        document, before = self.document_of(sequence)
        size = self.dtype.itemsize
        first = int(self.sequence_pointers[sequence]) + offset * size
        return TokenSpan(
            self.path_prefix, document, before + offset, length, first, first + length * size
        )

    def spans_between(self, first: int, end: int) -> list[TokenSpan]:
        """Tokens `first .. end` of the .bin, document by document; its sequences must be stored one
        after the other."""
        spans = []
        size = self.dtype.itemsize
        sequence = bisect_right(self.sequence_pointers, first * size) - 1
        while first < end:
            start = int(self.sequence_pointers[sequence]) // size
            stop = min(end, start + int(self.sequence_lengths[sequence]))
            if stop > first:
                spans.append(self.span(sequence, first - start, stop - first))
                first = stop
            sequence += 1
        return spans

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Tokens `offset .. offset + length` of sequence `index` (to its end without `length`),
        read-only.

        Raises IndexError for what the sequence does not have, ValueError where the file cannot give
        it.
        """
        if not 0 <= index < len(self.sequence_lengths):
            raise IndexError(f"{self.path_prefix}: sequence {index} of {len(self)}")
        self._check_index()
        available = int(self.sequence_lengths[index])
        if length is None:
            length = available - offset
        if offset < 0 or length < 0 or offset + length > available:
            raise IndexError(
                f"{self.path_prefix}: {length} tokens from {offset} of sequence {index}, which "
                f"has {available}"
            )
        start = int(self.sequence_pointers[index]) + offset * self.dtype.itemsize
        if start < 0 or start > self.bin_bytes - length * self.dtype.itemsize:
            raise _damaged(self.idx_file, f"sequence {index} is outside {self.bin_file}")
        return self._read(start, length)

    def _read(self, start: int, length: int) -> np.ndarray:
        """`length` tokens from byte `start` of the token file on."""
        return np.frombuffer(self._bytes_at(start, length * self.dtype.itemsize), self.dtype)

    def gather(self, sequences: np.ndarray, offset: int, end: int) -> np.ndarray:
        """Sequences one after the other, int64: of the first the tokens from `offset` on, of the
        last those before `end`.

        What one sample is made of, so it is read often: as few steps as do it.
        """
        self._check_index()
        size = self.dtype.itemsize
        starts = self.sequence_pointers[sequences].tolist()
        lengths = self.sequence_lengths[sequences].tolist()
        lengths[-1] = end
        starts[0] += offset * size
        lengths[0] -= offset
        chunks = []
        for start, length in zip(starts, lengths, strict=True):
            if start < 0 or length < 0 or start + length * size > self.bin_bytes:
                raise _damaged(
                    self.idx_file,
                    f"one of its sequences {sequences.tolist()} is outside {self.bin_file}",
                )
            chunks.append(self._bytes_at(start, length * size))
        return np.frombuffer(b"".join(chunks), self.dtype).astype(np.int64)

    def __getitem__(self, index: int) -> np.ndarray:
        """All tokens of one sequence, read-only."""
        return self.get(index)

    def id_range(self, limit: int | None = 1 << 18) -> tuple[int, int]:
        """(smallest, largest) token id among the first `limit` tokens of the file (None: all), (0,
        -1) without any."""
        size = self.dtype.itemsize
        end = self.bin_bytes // size if limit is None else min(limit, self.bin_bytes // size)
        if end == 0:
            return 0, -1
        step = MANY_BYTES // size
        blocks = (self._read(first * size, min(step, end - first)) for first in range(0, end, step))
        ranges = [(int(block.min()), int(block.max())) for block in blocks]
        return min(low for low, _ in ranges), max(high for _, high in ranges)

    @functools.cached_property
    def identity(self) -> dict[str, int | str]:
        """What distinguishes this corpus from another one, wherever its files are.

        `idx_sha256` is over the header and all lengths, which is all that the sample order is made
        of; `bin_sha256` is over a few pages of the token file, to distinguish corpora of equal
        lengths.
        """
        pages = hashlib.sha256()
        step = max(1, self.bin_bytes // PROBES // PROBE_BYTES) * PROBE_BYTES
        starts = range(0, self.bin_bytes, step)
        for page in self._probe([(n, min(PROBE_BYTES, self.bin_bytes - n)) for n in starts]):
            pages.update(page)
        return {
            "sequences": len(self),
            "dtype": self.dtype.name,
            "bin_bytes": self.bin_bytes,
            "idx_sha256": self.order_sha256,
            "bin_sha256": pages.hexdigest(),
        }

    def __reduce__(self) -> tuple[type[IndexedDataset], tuple[str]]:
        """Pickled as its path: a spawned data worker maps the files itself."""
        return IndexedDataset, (self.path_prefix,)

    @staticmethod
    def exists(path_prefix: str) -> bool:
        """Whether both files of the pair are there, or a set of parts."""
        if part_set.is_set(path_prefix):
            return True
        return os.path.exists(idx_path(path_prefix)) and token_bytes.exists(bin_path(path_prefix))
