"""The slowest rank: which one computes longest, and how much of an iteration that is."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from megatron import log
from megatron.parallel.collectives import gather_objects
from megatron.training.hook import Hook
from megatron.training.result import IterationResult
from megatron.training.run import Run

# The timers of a step that measure a rank's own work, without waiting for other ranks (but for
# tensor and context parallelism, whose collectives are part of a layer).
COMPUTE = ("forward-compute", "backward-compute")


def straggler_line(
    iteration: int, iterations: int, elapsed: float, seconds: Sequence[float]
) -> str:
    """One line for an interval of `iterations` that took `elapsed` seconds; `seconds` are those of
    each rank's forward and backward passes in it."""
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    share = seconds[slowest] / elapsed if elapsed > 0 else 0.0
    return (
        f"stragglers at iteration {iteration} | slowest rank {slowest}: "
        f"{_ms(seconds[slowest], iterations)} ({share:.0%}) | "
        f"median {_ms(median(seconds), iterations)} | fastest {_ms(min(seconds), iterations)}"
    )


def _ms(seconds: float, iterations: int) -> str:
    milliseconds = 1e3 * seconds / iterations
    return f"{milliseconds:.{0 if milliseconds >= 100 else 1}f} ms"


class Stragglers(Hook):
    """--log-straggler: the rank that computes longest, at each log interval. Its line follows that
    of the iteration."""

    after = ("IterationLog",)
    before = ("Skipping",)

    def __init__(self, run: Run):
        self._run = run
        run.timers.watched = frozenset(COMPUTE)
        self._elapsed = 0.0
        self._iterations = 0

    def after_step(self, result: IterationResult) -> None:
        self._elapsed += result.seconds
        self._iterations += 1
        if result.iteration % self._run.config.logging.log_interval:
            return
        seconds = gather_objects(self._run.timers.pop_watched(), self._run.runtime.ctx.world)
        log.print_rank_last(
            straggler_line(result.iteration, self._iterations, self._elapsed, seconds)
        )
        self._elapsed = 0.0
        self._iterations = 0
