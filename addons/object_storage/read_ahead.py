"""Fetches what a rank reads next: the order of samples is known, so the blocks of the next
iterations are in the cache before anybody asks for them.

A process of its own goes through the micro-batches that the data workers get, `depth` ahead of the
training loop. It has the data set give the samples, while the cache only notes which blocks
that reads, and fetches those that are not there.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain

from megatron import log
from megatron.config.data import DataConfig
from megatron.data.sample_lookup import Dataset

from .block_cache import BlockCache, Needed, Window, block_cache

THREADS = 16  # that wait for the store side by side
FULL = 0.2  # seconds between two looks whether the cache has room


def reader(data: DataConfig, per_iteration: int) -> Callable[..., ReadAhead]:
    """A `ReadAhead` of the rest of its arguments, with so many micro-batches in an iteration."""
    assert data.object_storage_cache_path is not None
    folder = os.path.abspath(data.object_storage_cache_path)
    return functools.partial(ReadAhead, folder, data.object_storage_prefetch * per_iteration)


class ReadAhead:
    """Starts the process, which calls `start` first, `depth` micro-batches ahead, and fetches into
    the cache of the directory `folder`. `micro_batches` are the sample numbers that
    the workers will get, and remain as they are for them."""

    def __init__(
        self,
        folder: str,
        depth: int,
        dataset: Dataset,
        micro_batches: Iterator[list[int]],
        start: Callable[[], None],
    ) -> None:
        forked = multiprocessing.get_context("fork")
        self._consumed = forked.Semaphore(0)
        self._process = forked.Process(
            target=_run,
            args=(folder, depth, dataset, micro_batches, start, self._consumed),
            daemon=True,
        )
        self._process.start()

    def take(self) -> None:
        """The training loop has taken a micro-batch."""
        self._consumed.release()
        if self._process.exitcode:
            log.warn_once(
                "the process that fetches data of the object store ahead has ended (exit code "
                f"{self._process.exitcode}); data are now fetched when they are needed"
            )

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()


def _run(
    folder: str,
    depth: int,
    dataset: Dataset,
    micro_batches: Iterator[list[int]],
    start: Callable[[], None],
    consumed: multiprocessing.synchronize.Semaphore,
) -> None:
    start()
    cache = block_cache(folder)
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            _Fetcher(cache, depth, consumed, pool).run(dataset, micro_batches)
    except (ValueError, OSError):
        pass  # whoever reads the data meets it too, and says so


class _Fetcher:
    """Goes through the micro-batches. `_batches` are the blocks of those that were not taken."""

    def __init__(
        self,
        cache: BlockCache,
        depth: int,
        consumed: multiprocessing.synchronize.Semaphore,
        pool: ThreadPoolExecutor,
    ) -> None:
        self._cache = cache
        self._depth = depth
        self._consumed = consumed
        self._pool = pool
        self._window = Window(cache)
        self._batches: deque[Sequence[Needed]] = deque()
        self._fetching: deque[Future[tuple[bytes, bool]]] = deque()

    def run(self, dataset: Dataset, micro_batches: Iterator[list[int]]) -> None:
        """Until all were taken."""
        stamp = 0
        for micro_batch in micro_batches:
            while len(self._batches) >= self._depth:
                self._wait(None)
            if not self._batches and self._consumed.acquire(block=False):
                continue  # it was read already
            self._batches.append(self._cache.noted(dataset.__getitem__, micro_batch))
            # The cache removes the blocks with the oldest stamp first: stamps rise in the order of
            # need, whatever the clock does.
            stamp = max(stamp + 1, time.time_ns())
            with self._cache.locked():
                self._window.hold(chain.from_iterable(self._batches))
                missing = self._cache.announce(self._batches[-1], stamp)
            for block in missing:
                self._make_room()
                self._fetching.append(
                    self._pool.submit(self._cache.fetch, block.stored, block.number, stamp)
                )
        while self._batches:
            self._wait(None)

    def _make_room(self) -> None:
        while self._fetching and self._fetching[0].done():
            self._fetching.popleft().result()
        while not self._cache.has_room(len(self._fetching) + 1):
            log.warn_once(
                f"--object-storage-cache-gib {self._cache.bound() / (1 << 30):g}: is less than the "
                f"data of the next {len(self._batches)} micro-batches of the ranks of this host, "
                "so reads wait for the store; raise it, or lower --object-storage-prefetch"
            )
            self._wait(FULL)

    def _wait(self, seconds: float | None) -> None:
        """For the loop to take a micro-batch, whose blocks may go then."""
        if not self._batches:
            time.sleep(FULL)
        elif self._consumed.acquire(timeout=seconds):
            self._batches.popleft()
            with self._cache.locked():
                self._window.hold(chain.from_iterable(self._batches))
