"""Files that are read for long and from many places: opened, mapped, and read with errors that name
file and remedy.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import resource
import stat
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from megatron.data.index_arrays import IndexArrays
from megatron.small_files import retried

REMEDIES = {
    errno.EIO: "its disk or network fails: copy the file to another disk, then start again from "
    "the last checkpoint",
    errno.ESTALE: "it was replaced on its file server: start again from the last checkpoint",
    errno.EMFILE: "more files are needed than ulimit -Hn allows: raise it, or merge data sets",
    errno.ENOMEM: "memory or maps are used up: raise vm.max_map_count, or merge data sets",
}


def unreadable(path: str, error: OSError) -> ValueError:
    """The error for a file that the system does not give."""
    number = error.errno or errno.EIO
    remedy = REMEDIES.get(number, "check its permissions")
    return ValueError(
        f"{path}: cannot be read ({os.strerror(number)}); {remedy} [file-not-readable]"
    )


def open_to_read(path: str) -> int:
    """A descriptor of a file. As many may be open as the system lets a process ask for, not only
    the customary 1024."""
    try:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        file = retried(lambda: os.open(path, flags), errno.ESTALE)
    except OSError as error:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if error.errno != errno.EMFILE or soft == hard:
            raise unreadable(path, error) from error
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return open_to_read(path)
    mode = os.fstat(file).st_mode
    if not stat.S_ISREG(mode):  # a pipe, to wait for; an endless device
        os.close(file)
        if stat.S_ISDIR(mode):
            raise unreadable(path, OSError(errno.EISDIR, ""))
        raise ValueError(
            f"{path}: is a pipe, a socket or a device; give a regular file [file-not-readable]"
        )
    return file


def map_file(path: str) -> mmap.mmap | bytes:
    """The bytes of a file, mapped read-only (an empty file cannot be mapped)."""
    file = open_to_read(path)
    try:
        return mmap.mmap(file, 0, access=mmap.ACCESS_READ) if os.fstat(file).st_size else b""
    except OSError as error:
        raise unreadable(path, error) from error
    finally:
        os.close(file)


def check_mapped(path: str, mapped: mmap.mmap) -> None:
    """Raise ValueError if a mapped file is shorter now: touching what it lost would end the process
    with SIGBUS."""
    size = mapped.size()
    if size < len(mapped):
        raise ValueError(_cut_short(path, size, len(mapped)))


def _cut_short(path: str, size: int, needed: int) -> str:
    return (
        f"{path}: was cut short while it is in use: it has {size} bytes, {needed} are needed; "
        "copy the file again, then start again from the last checkpoint [file-changed-while-read]"
    )


def read_at(file: int, path: str, start: int, count: int) -> bytes:
    """`count` bytes from byte `start` on of an open file; `path` is for messages. Raises ValueError
    if it has fewer."""
    try:
        data = os.pread(file, count, start)
        while len(data) < count:  # one call gives 2 GB at most
            block = os.pread(file, count - len(data), start + len(data))
            if not block:
                break
            data += block
    except OSError as error:
        raise unreadable(path, error) from error
    if len(data) < count:
        raise ValueError(_cut_short(path, os.fstat(file).st_size, start + count))
    return data


@contextlib.contextmanager
def alone(path: str) -> Iterator[None]:
    """Of the threads and processes that lock one `path`, which is made and removed, one is inside.

    The kernel lets go of the lock of a process that ends, however it ends. Where the filesystem has
    no locks, all are inside at once.
    """
    try:
        file = _locked(path)
    except OSError:
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)  # before it is let go: see _locked
        os.close(file)


def _locked(path: str) -> int:
    """An open file that this thread alone has locked, and that still is the one called `path`.
    Raises OSError."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.path.exists(path) and os.path.samestat(os.fstat(file), os.stat(path)):
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)  # its owner removed it while we waited


def map_array(path: str) -> np.ndarray:
    return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))


def _map_of(array: np.ndarray) -> mmap.mmap:
    """The memory map that contains an array."""
    base: Any = array.base
    while not isinstance(base, mmap.mmap):
        base = base.base
    return base


class MappedArrays(IndexArrays):
    """Index arrays of `files` by name. They are pickled as paths: a spawned data worker maps them
    itself."""

    def __init__(self, files: Mapping[str, str]) -> None:
        super().__init__({name: map_array(path) for name, path in files.items()})
        self._files = dict(files)
        self._maps = {path: _map_of(self._arrays[name]) for name, path in files.items()}

    def check_files(self) -> None:
        """See `IndexArrays`."""
        for path, mapped in self._maps.items():
            check_mapped(path, mapped)

    def __reduce__(self) -> tuple[type, tuple[dict[str, str]]]:
        return MappedArrays, (self._files,)
