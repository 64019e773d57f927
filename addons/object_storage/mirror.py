"""Data in an object store as data of this machine: index files are copied, and each .bin has a note
in its place. So whatever reads a pair or a set of parts reads these, but for the bytes of a .bin.

    CACHE/files/KEY/s3:bucket/path/X.idx, X.json and X.bin.remote

KEY is a hash of the names and versions of the files: where one changes in the store, all are copied
again by the next start, and a run that reads them ends with an error. Errors name the URLs
(`url_names`).
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import posixpath
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

from megatron import log
from megatron.config.checkpoint import is_url
from megatron.config.checks.data_paths import no_cache
from megatron.config.data import DataConfig
from megatron.data.blend.paths import PARTIAL
from megatron.data.file_access import alone
from megatron.data.parts.making import MAKING
from megatron.data.parts.part_set import FOLDER, plan_path
from megatron.small_files import path_inside, safe_name

from . import object_stores
from .block_cache import (
    BLOCK_BYTES,
    FILES,
    StoredFile,
    block_cache,
    download,
    pauses,
    replaced,
    unusable,
)
from .remote_tokens import write_note

THREADS = 16
CHUNK_BYTES = 16 << 20  # bytes of an index that are read at once
LAYOUT = 2  # of the paths below KEY
DEADLINE = 20.0  # seconds in which a store must answer at a start
COPIED = (".idx", ".json")
NOTED = (".bin", ".sources")
UNFINISHED = (PARTIAL, MAKING)  # in the names of what is being written


def local_words(words: Sequence[str], data: DataConfig) -> list[str]:
    """Words of --data-path, URLs replaced by the paths of this machine that stand for them. Raises
    ValueError and FileNotFoundError."""
    folder = data.object_storage_cache_path
    if folder is None:
        raise ValueError(no_cache(next(filter(is_url, words))))
    bound = int(data.object_storage_cache_gib * (1 << 30))
    with ThreadPoolExecutor(THREADS) as pool:
        return list(
            pool.map(lambda word: local_word(word, folder, bound) if is_url(word) else word, words)
        )


@cache
def local_word(url: str, folder: str, bound: int) -> str:
    """The path of this machine that stands for a word of --data-path: a prefix for a prefix, a
    directory for a directory, a pattern for a pattern. `bound`: bytes of the cache in `folder`.

    A process asks the store once. Raises ValueError and FileNotFoundError.
    """
    folder = os.path.abspath(folder)
    block_cache(folder).set_bound(bound)
    files = object_stores.client(url)
    root = files._strip_protocol(url).rstrip("/")
    protocol = url.partition("://")[0]
    safe_name(f"{protocol}:{root}", url, below=True)
    stored = _stored(url, files, root)
    if not stored:
        raise FileNotFoundError(
            f"{url}: there is no .idx of this name, nor below it; give the prefix of a pair, a "
            "directory or a pattern [data-not-found]"
        )
    mirror = os.path.join(folder, FILES, _hash([LAYOUT, url, stored]))
    os.makedirs(os.path.dirname(mirror), exist_ok=True)
    with alone(f"{mirror}.lock"):
        if not os.path.isdir(mirror):
            for unfinished in glob.glob(f"{glob.escape(mirror)}.*/"):
                shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
            with _renamed_when_complete(mirror, folder) as making:
                _copy(protocol, stored, making, folder)
                now = _stored(url, files, root)
                for path, file in stored.items():
                    if now.get(path) != file:
                        raise replaced(file.url)
    start = glob.escape(mirror) if glob.has_magic(root) else mirror
    return os.path.join(start, f"{protocol}:{root}")


def _hash(table: Any) -> str:
    return hashlib.sha256(json.dumps(table, default=str).encode()).hexdigest()[:16]


def _stored(url: str, files: Any, root: str) -> dict[str, StoredFile]:
    """The files that a word names as they are now, by their paths, in order; none where there is no
    such data. Raises ValueError."""
    try:
        table = object_stores.patiently(lambda: _files_of(files, root), pauses(DEADLINE))
    except FileNotFoundError:
        return {}
    except object_stores.StoreFailed as error:
        raise ValueError(f"{url}: cannot be read, {error} [object-store-failed]") from error
    protocol = url.partition("://")[0]
    for path in table:
        safe_name(f"{protocol}:{path}", url, below=True)
    return {
        path: _file(f"{protocol}://{path}", info["size"], object_stores.version(info))
        for path, info in sorted(table.items())
    }


def _file(url: str, size: int, version: str) -> StoredFile:
    return StoredFile(url, size, _hash([url, version, BLOCK_BYTES]), version)


def _files_of(files: Any, root: str) -> dict[str, Mapping[str, Any]]:
    """What the store says of the files that a word names, by their paths."""
    if glob.has_magic(root):
        stem, suffix = posixpath.splitext(root)
        pattern = stem if suffix in (".idx", ".bin") else root
        paths = [*files.glob(f"{pattern}.idx"), *files.glob(plan_path(pattern))]
        prefixes = {_prefix(path) for path in paths}
        fixed = root[: min(root.find(sign) for sign in "*?[" if sign in root)]
        listing = _below(files, fixed)
    else:
        prefixes = {root}
        listing = _below(files, root)
        if f"{root}.idx" not in listing and plan_path(root) not in listing:
            listing = _below(files, f"{root}/")
            prefixes = {_prefix(path) for path in listing if path.endswith(".idx")}
    return {
        path: info
        for path, info in listing.items()
        if path.endswith(COPIED + NOTED)
        and _prefix(path) in prefixes
        and not any(sign in path for sign in UNFINISHED)
    }


def _below(files: Any, start: str) -> dict[str, Mapping[str, Any]]:
    """The files whose path begins so."""
    folder, _, name = start.rpartition("/")
    listing = files.find(folder, detail=True, prefix=name) if folder else {}
    return {path: info for path, info in listing.items() if path.startswith(start)}


def _prefix(path: str) -> str:
    """The prefix of the pair or set that a file belongs to."""
    set_prefix, inside, _ = path.rpartition(f"{FOLDER}/")
    return set_prefix if inside else posixpath.splitext(path)[0]


@contextlib.contextmanager
def _renamed_when_complete(mirror: str, cache: str) -> Iterator[str]:
    """A new directory, called `mirror` at the end if all went well. Raises ValueError."""
    making = f"{mirror}.{uuid.uuid4().hex}"
    try:
        yield making
        os.rename(making, mirror)
    except OSError as error:
        raise unusable(cache, error) from error
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _copy(protocol: str, stored: Mapping[str, StoredFile], folder: str, cache: str) -> None:
    """Copy the index files and note the others."""
    copied = {path: file for path, file in stored.items() if path.endswith(COPIED)}
    size = sum(file.size for file in copied.values())
    log.print_rank_0(f" > copying {len(copied)} index files ({size:,} bytes) to {folder}")

    def copy_chunk(name: str, start: int) -> None:
        data = download(
            copied[name], start, min(CHUNK_BYTES, copied[name].size - start), check=False
        )
        with path_inside(folder, f"{protocol}:{name}", below=True).open("r+b") as file:
            file.seek(start)
            file.write(data)

    for name, remote in stored.items():
        path = path_inside(folder, f"{protocol}:{name}", below=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        if name in copied:
            with path.open("wb") as file:
                file.truncate(remote.size)
        else:
            write_note(str(path), remote, cache)
    chunks = [(name, n) for name in copied for n in range(0, copied[name].size, CHUNK_BYTES)]
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(copy_chunk, *zip(*chunks, strict=True)))
