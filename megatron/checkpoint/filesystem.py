"""Every change that saving makes to the file system, one method each, and `CheckpointError`.

All writing goes through a `Disk`, so that a test (or a crash-consistency campaign) can count, fail
or kill any single step by overriding `Disk.step`, or record the steps by overriding the methods
themselves.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron.small_files import UnsafeName, make_directories, path_inside, read_bytes, retried

MANIFEST = "manifest.json"  # in each whole checkpoint; checkpoint/manifest.py reads and writes it
FINAL = re.compile(r"iter_(\d{7,})")  # directory of a complete checkpoint
_REMEDIES = {
    errno.ENOSPC: "free space there or point --save at another disk; the previous checkpoint is "
    "untouched",
    errno.EDQUOT: "the quota is used up: free space or point --save elsewhere; the previous "
    "checkpoint is untouched",
    errno.EFBIG: "raise the file size limit (ulimit -f); the previous checkpoint is untouched",
    errno.EROFS: "the file system is read-only: remount it or point --save elsewhere",
    errno.EACCES: "give this user permission there or point --save elsewhere",
    errno.EPERM: "give this user permission there or point --save elsewhere",
    errno.ENOENT: "a part of the path does not exist or was removed: check it",
    errno.ENOTDIR: "a part of the path is a file: choose another directory",
    errno.EEXIST: "it exists already: move it away",
    errno.EIO: "the disk reports an input/output error: check it (dmesg) and point --save at "
    "another one",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.EBUSY: "another process has it open: end that one",
    errno.ESTALE: "another host removed or replaced it: start again",
}
_CANNOT_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)
_CANNOT_RESERVE = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENODEV)
_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EIO, errno.ENXIO)
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


class CheckpointError(Exception):
    """A checkpoint could not be written, found or trusted; the text names the path and says what to
    do.

    `errno` is the operating system's number where that was the cause, else None.
    """

    def __init__(self, text: str, number: int | None = None):
        super().__init__(text)
        self.errno = number

    @property
    def is_damage(self) -> bool:
        """Whether an older checkpoint would help: not if permissions or a limit of the process are
        the cause."""
        return self.errno is None or self.errno in _DAMAGE


class ForeignCheckpoint(CheckpointError):
    """A valid checkpoint that is not for this program or this run: loading an older one is not the
    remedy."""

    @property
    def is_damage(self) -> bool:
        """It is not damaged."""
        return False


@contextmanager
def explained(action: str, path: Path | str) -> Iterator[None]:
    """Turn an OSError of the body into a CheckpointError `cannot {action} {path}: reason;
    remedy`, and an UnsafeName into one with its text."""
    try:
        yield
    except UnsafeName as error:
        raise CheckpointError(str(error)) from None
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "check the path and the disk")
        raise CheckpointError(
            f"cannot {action} {path}: {error.strerror or error}; {remedy} [file-operation-failed]",
            error.errno,
        ) from error


def read_small_file(path: Path, limit: int = 1 << 30) -> bytes:
    """All bytes of a plain file of at most `limit` bytes; no pipe or device is waited for, no link
    out of its folder followed. Raises CheckpointError."""
    with explained("read", path):
        try:
            return read_bytes(path_inside(path.parent, path.name), limit)
        except OSError as error:
            # not a plain file, or too large
            if error.errno not in (errno.EINVAL, errno.EFBIG):
                raise
            raise CheckpointError(
                f"{path}: {error.strerror}; the checkpoint is damaged: use another one "
                "[checkpoint-damaged]"
            ) from error


def check_plain(descriptor: int, path: Path | str) -> None:
    """Raise CheckpointError for an open file that is a pipe, a device or a socket."""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise CheckpointError(
            f"{path} is not a plain file; the checkpoint is damaged: use another one "
            "[checkpoint-damaged]"
        )


class Disk:
    """The steps of a save. Each raises CheckpointError when the operating system refuses."""

    def step(self, action: str, path: Path) -> None:
        """Called before every change, with its verb and path; here nothing happens, a test may
        raise or kill."""

    def make_directory(self, path: Path) -> None:
        """Create `path`, whose parent exists."""
        with explained("create directory", path):
            self.step("mkdir", path)
            path.mkdir()

    def make_root(self, path: Path) -> None:
        """Create `path` and its missing parents, durably; nothing happens where it exists."""
        missing = []
        while not path.is_dir():
            missing.append(path)
            path = path.parent
        for directory in reversed(missing):
            with explained("create directory", directory):
                self.step("mkdir", directory)
                make_directories(directory)
            self.fsync_directory(directory.parent)

    def create(self, path: Path) -> int:
        """Create a new file for writing and return its descriptor; an existing one is an error."""
        with explained("create", path):
            self.step("create", path)
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def reserve(self, descriptor: int, path: Path, length: int) -> None:
        """Allocate `length` bytes in advance: a full disk is noticed early, and large writes get
        faster."""
        # Linux's own: glibc emulates posix_fallocate, where the file system has none (NFS before
        # 4.2), by a write into every 4 KiB
        function = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
        if not length or function is None:
            return
        function.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
        with explained(f"reserve {length} bytes for", path):
            self.step("reserve", path)
            while function(descriptor, 0, 0, length):
                number = ctypes.get_errno()
                if number in _CANNOT_RESERVE:
                    return
                if number != errno.EINTR:
                    raise OSError(number, os.strerror(number))

    def write(self, descriptor: int, path: Path, data: memoryview | bytes, offset: int) -> None:
        """Write all of `data` at byte `offset` and let the kernel start moving it to the disk.
        Thread-safe."""
        with explained("write", path):
            self.step("write", path)
            view = memoryview(data)
            start = offset
            while view:
                done = os.pwrite(descriptor, view, offset)
                view = view[done:]
                offset = offset + done
            if hasattr(os, "posix_fadvise") and offset - start >= 1 << 20:
                # Starts the write-back of these pages, so that the fsync at the end has little left
                # to do.
                os.posix_fadvise(descriptor, start, offset - start, os.POSIX_FADV_DONTNEED)

    def fsync(self, descriptor: int, path: Path) -> None:
        """Wait until the file's bytes are on the disk."""
        with explained("fsync", path):
            self.step("fsync", path)
            os.fsync(descriptor)

    def close(self, descriptor: int, path: Path) -> None:
        """Close the file (network file systems report late errors here)."""
        with explained("close", path):
            os.close(descriptor)

    def write_file(self, path: Path, data: bytes) -> None:
        """Write a new small file and fsync it."""
        descriptor = self.create(path)
        try:
            self.write(descriptor, path, data, 0)
            self.fsync(descriptor, path)
        finally:
            self.close(descriptor, path)

    def fsync_directory(self, path: Path) -> None:
        """Wait until the names in a directory are on the disk."""
        with explained("fsync directory", path):
            self.step("fsync_directory", path)
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Give `source` the name `target`, replacing a file of that name in one step."""
        with explained(f"rename {source} to", target):
            self.step("rename", source)
            os.replace(source, target)

    def exchange(self, first: Path, second: Path) -> bool:
        """Swap two names in one step (Linux renameat2); False where system or file system
        cannot."""
        function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
        if function is None:
            return False
        with explained(f"exchange {first} with", second):
            self.step("exchange", first)
            if (
                function(
                    _AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE
                )
                == 0
            ):
                return True
            number = ctypes.get_errno()
            if number in _CANNOT_EXCHANGE:
                return False
            raise OSError(number, os.strerror(number))

    def remove(self, path: Path) -> None:
        """Remove one file."""
        with explained("remove", path):
            self.step("remove", path)
            retried(path.unlink, errno.EBUSY)

    def remove_tree(self, path: Path) -> None:
        """Remove a directory of plain files; a missing name is no error."""
        with explained("remove", path):
            self.step("remove_tree", path)
            with suppress(FileNotFoundError):
                retried(lambda: shutil.rmtree(path), errno.EBUSY, errno.ENOTEMPTY)


DISK = Disk()


def entries(root: Path) -> Iterator[Path]:
    """What is in `root`, sorted; nothing when it is missing."""
    if root.is_dir():
        with explained("list", root):
            yield from sorted(root.iterdir())


def iterations(root: Path | str) -> list[int]:
    """Iterations of all complete checkpoints in `root`, ascending."""
    matches = [(path, FINAL.fullmatch(path.name)) for path in entries(Path(root))]
    return sorted(int(match[1]) for path, match in matches if match and (path / MANIFEST).is_file())
