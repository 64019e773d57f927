"""Blocks of the next micro-batches are fetched before they are read, and stay until they are."""

import os
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from megatron.addons.object_storage import block_cache, mirror
from megatron.addons.object_storage.block_cache import BlockCache, Needed, StoredFile, Window
from megatron.addons.object_storage.read_ahead import ReadAhead
from megatron.addons.object_storage.tests.stored import stored_file
from tests.core.data.corpora import build_datasets, data_flags, write_corpus

BLOCK = 512
PAGE = block_cache.PAGE
LENGTHS = np.random.default_rng(0).integers(1, 120, 400).tolist()


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_cache, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(mirror, "BLOCK_BYTES", BLOCK)


@pytest.fixture
def stored(tmp_path: Path) -> StoredFile:
    path = Path(f"{write_corpus(tmp_path / 'c', LENGTHS, seed=1)}.bin")
    return stored_file(path)


def blocks(folder: Path) -> set[int]:
    return {int(path.name, 16) for path in folder.glob("blocks/*/*") if path.suffix != ".lock"}


def soon(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Whether it comes true."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not condition():
        time.sleep(0.02)
    return condition()


def test_needed_blocks_stay_while_their_process_is_there(
    stored: StoredFile, tmp_path: Path
) -> None:
    folder = tmp_path / "cache"
    cache = BlockCache(str(folder))
    cache.set_bound(4 * PAGE)
    for number in (0, 1, 2, 3):
        cache.read(stored, number * BLOCK, 1)
    ready, hold = os.pipe()
    child = os.fork()
    if not child:
        window = Window(cache)
        with cache.locked():
            window.hold([Needed(stored, 0), Needed(stored, 2)])
        os.write(hold, b"x")
        time.sleep(60)
        os._exit(1)
    os.read(ready, 1)
    for number in (4, 5, 6):
        cache.read(stored, number * BLOCK, 1)
    assert {0, 2} < blocks(folder)
    whole = Window(cache)
    with cache.locked():
        whole.hold([Needed(stored, number) for number in blocks(folder)])
    before = blocks(folder)
    assert not cache.has_room(1)
    content = Path(stored.url.removeprefix("file://")).read_bytes()
    assert cache.read(stored, 9 * BLOCK, 40) == content[9 * BLOCK : 9 * BLOCK + 40]
    assert blocks(folder) == before
    with cache.locked():
        whole.hold([])
    os.kill(child, 9)
    os.waitpid(child, 0)
    for number in (7, 8, 9, 10):
        cache.read(stored, number * BLOCK, 1)
    assert blocks(folder) == {7, 8, 9, 10}


def test_what_is_read_next_is_there(tmp_path: Path) -> None:
    """With a cache that holds a part of the data: nothing is missed, nothing is fetched that no
    micro-batch of the window needs, and resumed, it begins with what is read next. What another
    process will read, as a validation, stays until then."""
    write_corpus(tmp_path / "c", LENGTHS, seed=1)
    folder = tmp_path / "cache"
    data = data_flags(
        data_path=(f"file://{tmp_path / 'c'}",),
        split="1,0,0",
        object_storage_cache_path=str(folder),
        object_storage_cache_gib=50 * PAGE / (1 << 30),
    )
    dataset = build_datasets(data, sizes=(300, 0, 0), sequence_length=32)[0]
    cache = block_cache.block_cache(str(folder))
    for first in (0, 150):
        cache.set_bound(0)
        numbers = [[n, n + 1] for n in range(first, 280, 2)]
        needed = [cache.noted(dataset.__getitem__, batch) for batch in numbers]
        most = max(len(set(chain(*needed[n : n + 5]))) for n in range(len(numbers)))
        cache.set_bound((most + 12) * PAGE)
        read_ahead = ReadAhead(str(folder), 5, dataset, iter(numbers), lambda: None)
        slow = None
        later = {block.number for block in cache.noted(dataset.__getitem__, [298, 299])}
        try:
            missed = cache.counts().missed
            for at, batch in enumerate(numbers):
                window = {block.number for some in needed[at : at + 5] for block in some}
                assert soon(lambda window=window: window <= blocks(folder))
                if at == 0:
                    assert blocks(folder) == window
                    slow = ReadAhead(str(folder), 1, dataset, iter([[298, 299]]), lambda: None)
                    assert soon(lambda later=later: later <= blocks(folder))
                for number in batch:
                    assert len(dataset[number]) == 33
                read_ahead.take()
                assert later <= blocks(folder)
            assert cache.counts().missed == missed
        finally:
            read_ahead.close()
            if slow:
                slow.close()


def test_a_failing_store_does_not_end_it_quietly(tmp_path: Path) -> None:
    """What reads ahead ends, the run says so, and whoever reads gets the error."""

    def fails() -> Iterator[list[int]]:
        raise AssertionError
        yield []

    BlockCache(str(tmp_path)).set_bound(0)
    read_ahead = ReadAhead(str(tmp_path), 5, None, fails(), lambda: os._exit(7))
    assert soon(lambda: read_ahead._process.exitcode == 7)
    read_ahead.take()
    read_ahead.close()
