"""Lines of JSON to token arrays, in this process or in several, in the order of the lines, and into pairs of files.

Knows no flags but the tokenizer's.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import queue
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from megatron.data.indexed_dataset import IndexedDatasetBuilder, bin_path, idx_path, optimal_dtype
from megatron.data.jsonl import Chunk, texts_of
from megatron.data.tokenizer import Tokenizer, TokenizerFlags

AHEAD = 4  # chunks a worker may be ahead of the writer: bounds memory on inputs of any size


@dataclass(frozen=True)
class Job:
    """What to make of each line."""

    tokenizer: TokenizerFlags
    keys: tuple[str, ...]
    append_eod: bool


class Encoded(NamedTuple):
    """The documents of a chunk, small to send: arrays travel as bytes.

    For each key: `ids`, all tokens in the stored dtype; `lengths`, int32 [sequences]; `counts`, int32 [documents], how
    many sequences each document has. `sizes`: bytes of each document's line. `bad`: (line number, what is wrong).
    """

    ids: list[bytes]
    lengths: list[bytes]
    counts: list[bytes]
    sizes: list[int]
    bad: list[tuple[int, str]]
    blank: int

    def documents(self, key: int, dtype: np.dtype) -> Iterator[list[np.ndarray]]:
        """The token arrays of each document under the key of this number; none for a document without text."""
        ids, at = np.frombuffer(self.ids[key], dtype), 0
        lengths = iter(np.frombuffer(self.lengths[key], np.int32).tolist())
        for count in np.frombuffer(self.counts[key], np.int32).tolist():
            sequences = []
            for _ in range(count):
                length = next(lengths)
                sequences.append(ids[at : at + length])
                at += length
            yield sequences


@functools.cache
def tokenizer_of(flags: TokenizerFlags) -> Tokenizer:
    """The tokenizer of these flags, made once in a process, ready to encode; a forked worker inherits it."""
    tokenizer = flags.build()
    tokenizer.tokenize("0")  # wakes an engine that is made at the first text
    return tokenizer


def encode(job: Job, chunk: Chunk) -> Encoded:
    """Tokenize a chunk. A bad line is noted and skipped; a blank line is counted."""
    tokenizer = tokenizer_of(job.tokenizer)
    dtype = optimal_dtype(tokenizer.vocab_size)
    ids: list[list[np.ndarray]] = [[] for _ in job.keys]
    lengths: list[list[int]] = [[] for _ in job.keys]
    counts: list[list[int]] = [[] for _ in job.keys]
    sizes, bad, blank = [], [], 0
    end = np.asarray([tokenizer.eod], dtype) if job.append_eod else None
    for number, line in enumerate(chunk.lines, chunk.first):
        if line.isspace():
            blank += 1
            continue
        try:
            arrays = [_sequences(tokenizer, texts, dtype) for texts in texts_of(line, job.keys)]
        except ValueError as error:
            bad.append((number, str(error)))
            continue
        sizes.append(len(line))
        for key, sequences in enumerate(arrays):
            counts[key].append(len(sequences))
            lengths[key] += map(len, sequences)
            ids[key] += sequences
            if sequences and end is not None:
                lengths[key][-1] += 1
                ids[key].append(end)
    if not chunk.lines:
        bad.append((chunk.first, "the file is empty"))
    flat = [np.concatenate(arrays).tobytes() if arrays else b"" for arrays in ids]
    small = [[np.asarray(numbers, np.int32).tobytes() for numbers in table] for table in (lengths, counts)]
    return Encoded(flat, small[0], small[1], sizes, bad, blank)


def _sequences(tokenizer: Tokenizer, texts: list[str], dtype: np.dtype) -> list[np.ndarray]:
    return [sequence for sequence in tokenizer.tokenize_batch(texts, dtype) if len(sequence)]


def encode_all(job: Job, chunks: Iterable[Chunk], workers: int) -> Iterator[tuple[Chunk, Encoded]]:
    """Each chunk with what became of it, in order, by `workers` processes (1: by this one).

    Raises ValueError if a worker dies. However it is left, no worker outlives it.
    """
    if workers == 1:
        for chunk in chunks:
            yield chunk, encode(job, chunk)
        return
    forks = "fork" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("fork" if forks else None)
    idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
    waiting: deque[tuple[Chunk, Future[Encoded]]] = deque()
    team: list[_Worker] = []

    def work(chunk: Chunk) -> Encoded:
        worker = idle.get()
        try:
            return worker.encode(chunk)
        finally:
            idle.put(worker)

    with ThreadPoolExecutor(workers) as threads:
        try:
            for _ in range(workers):            # all of them before the first thread starts
                team.append(_Worker(context, job))
                idle.put(team[-1])
            for chunk in chunks:
                waiting.append((chunk, threads.submit(work, chunk)))
                if len(waiting) >= AHEAD * workers:
                    done, future = waiting.popleft()
                    yield done, future.result()
            while waiting:
                done, future = waiting.popleft()
                yield done, future.result()
        except WorkerDied:
            raise ValueError(
                f"--workers {workers}: a worker process was killed, most often for want of memory; use fewer workers"
            ) from None
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            for worker in team:
                worker.process.kill()


class WorkerDied(Exception):
    """A worker process is gone."""


class _Worker:
    """A process that encodes one chunk after the other.

    It has a pipe of its own, whose other end it alone holds: whenever it dies, within a message too, this side reads an end
    of file, and no lock is left behind.
    """

    def __init__(self, context: Any, job: Job):
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, job, os.getpid()), daemon=True)
        self.process.start()
        theirs.close()

    def encode(self, chunk: Chunk) -> Encoded:
        """What `encode` gives there. Raises what it raises, and WorkerDied."""
        try:
            self._pipe.send(chunk)
            found = self._pipe.recv()
        except (EOFError, OSError):
            raise WorkerDied from None
        if isinstance(found, Exception):
            raise found
        return found


def _serve(pipe: Connection, job: Job, parent: int) -> None:
    """The life of a worker: chunks in, what became of them out."""
    _serve_quietly(parent)
    while True:
        chunk = pipe.recv()
        try:
            found: Encoded | Exception = encode(job, chunk)
        except Exception as error:
            found = error
        pipe.send(found)


def _serve_quietly(parent: int) -> None:
    """In a worker: Ctrl-C is the parent's to answer, and a worker does not outlive a parent that was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()


def _leave_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


class Output:
    """The pairs that are written, one a key, aside until `finish`; partitions wait in a folder until `join`."""

    def __init__(self, prefix: str, job: Job, partitions: int, stack: contextlib.ExitStack) -> None:
        self.dtype = optimal_dtype(tokenizer_of(job.tokenizer).vocab_size)
        self.prefixes = [f"{prefix}_{key}_document" for key in job.keys]
        self.documents, self.tokens, self.empty = 0, [0] * len(job.keys), 0
        self._parts: list[list[str]] = [[] for _ in job.keys]
        if partitions > 1:
            where, name = os.path.split(prefix)
            folder = tempfile.mkdtemp(prefix=f"{name}.partitions-", dir=where or ".")
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            self._parts = [[f"{folder}/{key}_{part}" for part in range(1, partitions)] for key in range(len(job.keys))]
        self._builders = [
            [self._builder(path, stack) for path in (final, *parts)]
            for final, parts in zip(self.prefixes, self._parts, strict=True)
        ]

    def _builder(self, prefix: str, stack: contextlib.ExitStack) -> IndexedDatasetBuilder:
        builder = IndexedDatasetBuilder(prefix, self.dtype)
        stack.callback(builder.discard)
        return builder

    def add(self, encoded: Encoded) -> None:
        """Append the documents of a chunk, each to its partition."""
        for key, builders in enumerate(self._builders):
            for number, sequences in enumerate(encoded.documents(key, self.dtype), self.documents):
                builder = builders[number % len(builders)]
                for sequence in sequences:
                    builder.add_item(sequence)
                    self.tokens[key] += len(sequence)
                builder.end_document()
                self.empty += not sequences
        self.documents += len(encoded.sizes)

    def join(self) -> None:
        """Append the partitions to the first, in their order."""
        for builders, parts in zip(self._builders, self._parts, strict=True):
            for builder, part in zip(builders[1:], parts, strict=True):
                builder.finalize()
                builders[0].add_index(part)

    def finish(self) -> list[str]:
        """Give the pairs their names; the files that were written."""
        for builders in self._builders:
            builders[0].finalize()
        return [path for prefix in self.prefixes for path in (bin_path(prefix), idx_path(prefix))]


class BadRecords:
    """Counts bad lines against what is allowed."""

    def __init__(self, allowed: int) -> None:
        self.count = 0
        self._allowed = allowed

    def add(self, chunk: Chunk, encoded: Encoded) -> None:
        """Name each bad line; raises ValueError at the first one too many."""
        for number, what in encoded.bad:
            self.count += 1
            place = f"{chunk.file}, line {number}: {what}"
            if self.count > self._allowed:
                raise ValueError(f"{place}; mend it, or skip bad records with --max-bad-records (now {self._allowed})")
            print(f"skipped {place}", file=sys.stderr, flush=True)
