"""A Hugging Face folder in an object store: its small files are fetched, its tensors are read by
ranges, so that no file of weights comes to the disk."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron import object_stores
from megatron.checkpoint.safetensors_reader import SafetensorsFile

from ..links import ConversionError

if TYPE_CHECKING:
    from ...object_storage.run_directories import Remote

BLOCK_BYTES = 16 << 20  # that are asked for at once
THREADS = 4  # that fetch pieces of one tensor
AHEAD = 4 << 20  # bytes: of a shorter read so many are fetched, and kept for the reads after it


class RemoteFolder:
    """A folder in a store. `path` has a copy of its small files, `names` are all its files."""

    def __init__(self, remote: Remote, path: Path, names: list[str]):
        self.remote = remote
        self.path = path
        self.names = names
        self._first_facts: dict[str, Any] = {}
        self._ahead = "", 0, b""  # file, first byte, bytes

    def __str__(self) -> str:
        return self.remote.url

    def open(self, name: str) -> SafetensorsFile:
        """One of its files of weights. Raises ConversionError, CheckpointError."""
        if name not in self.names:
            raise ConversionError(f"{self}: there is no {name}, which its index names")
        return _Shard(self, name)

    def size(self, name: str) -> int:
        """Bytes of a file; what the store says of it now is compared by `check_unchanged`."""
        self._first_facts[name] = self._asked(self.remote.facts, name)
        return self._first_facts[name]["size"]

    def read(self, name: str, start: int, view: memoryview) -> None:
        """Fill `view` from byte `start` of a file on."""
        if len(view) < AHEAD:
            view[:] = self._read_short(name, start, len(view))
            return

        def fetch(low: int) -> None:
            section = view[low : low + BLOCK_BYTES]
            section[:] = self._asked(self.remote.read, name, start + low, len(section))

        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(fetch, range(0, len(view), BLOCK_BYTES)))

    def _read_short(self, name: str, start: int, length: int) -> bytes:
        file, first, data = self._ahead
        if file != name or not first <= start <= start + length <= first + len(data):
            first = start
            data = self._asked(
                self.remote.read, name, first, min(AHEAD, self._first_facts[name]["size"] - first)
            )
            self._ahead = name, first, data
        return data[start - first : start - first + length]

    def check_unchanged(self) -> None:
        """Raise ConversionError if a file is not the one that was opened."""
        for name, facts in self._first_facts.items():
            if self._asked(self.remote.facts, name) != facts:
                raise _changed(f"{self}/{name}")

    def _asked(self, ask: Callable[..., Any], name: str, *section: int) -> Any:
        try:
            return ask(name, *section)
        except FileNotFoundError:
            raise _changed(f"{self}/{name}") from None


def _changed(file: str) -> ConversionError:
    return ConversionError(
        f"{file}: was replaced or removed while it was read; start again when nothing writes there "
        "[object-store-changed]"
    )


class _Shard(SafetensorsFile):
    """A file of weights in a store."""

    def __init__(self, folder: RemoteFolder, name: str):
        self._folder = folder
        self._name = name
        super().__init__(f"{folder}/{name}")

    def _open(self) -> None:
        self.bytes = self._folder.size(self._name)

    def _read_at(self, view: memoryview, offset: int, key: str) -> None:
        self._folder.read(self._name, offset, view)

    def close(self) -> None:
        """Nothing is open."""


def remote_of(url: str) -> Remote:
    """The folder of a URL. Raises ValueError for one that cannot be used."""
    remote: Remote = object_stores.part("run_directories").Remote(url.rstrip("/"))
    return remote


@contextmanager
def opened(url: str, wanted: Callable[[str], bool]) -> Iterator[RemoteFolder]:
    """The folder of a URL with its `wanted` files on the disk. Errors name the URL, not the copies.
    Raises ValueError for a URL that cannot be used, CheckpointError where the store refuses."""
    remote = remote_of(url)
    names = remote.names()
    with tempfile.TemporaryDirectory() as scratch:
        for name in filter(wanted, names):
            remote.get(name, Path(scratch))
        try:
            yield RemoteFolder(remote, Path(scratch), names)
        except ConversionError as error:
            raise ConversionError(str(error).replace(scratch, remote.url)) from None
