"""The text of log lines in Megatron's form (January 2024): pure functions of numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from megatron.training.logging.iteration import IterationRow
from megatron.training.logging.short_format import hours


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


def progress_line(
    done: int, total: int, first: int, seconds: float, tokens_per_second: float
) -> str:
    """How far the run is and when it will be over, from the pace since iteration `first`."""
    left = seconds / max(1, done - first) * (total - done)
    return (
        f"  {100.0 * done / max(1, total):5.1f} % | {hours(seconds)} elapsed, ETA {hours(left)} | "
        f"{tokens_per_second:,.0f} tokens/s"
    )
