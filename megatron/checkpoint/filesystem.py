"""Every change that saving makes to the file system, one method each.

All writing goes through a `Disk`, so that a test (or a crash-consistency campaign) can count, fail
or kill any single step by overriding `Disk.step`, or record the steps by overriding the methods
themselves.
"""

import ctypes
import errno
import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from megatron.config.run_directory import CheckpointError, explained
from megatron.small_files import make_directories, retried

_CANNOT_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)
_CANNOT_RESERVE = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENODEV)
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


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

    def replace_file(self, path: Path, data: bytes) -> None:
        """Write a small file, durably and in one step in the place of an older one; its directory
        is made if it is missing."""
        self.make_root(path.parent)
        temporary = path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")
        try:
            self.write_file(temporary, data)
            self.rename(temporary, path)
        except CheckpointError:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        self.fsync_directory(path.parent)

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
