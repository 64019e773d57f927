"""How long the other processes of a host wait while one makes room in a full cache."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.addons.object_storage.block_cache import (
    BLOCK_BYTES,
    LOOKS,
    PAGE,
    BlockCache,
    Needed,
    Window,
)
from megatron.addons.object_storage.tests.stored import stored_file

BLOCKS = 1024
RANKS = 8


class Timed(BlockCache):
    """Notes for how many seconds it was locked each time."""

    def __init__(self, folder: str) -> None:
        self.held: list[float] = []
        super().__init__(folder)

    @contextlib.contextmanager
    def locked(self) -> Iterator[Any]:
        began = time.monotonic()
        with super().locked() as account:
            yield account
        self.held.append(time.monotonic() - began)


@pytest.mark.sweep
def test_making_room_holds_the_others_for_less_than_a_second(tmp_path: Path) -> None:
    """A gibibyte of blocks on the disk. Of as many as are looked at at once three quarters are in
    the windows of all ranks, so that looking and removing both take their longest."""
    source = tmp_path / "c.bin"
    with open(source, "wb") as file:
        file.truncate(BLOCKS * BLOCK_BYTES)
    stored = stored_file(source)
    cache = Timed(str(tmp_path / "cache"))
    cache.set_bound(BLOCKS * (BLOCK_BYTES + PAGE))
    for number in range(BLOCKS):
        cache.read(stored, number * BLOCK_BYTES, 1)
    needed = [Needed(stored, n) for n in range(BLOCKS) if n % LOOKS < LOOKS * 3 // 4]
    windows = [Window(cache) for _ in range(RANKS)]
    for window in windows:
        with cache.locked():
            window.hold(needed)
    cache.held.clear()
    assert cache.has_room(1)
    kept = len(list((tmp_path / "cache").glob("blocks/*/????????")))
    assert kept == BLOCKS - LOOKS // 4
    print(f"longest hold: {1000 * max(cache.held):.1f} ms")
    assert max(cache.held) < 1
