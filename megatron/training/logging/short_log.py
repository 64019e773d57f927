"""The state behind --log-format short: which iterations have a line, the time left, the status
line. It asks no device."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping

from megatron import log
from megatron.config.plan.plan import Plan
from megatron.config.tree import Config
from megatron.training.logging import short_format
from megatron.training.logging.iteration import Interval, LogFormat
from megatron.training.result import IterationResult

REFRESH = 0.2  # seconds between two versions of the status line


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
            text = short_format.iteration_line(
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
            text = short_format.status_line(
                iteration, self.plan.train_iters, seconds, self.eta(iteration)
            )
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
        return short_format.evaluation_line(split, iteration, losses, bits)

    def memory(self, rank: int, iteration: int, report: Mapping[str, float]) -> str:
        """The line of a device's memory."""
        return short_format.memory_line(rank, iteration, report)

    def finish(self, reason: str | None, iteration: int, checkpoint: str) -> None:
        """Print the summary of this process, if it trained; `reason` to stop before the end of
        training."""
        if self._speaks and self._lines:
            rate = self._tokens / self._seconds if self._seconds else 0.0
            log.print_line(
                short_format.last_line(
                    reason,
                    iteration,
                    self.plan.train_iters,
                    self._clock() - self._started,
                    self._tokens,
                    rate,
                    checkpoint,
                )
            )
