"""Blocks of files in object stores, in a directory of bounded size that the processes of a host
share.

    files/             copies of index files (`mirror`)
    account            bytes used, and the bound; locked by whoever changes what is there
    blocks/KEY/NUMBER  a block of one file, and behind it its checksum
    partial            the block that is being written, by the owner of that lock
    windows/*          of each process that reads ahead: the blocks that it still needs
    users              locked by every process that uses the directory

A block appears by a rename, so it is whole; what a power failure left of one is seen by its
checksum, which each process compares when it first reads it. The bytes used are counted before
they are written. Where there is no room, those blocks go whose stamp is oldest, but none of a
window: a block's stamp, its time of change, is when it was fetched or, by a process that reads
ahead, last found to be needed.

A scan of the directory takes many seconds for a million blocks, so a process keeps their order in
memory, and scans again, without the lock, when it has gone through it. Until then nothing new can
be older: blocks whose stamp has changed meanwhile are passed over.

A store is asked for the version of a file after each block of it, so that no block of another
content is kept or given.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import functools
import itertools
import multiprocessing
import os
import struct
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron.checksums import block_sum
from megatron.data.file_access import alone
from megatron.small_files import make_directories

from . import object_stores

# What a request brings in about the time that it waits for its first byte: smaller blocks come no
# sooner, and samples begin anywhere, so larger ones bring more that nobody reads.
BLOCK_BYTES = 1 << 20
SUM_BYTES = 8
FILES = "files"
ACCOUNT = "account"
NAME = 8  # hexadecimal digits of a block's name
PAGE = 4096  # of a disk, which a file fills
SPARE = 16  # one part of so many of the bound is freed at once, as windows are read each time,
MOST_FREED = 64 * BLOCK_BYTES  # but not more, because others wait meanwhile
LOOKS = 256  # blocks that are looked at while others wait: some 7 ms (docs/benchmarks.md)
ATTEMPT = 30.0  # seconds that one request may take
DEADLINE = 180.0  # seconds after which a store that fails is given up
LONGEST_PAUSE = 10.0
_ACCOUNT = struct.Struct("<qq")


@dataclass(frozen=True)
class StoredFile:
    """A file in an object store: its size in bytes, and a `key` that another content does not
    have; its `version` (`object_stores`)."""

    url: str
    size: int
    key: str
    version: str

    def blocks(self, start: int, count: int) -> range:
        """The numbers of the blocks in which so many bytes from `start` on are."""
        return range(start // BLOCK_BYTES, -(-(start + count) // BLOCK_BYTES))


class Counts(NamedTuple):
    """What the processes of a rank did: reads that found their block missing, the seconds they
    waited for it, and what was fetched, also ahead."""

    missed: float
    waited: float
    blocks: float
    bytes: float


class Needed(NamedTuple):
    """A block that a read needs."""

    stored: StoredFile
    number: int

    @property
    def name(self) -> str:
        """Its path below blocks/."""
        return f"{self.stored.key}/{self.number:0{NAME}x}"


class _Account:
    """The bytes used and the bound, while the directory is locked."""

    def __init__(self, file: int) -> None:
        self._file = file
        head = os.pread(file, _ACCOUNT.size, 0)
        self.used, self.bound = _ACCOUNT.unpack(head) if len(head) == _ACCOUNT.size else (0, 0)

    def write(self) -> None:
        os.pwrite(self._file, _ACCOUNT.pack(self.used, self.bound), 0)


def unusable(folder: str, error: OSError) -> ValueError:
    """A full or failing disk as the error of the flag."""
    return ValueError(
        f"--object-storage-cache-path {folder}: cannot be used ({error.strerror or error}); give a "
        "directory on a disk of this host with enough space [object-storage-cache-unusable]"
    )


def pauses(seconds: float) -> Iterator[float]:
    """Seconds between two tries, twice as long each time, until `seconds` have passed."""
    end = time.monotonic() + seconds
    pause = 0.2
    while time.monotonic() + pause < end:
        yield pause
        pause = min(2 * pause, LONGEST_PAUSE)


@functools.cache
def block_cache(folder: str) -> BlockCache:
    """The cache in this directory, of which a process has one."""
    return BlockCache(folder)


class BlockCache:
    """The blocks in `folder`. Processes that are forked share the counts. Raises ValueError for a
    directory that cannot be used."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        shared = multiprocessing.get_context("fork")
        self._counts = shared.RawArray(ctypes.c_double, len(Counts._fields))
        self._counting = shared.Lock()
        self._checked: dict[str, set[int]] = {}
        self._noted: dict[Needed, None] | None = None
        self._oldest: Iterator[tuple[int, str]] = iter(())  # (stamp, path) of blocks in order
        self._scans = 0
        self._scanning = threading.Lock()
        with self._explained():
            for name in ("", "blocks", "windows", FILES):
                make_directories(os.path.join(folder, name), mode=0o700)
                self._check_private(os.path.join(folder, name))
            self._users = os.open(os.path.join(folder, "users"), os.O_RDWR | os.O_CREAT, 0o666)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._users, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._tidy()  # nobody else is here
            fcntl.flock(self._users, fcntl.LOCK_SH)

    def _check_private(self, path: str) -> None:
        """Raise ValueError for a directory that another user may write into: a checksum does not
        show who made a block."""
        facts = os.stat(path)
        if facts.st_uid != os.geteuid():
            problem = f"{path} is the directory of another user (number {facts.st_uid})"
        elif facts.st_mode & 0o022:
            problem = f"{path} can be written to by other users; chmod 700 it, if all is yours"
        else:
            return
        raise ValueError(
            f"--object-storage-cache-path {self.folder}: {problem}, and who writes there chooses "
            "what is trained on; or give a directory that is not there yet "
            "[object-storage-cache-not-private]"
        )

    def set_bound(self, bound: int) -> None:
        """Keep the directory at so many bytes from now on, and remove what is beyond."""
        with self._explained(), self.locked() as account:
            account.bound = bound
            account.write()
        with self._explained(), self._room(0):
            pass

    def bound(self) -> int:
        """Bytes that the blocks may fill."""
        with self._explained(), self.locked() as account:
            return account.bound

    def counts(self) -> Counts:
        """So far."""
        return Counts(*self._counts[:])

    def read(self, stored: StoredFile, start: int, count: int) -> bytes:
        """`count` bytes of a file from byte `start` on. Raises ValueError where they cannot be
        had."""
        if self._noted is not None:
            self._noted.update((Needed(stored, n), None) for n in stored.blocks(start, count))
            return bytes(count)
        sections = []
        end = start + count
        for number in stored.blocks(start, count):
            first = number * BLOCK_BYTES
            inside = slice(max(start - first, 0), min(end - first, BLOCK_BYTES))
            section = self._cached(stored, number, inside)
            sections.append(self._missed(stored, number)[inside] if section is None else section)
        return sections[0] if len(sections) == 1 else b"".join(sections)

    def noted(self, read: Callable[[int], object], numbers: Sequence[int]) -> Sequence[Needed]:
        """The blocks that `read` needs for each of `numbers`; it is given zeros in their place."""
        self._noted = {}
        try:
            for number in numbers:
                read(number)
            return list(self._noted)
        finally:
            self._noted = None

    def announce(self, needed: Sequence[Needed], stamp: int) -> list[Needed]:
        """The blocks that are not there; those that are get this stamp. While the cache is
        locked."""
        missing = []
        for block in needed:
            try:
                os.utime(self._path(*block), ns=(stamp, stamp))
            except FileNotFoundError:
                missing.append(block)
        return missing

    def has_room(self, blocks: int) -> bool:
        """Whether so many blocks fit, after old ones were removed."""
        size = blocks * _on_disk(BLOCK_BYTES + SUM_BYTES)
        with self._explained(), self._room(size) as account:
            return account is not None

    def _path(self, stored: StoredFile, number: int) -> str:
        return os.path.join(self.folder, "blocks", Needed(stored, number).name)

    def _cached(self, stored: StoredFile, number: int, inside: slice) -> bytes | None:
        """Bytes of a block; None if it is not there, or damaged."""
        path = self._path(stored, number)
        checked = self._checked.setdefault(stored.key, set())
        size = inside.stop - inside.start
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if number in checked:
                    data = os.pread(file, size, inside.start)
                    return data if len(data) == size else None
                data = os.pread(file, BLOCK_BYTES + SUM_BYTES + 1, 0)
            finally:
                os.close(file)
        except FileNotFoundError:
            return None
        except OSError:
            data = b""
        block = data[:-SUM_BYTES]
        length = min(BLOCK_BYTES, stored.size - number * BLOCK_BYTES)
        if len(block) != length or block_sum(block).encode() != data[length:]:
            self._remove(path)
            return None
        checked.add(number)
        return block[inside]

    def _missed(self, stored: StoredFile, number: int) -> bytes:
        began = time.monotonic()
        block = self.fetch(stored, number, time.time_ns())[0]
        self._count(Counts(1, time.monotonic() - began, 0, 0))
        return block

    def fetch(self, stored: StoredFile, number: int, stamp: int) -> tuple[bytes, bool]:
        """A block, from the store unless another process fetched it meanwhile, and whether it is in
        the cache now: False if all that is there is needed. Raises ValueError."""
        path = self._path(stored, number)
        size = min(BLOCK_BYTES, stored.size - number * BLOCK_BYTES)
        with self._explained():
            os.makedirs(os.path.dirname(path), exist_ok=True)
        with alone(f"{path}.lock"):
            block = self._cached(stored, number, slice(0, size))
            if block is not None:
                return block, True
            block = download(stored, number * BLOCK_BYTES, size)
            with self._explained():
                cached = self._store(path, block + block_sum(block).encode(), stamp)
            self._count(Counts(0, 0.0, 1, size))
        return block, cached

    def _count(self, counts: Counts) -> None:
        with self._counting:
            for index, value in enumerate(counts):
                self._counts[index] += value

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise unusable(self.folder, error) from error

    @contextlib.contextmanager
    def locked(self) -> Iterator[_Account]:
        """The account, locked; a lock of its own each time, since forked processes share one."""
        file = os.open(
            os.path.join(self.folder, ACCOUNT), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666
        )
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield _Account(file)
        finally:
            os.close(file)

    def _store(self, path: str, data: bytes, stamp: int) -> bool:
        """Write a block where there is room for it: whether there is."""
        size = _on_disk(len(data))
        with self._room(size) as account:
            if account is None:
                return False
            account.used += size
            account.write()
            partial = os.path.join(self.folder, "partial")
            try:
                with open(partial, "wb", buffering=0) as file:  # also over what a killed one left
                    _write(file.fileno(), data)
                os.utime(partial, ns=(stamp, stamp))
                os.replace(partial, path)
            except OSError:
                account.used -= size
                account.write()
                with contextlib.suppress(OSError):
                    os.truncate(partial, 0)
                raise
            return True

    def _remove(self, path: str) -> None:
        with self._explained(), self.locked() as account:
            with contextlib.suppress(FileNotFoundError):
                account.used -= _on_disk(os.stat(path).st_size)
                os.unlink(path)
            account.write()

    @contextlib.contextmanager
    def _room(self, size: int) -> Iterator[_Account | None]:
        """The account, locked, after those blocks were removed that were needed longest ago so that
        `size` bytes fit; None if all that is there is needed."""
        scans = self._scans
        while True:
            with self.locked() as account:
                goes_on = self._make_room(account, size)
                if account.used + size <= account.bound:
                    yield account
                    return
            if goes_on:
                continue
            if self._scans != scans:
                yield None
                return
            self._scan(scans)

    def _make_room(self, account: _Account, size: int) -> bool:
        """Remove some blocks if there is no room for so many bytes; whether there are others to
        look at."""
        if account.used + size <= account.bound:
            return True
        spare = min(account.bound // SPARE, MOST_FREED)
        wanted = account.bound - max(size, spare)
        needed = self._needed()
        looked = 0
        for stamp, path in itertools.islice(self._oldest, LOOKS):
            looked += 1
            if path not in needed:
                account.used -= _unlinked(path, stamp)
            if account.used <= wanted:
                break
        account.write()
        return looked > 0

    def _scan(self, last_scan: int) -> None:
        """Bring the order up to date, unless another thread has done it since `last_scan`."""
        with self._scanning:
            if self._scans == last_scan:
                self._oldest = _in_order(self._blocks())
                self._scans += 1

    def _needed(self) -> set[str]:
        """The paths of the blocks in the windows of all processes that still are."""
        names: set[str] = set()
        for entry in os.scandir(os.path.join(self.folder, "windows")):
            file = os.open(entry.path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(entry.path)  # its process has ended
            except BlockingIOError:
                names.update(os.pread(file, os.fstat(file).st_size, 0).decode().splitlines())
            finally:
                os.close(file)
        return {os.path.join(self.folder, "blocks", name) for name in names}

    def _blocks(self) -> Iterator[tuple[int, int, str]]:
        """(stamp, bytes on the disk, path) of every block that is not removed meanwhile."""
        with os.scandir(os.path.join(self.folder, "blocks")) as folders:
            for folder in folders:
                with os.scandir(folder) as entries:
                    for entry in entries:
                        if len(entry.name) == NAME:
                            with contextlib.suppress(FileNotFoundError):
                                facts = entry.stat()
                                yield facts.st_mtime_ns, _on_disk(facts.st_size), entry.path

    def _tidy(self) -> None:
        """Count what is there."""
        with self.locked() as account:
            account.used = sum(size for _, size, _ in self._blocks())
            account.write()


class Window:
    """The blocks that this process still needs, until it ends."""

    def __init__(self, cache: BlockCache) -> None:
        path = os.path.join(cache.folder, "windows", uuid.uuid4().hex)
        with cache.locked():  # or it would seem to be of a process that has ended
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            fcntl.flock(self._file, fcntl.LOCK_EX)

    def hold(self, blocks: Iterable[Needed]) -> None:
        """Have these blocks, and no other, stay if they are there; while the cache is locked."""
        names = "".join(f"{name}\n" for name in {block.name for block in blocks}).encode()
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, names, 0)


def download(stored: StoredFile, start: int, size: int, check: bool = True) -> bytes:
    """Bytes of a file of a store, asked for until DEADLINE seconds have passed. Raises ValueError,
    also where the file is not what it was (unless the caller does not want that `check`)."""
    files = object_stores.client(stored.url)
    path = files._strip_protocol(stored.url)

    def is_another() -> bool:
        return check and object_stores.version_now(files, path, ATTEMPT) != stored.version

    def read() -> bytes | None:
        try:
            data = object_stores.read_range(files, path, start, size, ATTEMPT)
        except FileNotFoundError:
            raise
        except Exception:  # every store has errors of its own
            with contextlib.suppress(Exception):
                if is_another():  # now it is too short, say
                    return None
            raise
        return None if is_another() else data

    try:
        data = object_stores.patiently(read, pauses(DEADLINE))
    except FileNotFoundError:
        raise replaced(stored.url) from None
    except object_stores.StoreFailed as error:
        raise ValueError(f"{stored.url}: cannot be read, {error} [object-store-failed]") from error
    if data is None:
        raise replaced(stored.url)
    return data


def replaced(url: str) -> ValueError:
    """The error for a file that is not what it was when the run began."""
    return ValueError(
        f"{url}: was replaced or removed after this run had begun; put it back, then start again "
        "from the last checkpoint [object-store-changed]"
    )


def _in_order(blocks: Iterable[tuple[int, int, str]]) -> Iterator[tuple[int, str]]:
    """(stamp, path) of these blocks, the oldest first. All are gone through before this returns,
    into arrays: the paths of a million would take some hundred megabytes."""
    folders: dict[str, int] = {}
    table = array.array("q")
    for stamp, _, path in blocks:
        folder, name = os.path.split(path)
        table.extend((stamp, folders.setdefault(folder, len(folders)), int(name, 16)))
    rows = np.array(table, np.int64).reshape(-1, 3)
    order = np.argsort(rows[:, 0], kind="stable")
    paths = list(folders)

    def entry(row: int) -> tuple[int, str]:
        stamp, number_of_folder, number = rows[row].tolist()
        return stamp, os.path.join(paths[number_of_folder], f"{number:0{NAME}x}")

    return map(entry, order)


def _unlinked(path: str, stamp: int) -> int:
    """Remove a block unless it was needed again since; the bytes that this freed."""
    try:
        facts = os.stat(path)
        if facts.st_mtime_ns != stamp:
            return 0
        os.unlink(path)
    except FileNotFoundError:  # by another process
        return 0
    return _on_disk(facts.st_size)


def _on_disk(size: int) -> int:
    return -(-size // PAGE) * PAGE


def _write(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
