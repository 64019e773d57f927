"""The bytes of a .bin, on a disk or in an object store: opened here, whoever reads them."""

import os
from collections.abc import Sequence
from typing import Protocol

from megatron import object_stores
from megatron.data.file_access import open_to_read, read_at

NOTE = ".remote"  # what a file is called that stands for a .bin of an object store


class TokenBytes(Protocol):
    """An open .bin; `size` in bytes, as it was opened."""

    size: int

    def read(self, start: int, count: int) -> bytes:
        """`count` bytes from byte `start` on. Raises ValueError where they cannot be had."""

    def probe(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """As `read`, of a few bytes in many places, whose neighbours are not wanted."""

    def close(self) -> None:
        """It is not read again."""


class LocalTokens:
    """A .bin on a disk, read by system calls: those report a failing disk as an error."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file = open_to_read(path)
        self.size = os.fstat(self._file).st_size

    def read(self, start: int, count: int) -> bytes:
        """See `TokenBytes`."""
        return read_at(self._file, self._path, start, count)

    def probe(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """See `TokenBytes`."""
        return [self.read(*each) for each in ranges]

    def close(self) -> None:
        """See `TokenBytes`."""
        os.close(self._file)


def open_tokens(path: str) -> TokenBytes:
    """Open the .bin of this path. Raises ValueError."""
    if not _is_remote(path):
        return LocalTokens(path)
    tokens: TokenBytes = object_stores.part("remote_tokens").RemoteTokens(path)
    return tokens


def exists(path: str) -> bool:
    """Whether there is such a file, here or in an object store."""
    return os.path.exists(path) or _is_remote(path)


def size_of(path: str) -> int:
    """Its size in bytes. Raises OSError."""
    if not _is_remote(path):
        return os.stat(path).st_size
    size: int = object_stores.part("remote_tokens").recorded_size(path)
    return size


def note_path(path: str) -> str:
    """The note that stands for the file `path`."""
    return f"{path}{NOTE}"


def without_note(name: str) -> str:
    """The name of the file for which a file of this name stands: of any other, its own."""
    return name.removesuffix(NOTE)


def _is_remote(path: str) -> bool:
    return not os.path.exists(path) and os.path.exists(note_path(path))
