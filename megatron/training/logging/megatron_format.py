"""The text of log lines in Megatron's form (January 2024): pure functions of numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime


@dataclass
class Interval:
    """What happened since the last iteration line. Rates count trained iterations only."""

    losses: list[float] = field(default_factory=list)
    trained: int = 0
    seconds: float = 0.0
    samples: int = 0
    overflow_skips: int = 0
    user_skips: int = 0
    spike_skips: int = 0
    nan_iterations: int = 0
    reasons: set[str] = field(default_factory=set)  # why the user or a spike skipped
    metric_values: dict[str, list[float]] = field(default_factory=dict)  # of forward_step

    def add_metrics(self, metrics: Mapping[str, float | None]) -> None:
        """Take in those of an iteration that changed the weights; None is no value."""
        for name, value in metrics.items():
            if value is not None:
                self.metric_values.setdefault(name, []).append(value)

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
        """Milliseconds a trained iteration (a skipped one, where all were skipped)."""
        return self.seconds * 1000.0 / max(1, self.trained or self.user_skips)


@dataclass(frozen=True)
class IterationRow:
    """The numbers of one iteration line."""

    iteration: int
    train_iters: int
    consumed_samples: int
    seq_length: int
    learning_rate: float
    global_batch_size: int
    loss_scale: float
    grad_norm: float | None
    interval: Interval
    world_size: int
    teraflops: float | None = None  # a rank, this suite's exact count
    lm_teraflops: float | None = None  # the aurora dialect's two counts
    ds_teraflops: float | None = None
    num_zeros: int | None = None
    params_norm: float | None = None


def megatron_line(row: IterationRow, log_throughput: bool) -> str:
    """Megatron-LM's iteration line of January 2024, to the character."""
    i = row.interval
    parts = [
        f" iteration {row.iteration:8d}/{row.train_iters:8d}",
        f" consumed samples: {row.consumed_samples:12d}",
        f" elapsed time per iteration (ms): {i.milliseconds:.1f}",
    ]
    if log_throughput and row.teraflops is not None:
        parts.append(f" throughput per GPU (TFLOP/s/GPU): {row.teraflops:.1f}")
    parts += [
        f" learning rate: {row.learning_rate:.3E}",
        f" global batch size: {row.global_batch_size:5d}",
    ]
    if i.losses:
        parts.append(f" lm loss: {i.loss:.6E}")
    parts += [f" {name}: {value:.6E}" for name, value in i.metrics.items()]
    parts.append(f" loss scale: {row.loss_scale:.1f}")
    if row.grad_norm is not None:
        parts.append(f" grad norm: {row.grad_norm:.3f}")
    if row.num_zeros is not None:
        parts.append(f" num zeros: {row.num_zeros:.1f}")
    if row.params_norm is not None:
        parts.append(f" params norm: {row.params_norm:.3f}")
    parts += [
        f" number of skipped iterations: {i.overflow_skips:3d}",
        f" number of nan iterations: {i.nan_iterations:3d}",
    ]
    if i.user_skips:
        parts.append(f" number of user-skipped iterations: {i.user_skips:3d}")
    if i.spike_skips:
        parts.append(f" number of spike-skipped iterations: {i.spike_skips:3d}")
    if i.reasons - {"user"}:
        parts.append(f" skip reason: {' '.join(sorted(i.reasons))}")
    return " |".join(parts) + " |"


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
            each = (f"\n     rank {rank:2d}: {t:.2f}" for rank, t in enumerate(times) if t > 0.0)
            rows.append(f"\n  {name}:" + "".join(each))
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
    parts = [
        f"{key}: {report[key] / 2**20}"
        for key in ("allocated", "max allocated", "reserved", "max reserved")
    ]
    return f"[Rank {rank}] (after {iteration} iterations) memory (MB) | " + " | ".join(parts)


def datetime_line(what: str) -> str:
    """`[what] datetime: YYYY-MM-DD HH:MM:SS `, with Megatron's trailing space."""
    return f"[{what}] datetime: {datetime.now():%Y-%m-%d %H:%M:%S} "


def progress_line(
    done: int, total: int, first: int, seconds: float, tokens_per_second: float
) -> str:
    """How far the run is and when it will be over, from the pace since iteration `first`."""
    left = seconds / max(1, done - first) * (total - done)
    return (
        f"  {100.0 * done / max(1, total):5.1f} % | {clock(seconds)} elapsed, ETA {clock(left)} | "
        f"{tokens_per_second:,.0f} tokens/s"
    )


def clock(seconds: float) -> str:
    """A span of time as h:mm:ss."""
    whole = int(seconds + 0.5)
    return f"{whole // 3600:d}:{whole // 60 % 60:02d}:{whole % 60:02d}"
