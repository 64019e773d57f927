"""A file of an object store under a path of this machine: a note that says what it stands for."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from megatron.data.token_bytes import note_path
from megatron.small_files import UnsafeName, path_inside, read_json, safe_name

from .block_cache import ACCOUNT, FILES, BlockCache, StoredFile, block_cache, download


def write_note(path: str, stored: StoredFile, cache: str) -> None:
    """Have `path` stand for a file of a store, which is read through the cache in the directory
    `cache`. Raises OSError."""
    note = {
        "url": stored.url,
        "bytes": stored.size,
        "key": stored.key,
        "version": stored.version,
        "cache": os.path.relpath(cache, os.path.dirname(path)),
    }
    with open(note_path(path), "x", encoding="utf-8") as file:
        json.dump(note, file)


def recorded_size(path: str) -> int:
    """The size in bytes of the file that `path` stands for. Raises ValueError."""
    return _read(path)[0].size


def _read(path: str) -> tuple[StoredFile, str]:
    try:
        note = read_json(note_path(path))
        folder = os.path.normpath(os.path.join(os.path.dirname(path), note["cache"]))
        # what is below files/ of a directory that a run has made a cache: nowhere else is written
        files = os.path.join(folder, FILES)
        path_inside(files, os.path.relpath(path, files), below=True)
        os.stat(os.path.join(folder, ACCOUNT))
        key = safe_name(note["key"], note_path(path))
        return StoredFile(note["url"], note["bytes"], key, note["version"]), folder
    except UnsafeName:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{note_path(path)}: cannot be used ({type(error).__name__}: {error}); remove "
            f"{os.path.dirname(path)} [data-file-damaged]"
        ) from None


class RemoteTokens:
    """A .bin of an object store (`token_bytes.TokenBytes`)."""

    def __init__(self, path: str) -> None:
        self.stored, folder = _read(path)
        self.size = self.stored.size
        self._cache: BlockCache = block_cache(folder)

    def read(self, start: int, count: int) -> bytes:
        """See `TokenBytes`."""
        return self._cache.read(self.stored, start, count)

    def probe(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """See `TokenBytes`. Asked for side by side, and not in blocks."""
        with ThreadPoolExecutor(max(1, len(ranges))) as pool:
            return list(pool.map(lambda each: download(self.stored, *each), ranges))

    def close(self) -> None:
        """Nothing is open."""
