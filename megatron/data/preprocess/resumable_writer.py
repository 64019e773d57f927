"""Pairs of files that grow under temporary names in a folder until they are complete, and survive a
kill.

PREFIX.unfinished/ holds, for each key and part, the ids and the numbers that the index is made of,
and two small files: job.json says of what the work is, state.json, with a checksum, how far it is
known to be on disk. Anything after that is truncated when the work resumes; work whose state is
damaged, or whose files are shorter than it says, begins again. Ids are written by others, at the
offsets that are given out here in the order of the documents.
"""

import contextlib
import errno
import fcntl
import io
import json
import os
import shutil
import stat
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from megatron import log
from megatron.data import document_sources
from megatron.data.document_sources import Trailer, sources_path
from megatron.data.indexed_dataset import bin_path, idx_path
from megatron.data.pair_checksums import describe_with_sums
from megatron.data.preprocess.dataset_writer import write_index
from megatron.data.preprocess.encode import Encoded, Order
from megatron.data.preprocess.readers import FileBlock, InputPosition
from megatron.data.tokenizers.metadata import json_path
from megatron.file_sums import table_sum
from megatron.small_files import fsync, make_directories, read_json, replace_text

# between two notes of how far the work is; the less it writes at a time, the shorter the wait at
# the end
SECONDS = 0.4
NUMBERS = 1 << 20  # numbers of an index that are made at a time
COPY = 1 << 30
SHOWN = 20  # bad records that are named on the screen; the side file has all
KINDS = ("bin", "lengths", "counts")


class BadRecords:
    """Counts bad lines against what is allowed."""

    def __init__(self, allowed: int, count: int = 0) -> None:
        self.count = count
        self._allowed = allowed

    def add(self, file: str, line: int, problem: str, after: int = 0) -> str:
        """What the side file says of it; raises ValueError if it is one too many. `line` is counted
        from byte `after` of the file on."""
        self.count += 1
        position = f"line {line} after byte {after}" if after else f"line {line}"
        if self.count > self._allowed:
            raise ValueError(
                f"{file}, {position}: {problem}; fix it, or skip bad records with "
                f"--max-bad-records (now {self._allowed}) [bad-record]"
            )
        if self.count <= SHOWN:
            suffix = "; further ones only in the side file" if self.count == SHOWN else ""
            print(f"skipped {file}, {position}: {problem}{suffix}", file=sys.stderr, flush=True)
        start = {"after_byte": after} if after else {}
        note = {"file": file, **start, "line": line, "what": problem}
        return json.dumps(note, ensure_ascii=False) + "\n"


class Busy(Exception):
    """Another process works in the folder."""


def is_finishing(prefix: str) -> bool:
    """Has an earlier run of this prefix written everything, so that only names were left to be
    given?"""
    try:
        return bool(_read_summed(f"{prefix}.unfinished/state.json")["finishing"])
    except (OSError, ValueError, KeyError):
        return False


def _read_summed(path: str) -> dict[str, Any]:
    """The table in a JSON file, without its checksum. Raises OSError, and ValueError for a table
    that is damaged."""
    table = read_json(path)
    if not isinstance(table, dict) or table.pop("checksum", None) != table_sum(table):
        raise ValueError(f"{path} is damaged")
    return table


class Unfinished:
    """The work on the pairs PREFIX_KEY_LEVEL. Raises Busy and OSError.

    `position`: where reading resumes. Counts, over all runs: `documents`, `blank` lines, `empty`
    texts, `tokens` and `text_bytes` for each key, `done` bytes of documents. `resumed`: whether
    there was something to resume; `in_file`: documents and tokens of the file at `position`, up to
    there; `discarded`: why it was not resumed. `finishing`:
    whether only names are left to be given. Work that is not `lasting` is removed however it ends.
    With `sources` it also writes where each document came from (`document_sources`); `having`: how
    many documents have each key.
    """

    def __init__(
        self,
        prefix: str,
        pairs: Sequence[str],
        dtype: np.dtype,
        partitions: int,
        job: dict[str, Any],
        lasting: bool = True,
        sources: Trailer | None = None,
    ):
        self.folder = f"{prefix}.unfinished"
        self.pairs = list(pairs)
        self.dtype = dtype
        self._partitions = partitions
        self.bad_path = f"{prefix}.bad_records.jsonl"
        self.position = InputPosition()
        self.discarded = ""
        self._noted = time.monotonic()
        self.documents = self.blank = self.empty = self.bad = self.done = 0
        self.tokens = [0] * len(pairs)
        self.text_bytes = [0] * len(pairs)
        self.in_file = [0, 0]
        self._sizes = [[[0, 0, 0] for _ in range(partitions)] for _ in pairs]
        self._bad_size = 0
        self._sources = sources
        self._source_sizes = [0] * len(document_sources.KINDS if sources else ())
        self._source_files: list[io.BufferedWriter] = []
        self.having = [0] * len(sources.keys if sources else ())
        self.finishing = False
        self._lasting = lasting
        # lengths and counts, by key and part
        self._files: list[list[list[io.BufferedWriter]]] = []
        self._bad_file: io.BufferedWriter | None = None
        self._behind: dict[int, dict[str, Any]] = {}
        self._aside = ThreadPoolExecutor(1)  # notes are written while encoding continues
        self._noting: Future[None] | None = None
        make_directories(self.folder)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        self._lock = os.fdopen(os.open(f"{self.folder}/lock", flags, 0o666), "w")
        try:
            # ends with this process, whoever it has forked
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                self._lock.close()
                raise Busy(
                    f"another run writes in {self.folder}; wait for it, or choose another "
                    "--output-prefix [output-in-use]"
                ) from None
            log.warn_once(
                f"{self.folder}: this file system has no file locks ({error.strerror}), so nothing "
                "keeps a second run from writing there: start only one [no-file-locks]"
            )
        self.resumed = self._read_state(job)
        if not self.resumed:
            self._start(job)
        if not self.finishing:
            self._open()

    def paths(self) -> list[list[str]]:
        """Where ids go, for each key and part."""
        return [
            [self._path(key, partition, "bin") for partition in range(self._partitions)]
            for key in range(len(self.pairs))
        ]

    def first_line(self, block: FileBlock) -> int:
        """The number of the first line of a block, whose predecessors have their places; 0 if it is
        not known."""
        return self.position.line if self.position.file == block.file else 1

    def take(self, block: FileBlock, encoded: Encoded, bad: BadRecords) -> Order:
        """Give a block its places; its lengths and bad lines are put down. Raises ValueError for a
        bad line too many."""
        first_line = self.first_line(block)
        after = 0 if first_line else block.start
        lines = [
            bad.add(block.name, (first_line or 1) + line, problem, after)
            for line, problem in encoded.bad
        ]
        assert self._bad_file is not None
        self._bad_size += self._bad_file.write("".join(lines).encode(errors="backslashreplace"))
        offsets = []
        for key, partitions in enumerate(self._sizes):
            self.text_bytes[key] += encoded.text_bytes[key]
            offsets.append([sizes[0] for sizes in partitions])
            for partition, sizes in enumerate(partitions):
                lengths, counts, _ = encoded.share(key, self.documents, partition, self._partitions)
                tokens = int(lengths.sum(dtype=np.int64))
                self.tokens[key] += tokens
                sizes[0] += tokens * self.dtype.itemsize
                for kind, numbers in ((1, lengths), (2, counts)):
                    sizes[kind] += self._files[key][partition][kind - 1].write(numbers.tobytes())
        order = Order(block.number, self.documents, offsets)
        if encoded.sources is not None:
            sources = encoded.sources
            self.having = [n + more for n, more in zip(self.having, sources.having, strict=True)]
            start = self._source_sizes[-1]
            columns = sources.placed(block.file, first_line, self.documents, start)
            for number, column in enumerate(columns):
                self._source_sizes[number] += self._source_files[number].write(column)
        if block.file != self.position.file:
            self.in_file = [0, 0]
        self.in_file = [self.in_file[0] + encoded.documents, self.in_file[1] + encoded.tokens]
        self.documents += encoded.documents
        self.blank += encoded.blank
        self.empty += encoded.empty
        self.done += encoded.bytes
        self.bad = bad.count
        line = first_line + encoded.lines if first_line else 0
        self.position = InputPosition(block.file, max(block.end, 1), line)
        self._behind[block.number] = self._state()
        return order

    def confirm(self, block: FileBlock) -> None:
        """All ids up to this block are in their places: make that last, now and then."""
        state = self._behind.pop(block.number)
        if time.monotonic() - self._noted > SECONDS:
            if self._noting:
                if not self._noting.done():
                    return
                self._noting.result()  # raises what writing raised
            for file in self._open_files():
                file.flush()
            self._noting = self._aside.submit(self._make_last, state)
            self._noted = time.monotonic()

    def _make_last(self, state: dict[str, Any]) -> None:
        for path in [path for partitions in self.paths() for path in partitions]:
            fsync(path)
        for file in self._open_files():
            os.fsync(file.fileno())
        self._note(state)

    def finish(self, descriptions: Sequence[Mapping[str, Any]]) -> list[str]:  # noqa: C901
        """Make the pairs whole and give them their names; the files that were written.
        `descriptions`: what the .json of each pair says, without checksums."""
        self._aside.shutdown()
        if self._noting:
            self._noting.result()  # raises what writing raised
        for file in self._open_files():
            file.flush()
        if not self.finishing:
            for key, description in enumerate(descriptions):
                for kind in KINDS:
                    for partition in range(1, self._partitions):
                        _append(self._path(key, partition, kind), self._path(key, 0, kind))
                self._write_index(key)
                sources = self._path(key, 0, "sources") if self._sources else None
                if self._sources and sources:
                    document_sources.write(sources, self._sources, self._source_paths())
                text = describe_with_sums(
                    description,
                    self._path(key, 0, "bin"),
                    self._path(key, 0, "idx"),
                    sources_file=sources,
                )
                Path(self._path(key, 0, "json")).write_text(text, encoding="utf-8")
                for kind in ("bin", "idx", "json", *(["sources"] if sources else [])):
                    fsync(self._path(key, 0, kind))
            self.finishing = True
            self._note(self._state())
        for key, pair in enumerate(self.pairs):
            if os.path.exists(self._path(key, 0, "bin")):
                # The old index goes first: a reader meets the old pair, no index, or the new pair,
                # never a mixture.
                Path(idx_path(pair)).unlink(missing_ok=True)
            if not self._sources:  # of a pair that is replaced
                Path(sources_path(pair)).unlink(missing_ok=True)
            for kind, path in (
                ("bin", bin_path(pair)),
                ("sources", sources_path(pair)),
                ("json", json_path(pair)),
                ("idx", idx_path(pair)),
            ):
                # a run that was killed here had renamed it already
                with contextlib.suppress(FileNotFoundError):
                    os.replace(self._path(key, 0, kind), path)
        if not self._bad_size:
            Path(self.bad_path).unlink(missing_ok=True)
        elif os.path.exists(f"{self.folder}/bad"):
            os.replace(f"{self.folder}/bad", self.bad_path)
        fsync(os.path.dirname(self.folder) or ".")
        self._lasting = True
        # NFS keeps the open lock file, and may say at first that a file is busy
        for _ in range(2):
            shutil.rmtree(self.folder, ignore_errors=True)
        return [path for pair in self.pairs for path in (bin_path(pair), idx_path(pair))]

    def close(self) -> None:
        """Wait for the last note, close the files, and remove the folder if there is nothing in it
        to resume."""
        self._aside.shutdown()
        for file in self._open_files():
            # what is buffered may not fit on a full disk; the file is closed then too
            with contextlib.suppress(OSError):
                file.close()
        if os.path.exists(f"{self.folder}/lock") and not (self._lasting and self.can_resume):
            shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()
        with contextlib.suppress(OSError):  # that of a finished job, on NFS
            os.rmdir(self.folder)

    @property
    def can_resume(self) -> bool:
        """Whether there is something that a later run can resume."""
        return os.path.exists(f"{self.folder}/state.json")

    def _path(self, key: int, partition: int, kind: str) -> str:
        return f"{self.folder}/{key}.{partition}.{kind}"

    def _open_files(self) -> list[io.BufferedWriter]:
        numbers = [file for partitions in self._files for files in partitions for file in files]
        return [*filter(None, [self._bad_file]), *self._source_files, *numbers]

    def _source_paths(self) -> list[str]:
        return [f"{self.folder}/{kind}" for kind in document_sources.KINDS] if self._sources else []

    def _state(self) -> dict[str, Any]:
        return {
            "place": list(self.position),
            "documents": self.documents,
            "blank": self.blank,
            "empty": self.empty,
            "bad": self.bad,
            "done": self.done,
            "tokens": list(self.tokens),
            "in_file": list(self.in_file),
            "text_bytes": list(self.text_bytes),
            "bad_size": self._bad_size,
            "sizes": [[list(sizes) for sizes in partitions] for partitions in self._sizes],
            "kept_sizes": list(self._source_sizes),
            "having": list(self.having),
            "finishing": self.finishing,
        }

    def _note(self, state: dict[str, Any]) -> None:
        text = json.dumps({**state, "checksum": table_sum(state)})
        replace_text(f"{self.folder}/state.json", text)

    def _read_state(self, job: dict[str, Any]) -> bool:
        """Take up what a run before this one left; False if there is nothing to take up."""
        try:
            before = read_json(f"{self.folder}/job.json")
            state = _read_summed(f"{self.folder}/state.json")
            names = {**job, **before}
            differ = sorted(name for name in names if before.get(name) != job.get(name))
        except FileNotFoundError:
            return False
        except (OSError, ValueError, AttributeError, TypeError):
            self.discarded = "it is damaged"
            return False
        if differ:
            self.discarded = f"of another command: {', '.join(differ)} differed"
            return False
        if not state["finishing"] and not self._files_complete(state):
            self.discarded = "files are missing or too short"
            return False
        self.position = InputPosition(*state["place"])
        for name in ("documents", "blank", "empty", "bad", "done", "tokens", "text_bytes"):
            setattr(self, name, state[name])
        self.in_file = state.get("in_file", [0, 0])  # not kept by earlier versions
        self._sizes = state["sizes"]
        self._bad_size = state["bad_size"]
        if self._sources:
            self._source_sizes = state["kept_sizes"]
            self.having = state["having"]
        self.finishing = state["finishing"]
        return True

    def _files_complete(self, state: dict[str, Any]) -> bool:
        """Whether every file is a regular one and has the bytes that are known to be on disk."""
        expected = {f"{self.folder}/bad": state["bad_size"]} | {
            self._path(key, partition, kind): size
            for key, partitions in enumerate(state["sizes"])
            for partition, sizes in enumerate(partitions)
            for kind, size in zip(KINDS, sizes, strict=True)
        }
        if self._sources:
            expected |= zip(self._source_paths(), state["kept_sizes"], strict=True)
        try:
            status = {path: os.lstat(path) for path in expected}
        except OSError:
            return False
        return all(
            stat.S_ISREG(status[path].st_mode) and status[path].st_size >= size
            for path, size in expected.items()
        )

    def _start(self, job: dict[str, Any]) -> None:
        for name in set(os.listdir(self.folder)) - {"lock"}:
            os.unlink(f"{self.folder}/{name}")
        for path in [
            *self._source_paths(),
            *(path for partitions in self.paths() for path in partitions),
        ]:
            Path(path).touch()
        Path(f"{self.folder}/job.json").write_text(json.dumps(job), encoding="utf-8")

    def _open(self) -> None:
        """Open what is written here, and cut off what is not known to be on disk."""
        self._bad_file = open(f"{self.folder}/bad", "ab")  # noqa: SIM115 (closed in close)
        for path, size in zip(self._source_paths(), self._source_sizes, strict=True):
            self._source_files.append(open(path, "ab"))  # noqa: SIM115 (closed in close)
            os.truncate(path, size)
        for key, partitions in enumerate(self._sizes):
            self._files.append([])
            for partition, sizes in enumerate(partitions):
                self._files[key].append(
                    [open(self._path(key, partition, kind), "ab") for kind in KINDS[1:]]
                )
                for kind, size in zip(KINDS, sizes, strict=True):
                    os.truncate(self._path(key, partition, kind), size)
        os.truncate(f"{self.folder}/bad", self._bad_size)

    def _write_index(self, key: int) -> None:
        """The index of a pair out of its lengths and counts, a piece at a time."""
        lengths, counts = (self._path(key, 0, kind) for kind in KINDS[1:])
        sizes = os.path.getsize(lengths) // 4, os.path.getsize(counts) // 4
        path = self._path(key, 0, "idx")
        write_index(path, self.dtype, sizes, lambda: _numbers(lengths), _numbers(counts))


def _numbers(path: str) -> Iterator[np.ndarray]:
    with open(path, "rb") as file:
        while len(numbers := np.fromfile(file, np.int32, NUMBERS)):
            yield numbers


def _append(source: str, target: str) -> None:
    """Append a file to another; the system does it, where it can without reading."""
    with open(source, "rb", 0) as added, open(target, "r+b", 0) as grown:
        grown.seek(0, os.SEEK_END)
        copy = getattr(os, "copy_file_range", None)
        with contextlib.suppress(OSError):  # between some file systems it cannot
            while copy and copy(added.fileno(), grown.fileno(), COPY):
                pass
        shutil.copyfileobj(added, grown, 16 << 20)
