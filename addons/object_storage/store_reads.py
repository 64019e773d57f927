"""How long a run waited for data of an object store."""

from __future__ import annotations

import os

from megatron import log
from megatron.config.data import DataConfig
from megatron.parallel.collectives import gather_objects
from megatron.parallel.context import Axis
from megatron.training.hook import Hook
from megatron.training.result import IterationResult

from .block_cache import Counts, block_cache


class StoreReads(Hook):
    """Prints at the end what all ranks fetched and waited for. Warm-up are the first iterations of
    this process, as many as are fetched ahead."""

    def __init__(self, data: DataConfig, world: Axis):
        folder = data.object_storage_cache_path
        assert folder is not None
        self._cache = block_cache(os.path.abspath(folder))
        self._world = world
        self._warm_up = max(1, data.object_storage_prefetch)
        self._trained = 0
        self._last = self._cache.counts()
        self._before: Counts | None = None  # the end of warm-up

    def after_step(self, result: IterationResult) -> None:
        counts = self._cache.counts()
        result.columns["blocks_missed"] = round(counts.missed - self._last.missed)
        result.columns["data_wait_seconds"] = counts.waited - self._last.waited
        self._last = counts
        self._trained += 1
        if self._trained == self._warm_up:
            self._before = counts

    def on_end(self) -> None:
        counts = self._cache.counts()
        both = gather_objects((counts, self._before or counts), self._world)
        total, before = (
            Counts(*map(sum, zip(*of_all, strict=True))) for of_all in zip(*both, strict=True)
        )
        log.print_rank_0(
            f" object storage: fetched {total.blocks:,.0f} blocks ({total.bytes / 1e6:,.1f} MB); "
            f"waited {total.waited:.2f} s for {total.missed:,.0f} blocks, after the first "
            f"{self._warm_up} iterations {total.waited - before.waited:.2f} s for "
            f"{total.missed - before.missed:,.0f}"
        )
