"""The slowest rank: which one computes longest, and how much of an iteration that is."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

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
