"""The hook that reports to the rank monitor when an iteration begins and ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import median

from megatron.training.hook import Hook
from megatron.training.launch import hang
from megatron.training.launch.rank_monitor import MonitorClient
from megatron.training.logging.iteration import IterationResult

LEAST_SECONDS = 15.0
MEDIANS = 5.0
STEPS = 21  # that the median is of


class HangWatch(Hook):
    """An iteration has `limit` seconds; without it the larger of 15 and 5 times the median of the
    latest iterations, with as many seconds for a micro-batch as they had (`micro_batches` of an
    iteration: their number grows with the batch). The first of a process has none: it may
    compile."""

    def __init__(
        self, monitor: MonitorClient, limit: float | None, micro_batches: Callable[[int], int]
    ):
        self._monitor = monitor
        self._limit = limit
        self._micro_batches = micro_batches
        self._seconds: deque[float] = deque(maxlen=STEPS)  # for each micro-batch
        hang.prepare()

    def before_step(self, iteration: int) -> None:
        limit = None
        if self._seconds:
            usual = median(self._seconds) * self._micro_batches(iteration)
            limit = self._limit or max(LEAST_SECONDS, MEDIANS * usual)
        self._monitor.begin_step(iteration, limit)

    def after_step(self, result: IterationResult) -> None:
        self._monitor.end_step()
        self._seconds.append(result.seconds / self._micro_batches(result.iteration))
