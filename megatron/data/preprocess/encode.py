"""Blocks of documents to token arrays, which are written to their place."""

from __future__ import annotations

import codecs
import functools
import gc
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from megatron.config.tokenizer import TokenizerConfig
from megatron.data.document_sources import BlockSources, Collector, fields_with_json
from megatron.data.preprocess import sentences
from megatron.data.preprocess.dataset_writer import optimal_dtype
from megatron.data.preprocess.jsonl import bounded_record_of, texts_of, texts_under
from megatron.data.preprocess.readers import RECORD_BYTES, FileBlock, too_long
from megatron.data.preprocess.trial import failure, try_first
from megatron.data.tokenizers.build import Tokenizer, tokenizer_from

TOGETHER = 1024  # arrays that the system writes in one call
LONGEST = np.iinfo(np.int32).max  # tokens of one sequence in the format


class Conversations(Protocol):
    """What reads conversations (--chat). Methods raise ValueError saying what is wrong."""

    identity: Sequence[str | None]  # equal ones make the same ids of a record
    columns: tuple[Sequence[str], Sequence[str]]  # needed, and read where they exist

    def document(self, record: object, is_row: bool) -> Any:
        """The conversation of a record of JSON, or of a row of parquet."""

    def encoder(self, tokenizer: Tokenizer) -> Callable[[Any], tuple[np.ndarray, int]]:
        """From a conversation to its ids with a loss mask, int32, and the UTF-8 bytes of it."""

    def described(self, paths: Sequence[str], dtype: np.dtype) -> dict[str, Any]:
        """What the .json of a pair says of it, whose ids are in these files."""


@dataclass(frozen=True)
class Job:
    """What to make of each document. `language`: of the sentences it is split into, None for not at
    all. `chat`: what reads documents that are conversations. `metadata_keys`: what is kept of each
    record, with its place in the input."""

    tokenizer: TokenizerConfig
    keys: tuple[str, ...]
    append_eod: bool = False
    allow_special_tokens: bool = False
    language: str | None = None
    keep_newlines: bool = False
    chat: Conversations | None = None
    metadata_keys: tuple[str, ...] = ()

    def dtype(self, tokenizer: Tokenizer) -> np.dtype:
        """Of the token ids in the .bin; a loss mask needs the sign."""
        return np.dtype(np.int32) if self.chat else optimal_dtype(tokenizer.vocab_size)

    @property
    def columns(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Of parquet files: those that are needed, and those that are read where they exist."""
        needed, optional = self.chat.columns if self.chat else (self.keys, ())
        extra = dict.fromkeys((*optional, *self.metadata_keys))
        return tuple(needed), tuple(key for key in extra if key not in needed)


class Encoded(NamedTuple):
    """What a block's ids are like; the ids wait where they were made.

    For each key: `lengths`, int32 [sequences]; `counts`, int32 [documents], how many sequences each
    document has; `text_bytes`, of the UTF-8 of the tokenized texts, special tokens not counted.
    `lines` and `bytes` of the block. `bad`: (line, 0 for the block's first; what is wrong).
    `empty`: documents without text. `sources`: where they came from, if that is kept.
    """

    lengths: list[np.ndarray]
    counts: list[np.ndarray]
    text_bytes: list[int]
    lines: int
    bytes: int
    bad: list[tuple[int, str]]
    blank: int
    empty: int
    sources: BlockSources | None = None

    @property
    def documents(self) -> int:
        """How many documents the block has."""
        return len(self.counts[0])

    @property
    def tokens(self) -> int:
        """How many ids the block has, of all keys."""
        return sum(int(lengths.sum(dtype=np.int64)) for lengths in self.lengths)

    def share(
        self, key: int, first: int, partition: int, partitions: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | slice]:
        """Of the key: lengths, counts and ids (as an index) of the documents whose number %
        `partitions` is `partition`.

        `first` is the number of the block's first document.
        """
        lengths = self.lengths[key]
        counts = self.counts[key]
        if partitions == 1:
            return lengths, counts, slice(None)
        documents = (first + np.arange(len(counts))) % partitions == partition
        sequences = np.repeat(documents, counts)
        return lengths[sequences], counts[documents], np.repeat(sequences, lengths)


class Order(NamedTuple):
    """Write the ids of block `number`: `first` is its first document's number, `offsets` bytes for
    each key and part."""

    number: int
    first: int
    offsets: list[list[int]]


@functools.cache
def tokenizer_of(flags: TokenizerConfig) -> Tokenizer:
    """The tokenizer of these flags, made once in a process, ready to encode; a forked worker
    inherits it. Raises ValueError, also if it cannot encode anything."""
    gc.disable()  # nothing that is made here goes before the process does
    tokenizer = tokenizer_from(flags)
    if flags.tokenizer == "HuggingFaceTokenizer":  # its file says what is to be computed
        try_first(lambda: tokenizer.tokenize("0"), f"--tokenizer-model {flags.tokenizer_model}")
    tokenizer.tokenize("0")  # wakes an engine that is made at the first text
    gc.freeze()  # a worker that looked through it would get a copy of the memory
    gc.enable()
    return tokenizer


class Encoder:
    """Encodes blocks and keeps their ids until it is given where in `paths` (of each key and part)
    they go. `mark` says, meanwhile, at which record it is: number of the block, of the record from
    1 (0: at none), its bytes."""

    def __init__(self, job: Job, paths: Sequence[Sequence[str]], mark: memoryview[int]):
        self._job = job
        self._mark = mark
        self._tokenizer = tokenizer_of(job.tokenizer)
        self._dtype = job.dtype(self._tokenizer)
        self._end = np.asarray([self._tokenizer.eod], self._dtype) if job.append_eod else None
        self._chat = job.chat.encoder(self._tokenizer) if job.chat else None
        self._special = None
        if job.allow_special_tokens and not job.chat:
            self._special = re.compile(
                "(" + "|".join(map(re.escape, self._tokenizer.special)) + ")"
            )
        self._files = [[os.open(path, os.O_WRONLY) for path in files] for files in paths]
        self._pending: dict[int, tuple[Encoded, list[list[np.ndarray]]]] = {}

    def encode(self, block: FileBlock) -> Encoded:
        """Tokenize a block. A bad line is noted and skipped, also one at which the tokenizer fails;
        a blank one is counted."""
        keys = self._job.keys
        ids: list[list[np.ndarray]] = [[] for _ in keys]
        lengths: list[list[int]] = [[] for _ in keys]
        counts: list[list[int]] = [[] for _ in keys]
        text_bytes = [0 for _ in keys]
        bad = []
        blank = 0
        empty = 0
        lines = 0
        size = 0
        metadata_keys = self._job.metadata_keys
        collector = (
            Collector(metadata_keys, block.text_start(), block.kind == "rows")
            if metadata_keys
            else None
        )
        mark = self._mark
        mark[0] = block.number
        for texts_at, length in (
            conversations(block, self._job)
            if self._job.chat
            else records(block, keys, metadata_keys)
        ):
            lines += 1
            size += length
            mark[2] = length
            mark[1] = lines
            try:
                texts = texts_at()
                del texts_at
                if texts is None:
                    blank += 1
                    continue
                fields = texts.pop() if collector else []
                documents = [self._encode_document(texts.pop(0)) for _ in keys]
            except ValueError as error:
                bad.append((lines - 1, str(error)))
                continue
            except BaseException as error:
                bad.append((lines - 1, f"the tokenizer fails ({failure(error)})"))
                continue
            if collector:
                collector.add(lines - 1, size - length, length, *fields)
            for key, (sequences, text_size) in enumerate(documents):
                text_bytes[key] += text_size
                counts[key].append(len(sequences))
                lengths[key] += map(len, sequences)
                ids[key] += sequences
                empty += not sequences
                if sequences and self._end is not None:
                    lengths[key][-1] += 1
                    ids[key].append(self._end)
        mark[1] = 0
        blank += not lines  # an empty file
        small = [
            [np.asarray(numbers, np.int32) for numbers in table] for table in (lengths, counts)
        ]
        encoded = Encoded(
            *(small[0], small[1], text_bytes, lines, size, bad, blank, empty),
            collector.collected() if collector else None,
        )
        self._pending[block.number] = (encoded, ids)
        return encoded

    def write(self, order: Order) -> None:
        """Write the ids of a block where the order says. Raises OSError."""
        encoded, ids = self._pending.pop(order.number)
        for key, offsets in enumerate(order.offsets):
            if len(offsets) == 1 or not ids[key]:
                _write_at(self._files[key][0], ids[key], offsets[0])
                continue
            flat = np.concatenate(ids[key])
            for partition, offset in enumerate(offsets):
                share = flat[encoded.share(key, order.first, partition, len(offsets))[2]]
                _write_at(self._files[key][partition], [share], offset)

    def close(self) -> None:
        """Close the files."""
        for file in [file for files in self._files for file in files]:
            os.close(file)

    def _encode_document(self, document: list[Any]) -> tuple[list[np.ndarray], int]:
        """The sequences of a document (its texts, or a conversation), and
        the UTF-8 bytes that texts or messages have."""
        if self._chat is None:
            return self._sequences(document)
        ids, size = self._chat(document)
        return [ids], size

    def _sequences(self, texts: list[str]) -> tuple[list[np.ndarray], int]:
        """The ids of each text of a document that has any, and the UTF-8 bytes that they stand
        for."""
        job = self._job
        tokenizer = self._tokenizer
        if job.language is not None:
            texts = [
                sentence
                for text in texts
                for sentence in sentences.split(text, job.language, job.keep_newlines)
            ]
        if self._special is None:
            encoded = tokenizer.tokenize_batch(texts, self._dtype)
            size = sum(map(_utf8_bytes, texts))
        else:
            split_texts = [self._special.split(text) for text in texts]
            encoded = [self._with_special(some) for some in split_texts]
            size = sum(_utf8_bytes(text) for some in split_texts for text in some[::2])
        if any(len(ids) >= LONGEST for ids in encoded):
            raise ValueError(
                f"one sequence of {LONGEST} tokens or more, which the format cannot hold; cut it "
                "in parts"
            )
        return [ids for ids in encoded if len(ids)], size

    def _with_special(self, texts: Sequence[str]) -> np.ndarray:
        """The ids of text and special tokens, which alternate."""
        names = self._tokenizer.special
        plain = self._tokenizer.tokenize_batch(texts[::2], self._dtype)
        ids = [np.asarray([names[name]], self._dtype) for name in texts[1::2]]
        return np.concatenate(
            [plain[0], *(array for pair in zip(ids, plain[1:], strict=True) for array in pair)]
        )


def _utf8_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8"))


def _write_at(file: int, arrays: Sequence[np.ndarray], offset: int) -> None:
    """Write arrays one after the other to a place in a file; they are not copied together first."""
    for first in range(0, len(arrays), TOGETHER):
        views = [array.data for array in arrays[first : first + TOGETHER]]
        written = os.pwritev(file, views, offset)
        size = sum(view.nbytes for view in views)
        # a disk filled up, or more than 2 GB
        unwritten = memoryview(b"".join(views))[written:] if written < size else b""
        while unwritten:
            unwritten = unwritten[os.pwrite(file, unwritten, offset + size - len(unwritten)) :]
        offset += size


def records(
    block: FileBlock, keys: Sequence[str], metadata_keys: Sequence[str] = ()
) -> Iterator[tuple[Callable[[], list[list[Any]] | None], int]]:
    """For each line or row what gives its texts under each key and what is kept of `metadata_keys`
    (None if it is blank; raises ValueError), and its bytes."""
    if block.kind == "long":
        yield too_long, block.end - block.start
        return
    if block.kind == "rows":
        for row in block.rows():
            size = sum(len(value) for value in row[: len(keys)] if isinstance(value, str))
            yield functools.partial(_row_texts, row, keys, metadata_keys), size
        return
    if block.kind == "text":
        data = block.content()
        if data:
            yield functools.partial(_plain_texts, data, metadata_keys), len(data)
        return
    read = (
        functools.partial(_line_texts, keys=keys, metadata_keys=metadata_keys)
        if block.kind == "jsonl"
        else functools.partial(_text_line, metadata_keys=metadata_keys)
    )
    yield from _lines(block, read)


def conversations(
    block: FileBlock, job: Job
) -> Iterator[tuple[Callable[[], list[Any] | None], int]]:
    """For each line or row what gives its conversation and what is kept of the metadata (None if
    it is blank; raises ValueError), and its bytes."""
    if block.kind == "long":
        yield too_long, block.end - block.start
        return
    if block.kind == "rows":
        names = [name for names in job.columns for name in names]
        for row in block.rows():
            record = dict(zip(names, row, strict=True))
            yield functools.partial(_conversation, record, job, True), len(str(row[0]))
        return
    yield from _lines(block, functools.partial(_line_conversation, job=job))


def _line_conversation(line: memoryview, job: Job) -> list[Any] | None:
    return None if _is_blank(line) else _conversation(bounded_record_of(line), job, False)


def _conversation(record: object, job: Job, is_row: bool) -> list[Any]:
    assert job.chat
    return [job.chat.document(record, is_row), *fields_with_json(record, job.metadata_keys)]


Line = TypeVar("Line")


def _lines(
    block: FileBlock, read: Callable[[memoryview], Line]
) -> Iterator[tuple[Callable[[], Line], int]]:
    """For each line of a block `read` of it, to be called, and its bytes."""
    data = block.content()
    start = 0
    end = data.find(b"\n")
    remaining = [memoryview(data)]  # views: a line is not copied
    while 0 <= end < len(data) - 1:
        yield functools.partial(read, remaining[0][start:end]), end + 1 - start
        start = end + 1
        end = data.find(b"\n", end + 1)
    if data:
        remaining[0] = remaining[0][start : end if end >= 0 else len(data)]
        size = len(remaining[0]) + 1
        # the last line alone holds it now, and goes when it is read: a document may be large
        del data
        yield functools.partial(read if size <= RECORD_BYTES else too_long, remaining.pop()), size


def _line_texts(
    line: memoryview, keys: Sequence[str], metadata_keys: Sequence[str]
) -> list[list[Any]] | None:
    return None if _is_blank(line) else texts_of(line, keys, metadata_keys)


def _is_blank(line: memoryview) -> bool:
    return not line or (line[0] <= 0x20 and bytes(line).isspace())


def _row_texts(
    row: Sequence[Any], keys: Sequence[str], metadata_keys: Sequence[str]
) -> list[list[Any]]:
    record = dict(zip(dict.fromkeys((*keys, *metadata_keys)), row, strict=True))
    return [*(texts_under(record, key) for key in keys), *fields_with_json(record, metadata_keys)]


def _text_line(line: memoryview, metadata_keys: Sequence[str]) -> list[list[Any]] | None:
    if _is_blank(line):
        return None
    return _plain_texts(bytes(line).removesuffix(b"\r"), metadata_keys)


def _plain_texts(data: bytes, metadata_keys: Sequence[str]) -> list[list[Any]]:
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ValueError("is UTF-16; convert the file first (iconv -f UTF-16 -t UTF-8)")
    try:
        return [[data.decode("utf-8")], *fields_with_json(None, metadata_keys)]
    except UnicodeDecodeError as error:
        raise ValueError(
            f"is not UTF-8 (byte {error.start + 1} is 0x{data[error.start]:02x})"
        ) from None
