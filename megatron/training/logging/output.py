"""Output that may fail: a full disk or a closed pipe costs lines and one warning, never the run."""

import contextlib
import errno
import os
import stat
import sys
from typing import Any, TextIO

from megatron.interrupt import CheckedOutput
from megatron.small_files import make_directories

# With these a file cannot be made now, though its path is right.
_PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


def _warn(text: str) -> None:
    """Print a warning on stderr; where that fails too there is nowhere to report it."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"WARNING: {text}\n")
        sys.stderr.flush()


class OutputFile:
    """A file that grows by whole pieces: what cannot be written as a whole is lost, and the next
    piece is tried again.

    The first failure is a warning that begins with `flag` and the path.
    """

    def __init__(self, path: str, flag: str):
        """Opens it, in a new directory where there is none. Raises OSError for a path that cannot
        be written, but not where the disk is full or fails."""
        self._path = path
        self._flag = flag
        self._file: int | None = None
        self._warned = False
        try:
            self._open()
        except OSError as error:
            if error.errno not in _PASSING:
                raise OSError(
                    f"{flag} {path}: cannot be written ({error.strerror or error}); give another "
                    "path [path-not-writable]"
                ) from None
            self._failed(error)

    def write(self, chunk: str | bytes) -> None:
        """Append `chunk`, all of it or nothing."""
        data = chunk.encode("utf8") if isinstance(chunk, str) else chunk
        try:
            file = self._open() if self._file is None else self._file
            before = os.fstat(file)
            try:
                while data:
                    data = data[os.write(file, data) :]
            except OSError:
                if stat.S_ISREG(before.st_mode):
                    with contextlib.suppress(OSError):
                        os.ftruncate(file, before.st_size)
                raise
        except OSError as error:
            self._failed(error)

    def close(self) -> None:
        """No more will come."""
        file = self._file
        self._file = None
        if file is None:
            return
        try:
            os.close(file)
        except OSError as error:
            self._failed(error)

    def _open(self) -> int:
        make_directories(os.path.dirname(self._path) or ".")
        self._file = os.open(
            self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666
        )
        return self._file

    def _failed(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            _warn(
                f"{self._flag} {self._path}: cannot be written ({error.strerror or error}); "
                "training continues, and what cannot be written is lost"
            )


class OutputStream:
    """A text stream of this process whose failures are no errors; everything else is the stream's
    own.

    The first failure is a warning that begins with `name`; without a name there is none.
    """

    def __init__(self, stream: TextIO, name: str | None):
        self._stream = stream
        self._name = name

    def write(self, text: str) -> int:
        """Write `text`, or lose it."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._failed(error)
            return len(text)

    def flush(self) -> None:
        """Write what is in memory, or keep it for the next time."""
        try:
            self._stream.flush()
        except OSError as error:
            self._failed(error)

    def _failed(self, error: OSError) -> None:
        name = self._name
        self._name = None
        if name:
            _warn(
                f"{name}: cannot be written ({error.strerror or error}); training continues "
                "without its log lines"
            )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def tolerate_failing_streams() -> None:
    """From here on this process outlives a log on a full disk, and a reader of its output that ends
    first."""
    stream = sys.stdout.stream if isinstance(sys.stdout, CheckedOutput) else sys.stdout
    sys.stdout = OutputStream(stream, "log (stdout)")
    sys.stderr = OutputStream(sys.stderr, None)
