"""--log-format short: its lines, at most 100 columns wide, as pure functions of numbers; and which
iterations have one, the time left, the status line. It asks no device."""

import math
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from megatron import log
from megatron.config.plan.plan import Plan
from megatron.config.tree import Config
from megatron.training.logging.iteration import Interval, LogFormat
from megatron.training.result import IterationResult

WIDTH = 100
INDENT = "      "  # of a line that continues the one above it
REFRESH = 0.2  # seconds between two versions of the status line
_DIGITS = re.compile(r"(\d\.\d\d)\d+")


def iteration_line(
    result: IterationResult,
    i: Interval,
    eta: float | None,
    *,
    train_iters: int,
    seq_length: int,
    teraflops: float | None = None,
    loss_scale: float | None = None,
    batch_size: int | None = None,
) -> str:
    """Iteration, mean loss of interval `i`, gradient norm, learning rate, time per iteration,
    tokens per second, time left (`eta`, in seconds); then what is out of the ordinary, and of the
    last three what is given. Without trained iterations: no loss, norm and rates."""
    total = str(train_iters)
    fields = [f" iter {result.iteration:{len(total)}d}/{total}"]
    if i.losses:
        fields.append(f"loss {decimal(i.loss)}")
    if result.line_norm is not None:
        fields.append(f"grad norm {significant(result.line_norm)}")
    fields.append(f"lr {scientific(result.learning_rate)}")
    if i.trained:
        fields.append(f"{duration(i.seconds / i.trained):>7}")
        if i.seconds > 0:
            fields.append(f"{metric(i.samples * seq_length / i.seconds):>5} tok/s")
    if eta:
        fields.append(f"ETA {clock(eta)}")
    fields += [f"{name} {value:.4g}" for name, value in i.metrics.items()]
    if batch_size is not None:
        fields.append(f"batch {batch_size}")
    if loss_scale is not None:
        fields.append(f"loss scale {loss_scale:.10g}")
    if teraflops is not None:
        fields.append(f"{teraflops:.4g} TFLOP/s per rank")
    if result.num_zeros is not None:
        fields.append(f"zeros {result.num_zeros}")
    if result.params_norm is not None:
        fields.append(f"params norm {significant(result.params_norm)}")
    return fold([*fields, *_skips(i)])


def _skips(i: Interval) -> list[str]:
    fields = []
    if i.overflow_skips:
        fields.append(f"skipped {i.overflow_skips} (fp16 overflow)")
    for feature, vetoes in i.vetoes.items():
        fields.append(f"{feature}-skipped {vetoes.total()} ({', '.join(sorted(vetoes))})")
    if i.user_skips:
        fields.append(f"user-skipped {i.user_skips} ({', '.join(sorted(i.reasons))})")
    if i.nan_iterations:
        fields.append(f"nan {i.nan_iterations}")
    return fields


def evaluation_line(
    split: str, iteration: int, losses: Mapping[str, float], bits_per_byte: float | None = None
) -> str:
    """`split` is `validation` (with `-NAME` where there are several sets) or `test`; losses in nats
    per token."""
    fields = [f" {split} at iteration {iteration}"]
    for key, loss in losses.items():
        name = key.removeprefix("lm ")
        fields += [f"{name} {decimal(loss)}", f"perplexity {significant(perplexity(loss))}"]
    if bits_per_byte is not None:
        fields.append(f"bits per byte {bits_per_byte:.4f}")
    return fold(fields)


def perplexity(loss: float) -> float:
    """exp of the loss, which is cut off at 20 as Megatron does."""
    return math.exp(min(20.0, loss))


def status_line(iteration: int, train_iters: int, seconds: float, eta: float | None) -> str:
    """What stands below the log on a terminal: how far the run is, time of the last iteration, time
    left."""
    fields = [
        f" iter {iteration:{len(str(train_iters))}d}/{train_iters}",
        f"{100 * iteration / max(1, train_iters):.1f} %",
        duration(seconds),
    ]
    if eta:
        fields.append(f"ETA {clock(eta)}")
    return " | ".join(fields)


def memory_line(rank: int, iteration: int, report: Mapping[str, float]) -> str:
    """Device memory of a rank; `report` holds bytes."""
    gib = {name: f"{value / 2**30:.2f} GiB" for name, value in report.items()}
    return fold(
        [
            f" memory of rank {rank} after iteration {iteration}",
            f"allocated {gib['allocated']}",
            f"peak {gib['max allocated']}",
            f"reserved {gib['reserved']}",
        ]
    )


def last_line(
    reason: str | None,
    iteration: int,
    train_iters: int,
    seconds: float,
    tokens: int,
    rate: float,
    checkpoint: str,
) -> str:
    """The summary of a run: why it ends, how far it is, `seconds` elapsed, `tokens` trained by this
    process and their `rate` per second of training, the last checkpoint."""
    how = "training finished"
    if reason is not None:  # without the fifteen digits of "after 0.123456789012345 minutes"
        how = "stopped " + _DIGITS.sub(r"\1", reason.removeprefix("exiting program ").rstrip("."))
    fields = [
        f" {how}",
        f"{iteration:,} of {train_iters:,} iterations",
        f"elapsed {hours(seconds)}",
        f"{metric(tokens)} tokens",
    ]
    if rate:
        fields.append(f"{metric(rate)} tok/s")
    return fold([*fields, checkpoint])


def fold(fields: Sequence[str]) -> str:
    """Parts with bars between them, in lines of at most 100 columns where each part is shorter."""
    lines = [fields[0]]
    for field in fields[1:]:
        if len(lines[-1]) + 3 + len(field) > WIDTH:
            lines.append(INDENT + field)
        else:
            lines[-1] += f" | {field}"
    return "\n".join(lines)


def decimal(value: float) -> str:
    """A loss: four decimals, or five digits of a large one."""
    return f"{value:.4f}" if abs(value) < 9.99995 else f"{value:#.5g}".removesuffix(".")


def significant(value: float) -> str:
    """A norm: three decimals below 10, then four digits."""
    return f"{value:.3f}" if value < 9.9995 else f"{value:#.4g}".removesuffix(".")


def scientific(value: float) -> str:
    """A learning rate: 3.00e-4."""
    digits, _, exponent = f"{value:.2e}".partition("e")
    return f"{digits}e{int(exponent)}" if exponent else digits


def metric(value: float) -> str:
    """A count or a rate in three digits: 868, 8.68k, 86.8k, 1.23M, 12.3B."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size * 0.9995:
            shown = f"{value / size:#.3g}".removesuffix(".")
            return f"{shown}{letter}"
    return f"{value:.0f}" if value >= 99.95 or value == int(value) else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Time per iteration: 9.87 ms, 118 ms, 1.23 s, 61.2 s."""
    value, unit = (seconds * 1000, "ms") if seconds < 0.9995 else (seconds, "s")
    return (
        f"{value:#.3g}".removesuffix(".") + f" {unit}" if value < 999.5 else f"{value:.0f} {unit}"
    )


def hours(seconds: float) -> str:
    """A span of time as h:mm:ss."""
    rounded = int(seconds + 0.5)
    return f"{rounded // 3600:d}:{rounded // 60 % 60:02d}:{rounded % 60:02d}"


def clock(seconds: float) -> str:
    """Time left, to two digits or so: 45s, 2m21s, 14m, 5h03m, 14h, 3d04h, 14d."""
    if not math.isfinite(seconds):
        return "unknown"
    rounded = int(seconds + 0.5)
    if rounded < 60:
        return f"{rounded}s"
    for size, unit, smaller, smaller_unit in (
        (60, "m", 1, "s"),
        (3600, "h", 60, "m"),
        (86400, "d", 3600, "h"),
    ):
        count = rounded // size
        if count < 10:
            return f"{count}{unit}{rounded % size // smaller:02d}{smaller_unit}"
        if size == 86400 or count < {60: 60, 3600: 24}[size]:
            return f"{count}{unit}"
    raise AssertionError("days have no end")


class ShortLog(LogFormat):
    """Counts trained iterations of this process; prints its lines where `speaks` (on the last
    rank).

    `clock()` is the time in seconds.
    """

    ends_with_line = True

    def __init__(
        self,
        config: Config,
        plan: Plan,
        speaks: bool,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._clock = clock
        self._config = config
        self.plan = plan
        self._speaks = speaks
        self._status = (
            speaks and config.logging.progress != "off" and log.has_status_line(sys.stdout)
        )
        self._scale_is_dynamic = config.precision.fp16 and config.precision.loss_scale is None
        self._lines = self._trained = self._tokens = 0
        self._seconds = 0.0  # of trained iterations
        self._started = self._after_first = self._clock()
        self._shown = 0.0
        self._loss_scale: float | None = None  # on the last line

    def add(self, result: IterationResult) -> None:
        """Take in an iteration."""
        if result.skipped == "user":
            return
        self._trained += 1
        self._tokens += result.global_batch_size * self._config.model.seq_length
        self._seconds += result.seconds
        if self._trained == 1:
            self._after_first = self._clock()

    def line_due(self, iteration: int) -> bool:
        """Whether this iteration has a line. The first and the last of a process have one too; the
        same on all ranks."""
        t = self._config.training
        last = iteration == self.plan.train_iters or bool(
            t.exit_interval and iteration % t.exit_interval == 0
        )
        return not self._lines or last or iteration % self._config.logging.log_interval == 0

    def eta(self, iteration: int) -> float | None:
        """Seconds until the end of training, from the pace since the first iteration of this
        process."""
        last = self.plan.train_iters
        remaining = last - iteration - self.plan.skips.count_in(iteration + 1, last)
        if not self._trained:
            return None
        if self._trained == 1:
            return remaining * self._seconds
        return remaining * (self._clock() - self._after_first) / (self._trained - 1)

    def line(self, result: IterationResult, interval: Interval, teraflops: float | None) -> None:
        """Print an iteration line; a loss scale that changes where it did, a batch size that grows
        always."""
        self._lines += 1
        scale_changed = self._scale_is_dynamic and result.loss_scale != self._loss_scale
        self._loss_scale = result.loss_scale
        if self._speaks:
            text = iteration_line(
                result,
                interval,
                self.eta(result.iteration),
                train_iters=self.plan.train_iters,
                seq_length=self._config.model.seq_length,
                teraflops=teraflops if self._config.logging.log_throughput else None,
                loss_scale=result.loss_scale if scale_changed else None,
                batch_size=None if self.plan.batch.is_constant else result.global_batch_size,
            )
            log.print_line(text)

    def status(self, iteration: int, seconds: float) -> None:
        """Show on a terminal how far the run is; the next line that is printed replaces it."""
        now = self._clock()
        if self._status and now - self._shown > REFRESH:
            self._shown = now
            text = status_line(iteration, self.plan.train_iters, seconds, self.eta(iteration))
            sys.stdout.write(f"{log.CLEAR_LINE}{text}")
            sys.stdout.flush()

    def evaluation(
        self,
        when: str,
        split: str,
        iteration: int,
        losses: Mapping[str, float],
        bits: float | None,
    ) -> str:
        """The line of an evaluation; `bits` per byte."""
        return evaluation_line(split, iteration, losses, bits)

    def memory(self, rank: int, iteration: int, report: Mapping[str, float]) -> str:
        """The line of a device's memory."""
        return memory_line(rank, iteration, report)

    def finish(self, reason: str | None, iteration: int, checkpoint: str) -> None:
        """Print the summary of this process, if it trained; `reason` to stop before the end of
        training."""
        if self._speaks and self._lines:
            rate = self._tokens / self._seconds if self._seconds else 0.0
            log.print_line(
                last_line(
                    reason,
                    iteration,
                    self.plan.train_iters,
                    self._clock() - self._started,
                    self._tokens,
                    rate,
                    checkpoint,
                )
            )
