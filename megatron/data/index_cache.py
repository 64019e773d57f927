"""Keeps index arrays in files between runs, so that they are built once and shared through the page
cache.

An entry is written under temporary names and renamed, its description last, so concurrent builders
on one filesystem never show each other half an entry, and it is used only if its description equals
the wanted one to the letter and its arrays have the checksums that follow the description. No
pickle is read.
"""

import contextlib
import hashlib
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np

from megatron import log
from megatron.checksums import block_sums
from megatron.data.file_access import MappedArrays, alone, map_file
from megatron.data.index_arrays import IndexArrays
from megatron.file_sums import file_sum, sum_of_file
from megatron.small_files import make_directories, read_bytes

# between the description and the lines `NAME CHECKSUM` of its arrays
CHECKSUMS = "\nchecksums:\n"


def _with_checksums(description: str, sums: Mapping[str, str]) -> bytes:
    """The content of the file that completes an entry."""
    lines = "".join(f"{name} {checksum}\n" for name, checksum in sorted(sums.items()))
    return f"{description}{CHECKSUMS}{lines}".encode()


class IndexCache:
    """A directory of index arrays.

    With `flag` the user requested it (`--data-cache-path`) and an unwritable directory is a
    ValueError; without, the indices stay in memory and one line says so.
    """

    def __init__(self, folder: str, flag: str | None = None) -> None:
        self.folder = folder
        self.flag = flag

    @staticmethod
    def stem(kind: str, description: str) -> str:
        """`<md5 of the description>-<kind>`, what the names of all files of an entry begin with."""
        return f"{hashlib.md5(description.encode(), usedforsecurity=False).hexdigest()}-{kind}"

    def path(self, stem: str, name: str) -> str:
        """The file of one array of an entry."""
        return os.path.join(self.folder, f"{stem}-{name}.npy")

    def _description_path(self, stem: str) -> str:
        return os.path.join(self.folder, f"{stem}-description.txt")

    def load(self, kind: str, description: str, names: Iterable[str]) -> IndexArrays | None:
        """The arrays of an entry, mapped read-only, or None if it is missing or incomplete."""
        stem = self.stem(kind, description)
        try:
            text = read_bytes(self._description_path(stem))
            if not text.startswith((description + CHECKSUMS).encode()):
                return None  # of another index, or written before there were checksums
            files = {name: self.path(stem, name) for name in names}
            # before numpy parses their headers
            sums = {
                name: file_sum(block_sums(memoryview(map_file(path))))
                for name, path in files.items()
            }
            if text != _with_checksums(description, sums):
                raise ValueError("its arrays differ from their checksums")
            return MappedArrays(files)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, EOFError) as error:
            log.warn_once(
                f"{self.folder}: the cached {stem} cannot be used ({error}); it is built again"
            )
            return None

    def writable(self) -> bool:
        """Make the directory. False if that cannot be done (ValueError if the user requested
        it)."""
        try:
            make_directories(self.folder)
            if not os.access(self.folder, os.W_OK | os.X_OK):
                raise PermissionError(f"no permission to write to {self.folder}")
        except OSError as error:
            self._refuse(error)
            return False
        return True

    def store(self, kind: str, description: str, arrays: Mapping[str, np.ndarray]) -> IndexArrays:
        """Write an entry and return it as `load` does; the arrays themselves if it cannot be
        written."""
        stem = self.stem(kind, description)
        try:
            sums = {
                name: self._write_array(self.path(stem, name), array)
                for name, array in arrays.items()
            }
            text = _with_checksums(description, sums)
            self._write(self._description_path(stem), lambda file: file.write(text))
        except OSError as error:
            self._refuse(error)
            return IndexArrays(arrays)
        return self.load(kind, description, arrays) or IndexArrays(arrays)

    @contextlib.contextmanager
    def building(self, kind: str, description: str) -> Iterator[None]:
        """While one process builds an entry, others that want the same one wait here; then they
        find it. Without locks all build at once, which costs time and harms nothing."""
        with alone(os.path.join(self.folder, f"{self.stem(kind, description)}.lock")):
            yield

    def _refuse(self, error: OSError) -> None:
        if self.flag:
            raise ValueError(
                f"{self.flag} {self.folder}: cannot be written ({error.strerror or error}); give "
                "a writable directory with enough space [path-not-writable]"
            ) from error
        log.warn_once(
            f"{self.folder}: cannot be written ({error.strerror or error}), so the data indices "
            "are built in memory at every start; give a writable directory with --data-cache-path "
            "to keep them"
        )

    def _write_array(self, path: str, array: np.ndarray) -> str:
        """Write an array; the checksum of its file."""
        checksum = ""

        def write(file: BinaryIO) -> None:
            nonlocal checksum
            np.save(file, array, allow_pickle=False)
            file.flush()
            checksum = sum_of_file(file.name)

        self._write(path, write)
        return checksum

    @staticmethod
    def _write(path: str, write: Callable) -> None:
        partial = f"{path}.{uuid.uuid4().hex}.tmp"
        try:
            with open(partial, "xb") as file:
                write(file)
            os.replace(partial, path)
        finally:
            Path(partial).unlink(missing_ok=True)
