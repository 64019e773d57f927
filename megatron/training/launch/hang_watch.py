"""The hook that reports to the rank monitor, or to the watch of a single rank, which phase of the
run this rank is in."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import TYPE_CHECKING

from megatron.training.hook import Hook
from megatron.training.launch.hang_limits import LEAST_SECONDS, MEDIANS, HangLimits, RunPhase
from megatron.training.result import IterationResult, Requests
from megatron.training.run import Run

if TYPE_CHECKING:
    from megatron.training.launch.progress import OwnWatch
    from megatron.training.launch.rank_monitor import MonitorClient

STEPS = 21  # that the median is of


class HangWatch(Hook):
    """An iteration has the limit that was given, else the larger of 60 s and 4 times the median of
    the latest iterations, with as many seconds for a micro-batch as they had (their number grows
    with the batch). A micro-batch that is done is progress."""

    def __init__(self, monitor: MonitorClient | OwnWatch, limits: HangLimits, run: Run):
        self._monitor = monitor
        self._limits = limits
        self._micro_batches = run.plan.num_microbatches
        self._seconds: deque[float] = deque(maxlen=STEPS)  # for each micro-batch
        pipeline = run.pipeline
        monitor.progress = lambda: pipeline.actions_done
        monitor.has_accelerator = run.runtime.device.type != "cpu"

    def before_step(self, iteration: int) -> None:
        limits = self._limits
        if not self._seconds:
            self._monitor.begin(RunPhase("first iteration", iteration, limits.first_iteration))
            return
        limit = limits.iteration
        if limits.iterations and not limit:
            usual = median(self._seconds) * self._micro_batches(iteration)
            limit = max(LEAST_SECONDS, MEDIANS * usual)
        self._monitor.begin(RunPhase("iteration", iteration, limit or None, announced=False))

    def after_step(self, result: IterationResult) -> None:
        self._monitor.begin(
            RunPhase("after iteration", result.iteration, self._limits.between, announced=False)
        )
        self._seconds.append(result.seconds / self._micro_batches(result.iteration))

    def before_evaluation(self) -> None:
        self._monitor.begin(RunPhase("evaluation", limit=self._limits.evaluation))

    def before_save(self) -> None:
        self._monitor.begin(RunPhase("save", limit=self._limits.save))

    def after_iteration(self, iteration: int, requests: Requests) -> None:
        self._monitor.begin(
            RunPhase("after iteration", iteration, self._limits.between, announced=False)
        )

    def on_end(self) -> None:
        self._monitor.begin(RunPhase("end of training", limit=self._limits.between))
