"""The lines of --log-format megatron, aurora and internlm, and --progress on stderr."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime

from megatron import launcher, log
from megatron.config.plan.plan import Plan
from megatron.config.tree import Config
from megatron.training.launch.initialize import Runtime
from megatron.training.logging import aurora_format, flops, internlm_format, megatron_format
from megatron.training.logging.internlm_format import StepCounts
from megatron.training.logging.iteration import IterationResult, IterationRow


class MegatronLines:
    """--log-format megatron; the last rank prints the lines."""

    ends_with_line = False

    def __init__(
        self, config: Config, plan: Plan, counts: StepCounts | None, device: Runtime | None
    ):
        self._config = config
        self._plan = plan
        self._counts = counts  # of --log-format internlm
        self._runtime = device
        self._shape = flops.model_shape(config, plan)
        self._started = time.perf_counter()
        self._first: int | None = None  # the iteration that this process began at
        self._last = launcher.rank() == launcher.world_size() - 1

    def start(self) -> None:
        """Nothing: Megatron prints no lines here."""

    def add(self, result: IterationResult) -> None:
        """Remember where this process began."""
        if self._first is None:
            self._first = result.iteration - result.iterations

    def line_due(self, iteration: int) -> bool:
        """At multiples of --log-interval."""
        return iteration % self._config.logging.log_interval == 0

    def line(self, row: IterationRow, result: IterationResult) -> None:
        """Print the line, and with --progress the progress."""
        if not self._last:
            return
        print(self._text(row, result), flush=True)
        mode = self._config.logging.progress
        if mode == "on" or (mode == "auto" and sys.stderr.isatty()):
            i = row.interval
            rate = i.samples * row.seq_length / i.seconds if i.seconds else 0.0
            seconds = time.perf_counter() - self._started
            assert self._first is not None  # `add` comes before
            progress = megatron_format.progress_line(
                row.iteration, row.train_iters, self._first, seconds, rate
            )
            print(progress, file=sys.stderr, flush=True)

    def _text(self, row: IterationRow, result: IterationResult) -> str:
        return megatron_format.megatron_line(row, self._config.logging.log_throughput)

    def status(self, iteration: int, seconds: float) -> None:
        """Nothing: there is no status line."""

    def evaluation(
        self,
        place: str,
        split: str,
        iteration: int,
        losses: Mapping[str, float],
        bits: float | None,
    ) -> str:
        """The block of an evaluation, which Megatron calls validation for a test too."""
        suffix = split.removeprefix("final ").removeprefix("validation").removeprefix("test")
        return megatron_format.validation_block(place, losses, suffix)

    def memory(self, rank: int, iteration: int, report: Mapping[str, float]) -> str:
        """The line of a device's memory."""
        return megatron_format.memory_line(rank, iteration, report)

    def finish(self, reason: str | None, iteration: int, checkpoint: str) -> None:
        """Nothing: there is no summary."""

    def _rate(self, operations: float, seconds: float) -> float:
        if seconds <= 0:
            return 0.0
        return flops.teraflops_per_rank(operations, seconds, self._plan.world_size)


class AuroraLines(MegatronLines):
    """--log-format aurora."""

    def _text(self, row: IterationRow, result: IterationResult) -> str:
        i = row.interval
        tokens = i.samples * row.seq_length
        full = self._config.training.recompute == "full"
        counted = replace(
            row,
            lm_teraflops=self._rate(
                aurora_format.aurora_lm_flops_per_token(self._shape) * tokens, i.seconds
            ),
            ds_teraflops=self._rate(
                aurora_format.aurora_ds_flops_per_token(self._shape, full) * tokens, i.seconds
            ),
        )
        return aurora_format.aurora_line(counted, datetime.now())


class InternlmLines(MegatronLines):
    """--log-format internlm: the line of the last iteration of the interval."""

    def start(self) -> None:
        """Where each rank runs, and the sizes of the layout, as InternLM's demos begin."""
        p = self._config.parallel
        plan = self._plan
        runtime = self._runtime
        assert runtime is not None
        device = "cpu" if runtime.device.type == "cpu" else runtime.device.index
        here = (
            f"process rank {launcher.rank()} is bound to host:{socket.gethostname()} device: "
            f"{device}"
        )
        print(internlm_format.start_line("set_device", here, datetime.now()), flush=True)
        log.print_rank_0(
            internlm_format.start_line(
                "launch",
                "Distributed environment is initialized, data parallel size: "
                f"{plan.data_parallel_size}, pipeline parallel size: "
                f"{p.pipeline_model_parallel_size}, tensor parallel size: "
                f"{p.tensor_model_parallel_size}",
                datetime.now(),
            )
        )

    def _text(self, row: IterationRow, r: IterationResult) -> str:
        process = os.getpid()
        if r.skipped == "user":
            reason = r.reason or "user"
            return internlm_format.skipped_line(
                r.iteration - r.iterations, r.iteration - 1, reason, datetime.now(), process
            )
        full = self._config.training.recompute == "full"
        operations = internlm_format.flops_per_token(self._shape, full)
        assert self._counts is not None
        step = internlm_format.StepRow(
            r.iteration - 1,
            r.loss,
            self._rate(operations * r.global_batch_size * row.seq_length, r.seconds),
            self._counts.rates,
            r.learning_rate,
            r.loss_scale,
            r.grad_norm,
            r.global_batch_size // self._plan.batch.divisor,
            (r.consumed_samples - r.skipped_samples) * row.seq_length,
            self._counts.failed_updates,
            r.adam_beta2,
            r.fwd_bwd_seconds,
            r.packed or {},
            r.line_metrics,
        )
        return internlm_format.internlm_line(step, datetime.now(), process)


FORMATS = {"megatron": MegatronLines, "aurora": AuroraLines, "internlm": InternlmLines}
