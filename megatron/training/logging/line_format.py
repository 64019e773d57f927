"""Log formats of one line for each interval, from which features make theirs; the other lines of a
run are the same in all of them, in Megatron's words."""

import math
import sys
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence

from megatron import launcher
from megatron.config.plan.plan import Plan
from megatron.config.tree import Config
from megatron.training.launch.initialize import Runtime
from megatron.training.logging import flops
from megatron.training.logging.iteration import Interval, LogFormat
from megatron.training.logging.short_format import hours
from megatron.training.result import IterationResult


class LineFormat(LogFormat):
    """One line for each --log-interval, printed by the last rank; `_text` is that of a format."""

    def __init__(self, config: Config, plan: Plan, runtime: Runtime | None):
        self._config = config
        self.plan = plan
        self._runtime = runtime
        self._started = time.perf_counter()
        self._first: int | None = None  # the iteration that this process began at
        self._last = launcher.rank() == launcher.world_size() - 1

    def add(self, result: IterationResult) -> None:
        """Remember where this process began."""
        if self._first is None:
            self._first = result.iteration - result.iterations

    def line_due(self, iteration: int) -> bool:
        """At multiples of --log-interval."""
        return iteration % self._config.logging.log_interval == 0

    def line(self, result: IterationResult, interval: Interval, teraflops: float | None) -> None:
        """Print the line, and with --progress the progress."""
        if not self._last:
            return
        print(self._text(result, interval, teraflops), flush=True)
        mode = self._config.logging.progress
        if mode == "on" or (mode == "auto" and sys.stderr.isatty()):
            tokens = interval.samples * self._config.model.seq_length
            rate = tokens / interval.seconds if interval.seconds else 0.0
            seconds = time.perf_counter() - self._started
            total = self.plan.train_iters
            assert self._first is not None  # `add` comes before
            progress = progress_line(result.iteration, total, self._first, seconds, rate)
            print(progress, file=sys.stderr, flush=True)

    @abstractmethod
    def _text(self, result: IterationResult, interval: Interval, teraflops: float | None) -> str:
        """The line of an interval."""

    def evaluation(
        self,
        when: str,
        split: str,
        iteration: int,
        losses: Mapping[str, float],
        bits: float | None,
    ) -> str:
        """The block of an evaluation, called validation for a test too."""
        suffix = split.removeprefix("final ").removeprefix("validation").removeprefix("test")
        return validation_block(when, losses, suffix)

    def memory(self, rank: int, iteration: int, report: Mapping[str, float]) -> str:
        """The line of a device's memory."""
        return memory_line(rank, iteration, report)

    def _rate(self, operations: float, seconds: float) -> float:
        if seconds <= 0 or self.plan.own_model:
            return 0.0
        return flops.teraflops_per_rank(operations, seconds, self.plan.world_size)


def validation_block(prefix: str, losses: Mapping[str, float], suffix: str = "") -> str:
    """The validation line between its two rows of dashes, one longer than the line; `suffix` says
    of which set."""
    line = f" validation{suffix} loss at {prefix} | "
    for key, loss in losses.items():
        line += f"{key} value: {loss:.6E} | {key} PPL: {math.exp(min(20.0, loss)):.6E} | "
    dashes = "-" * (len(line) + 1)
    return f"{dashes}\n{line}\n{dashes}"


def timers_block(names: Sequence[str], ranks: Sequence[Mapping[str, float]], option: str) -> str:
    """Timers of all ranks in milliseconds; `ranks` holds {name: seconds} by rank. Empty when
    nothing was timed."""
    rows = []
    for name in names:
        times = [rank.get(name, 0.0) * 1000.0 for rank in ranks]
        shown = [t for t in times if t > 0.0]
        if not shown:
            continue
        label = "\n    " + (name + " ").ljust(48, ".")
        if option == "all":
            by_rank = (f"\n     rank {rank:2d}: {t:.2f}" for rank, t in enumerate(times) if t > 0.0)
            rows.append(f"\n  {name}:" + "".join(by_rank))
        elif option == "max":
            rows.append(f"{label}: {max(shown):.2f}")
        else:
            rows.append(f"{label}: ({min(shown):.2f}, {max(shown):.2f})")
    header = {
        "all": "times across ranks (ms):",
        "max": "max time across ranks (ms):",
        "minmax": "(min, max) time across ranks (ms):",
    }[option]
    return header + "".join(rows) if rows else ""


def memory_line(rank: int, iteration: int, report: Mapping[str, float]) -> str:
    """Megatron's line of device memory in MB (2^20 bytes); `report` holds bytes."""
    fields = [
        f"{key}: {report[key] / 2**20}"
        for key in ("allocated", "max allocated", "reserved", "max reserved")
    ]
    return f"[Rank {rank}] (after {iteration} iterations) memory (MB) | " + " | ".join(fields)


def progress_line(
    done: int, total: int, first: int, seconds: float, tokens_per_second: float
) -> str:
    """How far the run is and when it will be over, from the pace since iteration `first`."""
    remaining = seconds / max(1, done - first) * (total - done)
    return (
        f"  {100.0 * done / max(1, total):5.1f} % | {hours(seconds)} elapsed, "
        f"ETA {hours(remaining)} | {tokens_per_second:,.0f} tokens/s"
    )
