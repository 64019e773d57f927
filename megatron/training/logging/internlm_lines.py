"""The lines of --log-format internlm."""

from __future__ import annotations

import os
import socket
from datetime import datetime

from megatron import launcher, log
from megatron.training.logging import internlm_format
from megatron.training.logging.iteration import IterationResult, IterationRow
from megatron.training.logging.line_format import LineFormat


class InternlmLines(LineFormat):
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
