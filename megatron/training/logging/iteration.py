"""The numbers of the interval since the last log line, and the interfaces of what prints and stores
iterations."""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.config.plan.plan import Plan
from megatron.training.result import IterationResult


@dataclass
class Interval:
    """What happened since the last iteration line. Rates count trained iterations only."""

    losses: list[float] = field(default_factory=list)
    trained: int = 0
    seconds: float = 0.0
    samples: int = 0
    overflow_skips: int = 0
    user_skips: int = 0
    # updates that features vetoed: how many, by feature and reason
    vetoes: dict[str, Counter[str]] = field(default_factory=dict)
    nan_iterations: int = 0
    reasons: set[str] = field(default_factory=set)  # of `user_skips`
    metric_values: dict[str, list[float]] = field(default_factory=dict)  # of forward_step

    def add(self, r: IterationResult) -> None:
        """Take in one iteration, or those that were skipped at once."""
        if r.skipped == "user":
            self.user_skips += r.iterations
            self.reasons.add(r.reason or "user")
            return
        self.trained += 1
        self.samples += r.global_batch_size
        self.seconds += r.seconds
        if r.skipped is None and r.loss is not None:
            self.losses.append(r.loss)
            for name, value in r.line_metrics.items():
                if value is not None:
                    self.metric_values.setdefault(name, []).append(value)
        if r.skipped:
            self.overflow_skips += r.skipped == "overflow"
            if r.skipped != "overflow":
                self.vetoes.setdefault(r.skipped, Counter()).update([r.reason or ""])
            self.nan_iterations += r.loss is not None and not math.isfinite(r.loss)

    @property
    def metrics(self) -> dict[str, float]:
        """Means by name, in the order in which they came."""
        return {
            name: math.fsum(values) / len(values) for name, values in self.metric_values.items()
        }

    @property
    def loss(self) -> float:
        """Mean loss of the iterations that changed the weights; 0.0 when there is none."""
        return math.fsum(self.losses) / max(1, len(self.losses))

    @property
    def milliseconds(self) -> float:
        """Milliseconds per trained iteration (per skipped one if all were skipped)."""
        return self.seconds * 1000.0 / max(1, self.trained or self.user_skips)


class LogFormat(ABC):
    """The lines of one --log-format."""

    ends_with_line: bool = False  # has the last iteration of a run a line, whatever its number?
    plan: Plan  # replaced when the model is built, and when the iterations to skip are known

    def start(self) -> None:  # noqa: B027
        """Print the lines before the first iteration."""

    def add(self, result: IterationResult) -> None:  # noqa: B027
        """Take in one iteration."""

    @abstractmethod
    def line_due(self, iteration: int) -> bool:
        """Does this iteration have a line? The same on all ranks."""

    def line(self, result: IterationResult, interval: Interval, teraflops: float | None) -> None:  # noqa: B027
        """Print the line of an interval that ends with `result`; `teraflops` of a rank, by this
        suite's exact count (None without training)."""

    def status(self, iteration: int, seconds: float) -> None:  # noqa: B027
        """Show how far the run is, after an iteration without a line."""

    @abstractmethod
    def evaluation(
        self,
        when: str,
        split: str,
        iteration: int,
        losses: Mapping[str, float],
        bits: float | None,
    ) -> str:
        """The text of an evaluation; `when` is Megatron's word for when it is, `bits` per byte."""

    @abstractmethod
    def memory(self, rank: int, iteration: int, report: Mapping[str, float]) -> str:
        """The line of a device's memory, in bytes."""

    def finish(self, reason: str | None, iteration: int, checkpoint: str) -> None:  # noqa: B027
        """Print the summary; `reason` to stop before the end of training."""


class ResultWriter:
    """A file or a service that stores results; what a class does not define, it does not store.
    `takes_points`: does it define `points`?"""

    takes_points = False

    def iteration(
        self,
        result: IterationResult,
        teraflops: float | None,
        memory: Callable[[], Mapping[str, float]],
    ) -> None:
        """Store one iteration; `teraflops` of a rank (None without training), `memory()` of the
        device in bytes."""

    def evaluation(
        self, key: str, split: str, iteration: int, samples: int, values: Mapping[str, float | None]
    ) -> None:
        """Store an evaluation: `loss`, `perplexity` and `bits_per_byte` (None if unknown) of the
        loss called `key`."""

    def tasks(self, iteration: int, samples: int, scores: Mapping[str, float]) -> None:
        """Store scores by task and metric."""

    def points(self, iteration: int, values: Mapping[str, float]) -> None:
        """Store other values by tag."""

    def timers(self, seconds: Mapping[str, float], iteration: int) -> None:
        """Store the longest times over all ranks."""

    def arguments(self, values: Callable[[], Mapping[str, Any]]) -> None:
        """Store every argument."""

    def flush(self) -> None:
        """Write what is still in memory."""

    def close(self) -> None:
        """Write what is still in memory; no more will come."""
