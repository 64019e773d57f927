"""--log-format internlm, and the rates of tokens on its lines.

Fields, their order and meaning: InternLM's source and the logs of the 7B and 20B demos. Steps
count from 0 there.
"""

from __future__ import annotations

import math
import os
import socket
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from megatron import launcher, log
from megatron.config.model import ModelConfig
from megatron.config.plan.plan import Plan
from megatron.config.tree import Config
from megatron.training.hook import Hook
from megatron.training.launch.initialize import Runtime
from megatron.training.logging.iteration import Interval
from megatron.training.logging.line_format import LineFormat
from megatron.training.result import IterationResult

WINDOW = 50  # steps of tgs_SMA
BLOCKS = (10, 50)  # steps of the last_tgs_N
# Where InternLM's lines come from in its own source, as the 20B demo's log names the places;
# scripts look for them.
_STEP = "[training_internlm.py, line 600, in record_current_batch_training_metrics]"
_SOURCE_LINES = {
    "set_device": "parallel_context.py:555",
    "launch": "launch.py:409",
    "_partition_param_list": "hybrid_zero_optim.py:268",
}
_FILLED = ("num_samples_in_batch", "largest_length", "largest_batch", "smallest_batch")


def flops_per_token(m: ModelConfig, padded_vocab_size: int, recompute: bool) -> int:
    """InternLM's count: k L ((8 + 4 m) h^2 + 4 s h) + 6 h V with m = 1.5 x MLP ratio; k is 4 with
    any recompute, else 3.

    A width that is 8/3 h rounded up to a multiple of 256 counts as 8/3; attention counts the whole
    square of s.
    """
    h = m.hidden_size
    f = m.ffn
    mlp = 16 * h * h if f == -(-int(h * 8 / 3) // 256) * 256 else 6 * f * h
    layer = 8 * h * h + mlp + 4 * m.seq_length * h
    return (4 if recompute else 3) * m.num_layers * layer + 6 * h * padded_vocab_size


@dataclass
class TokenRates:
    """Tokens per rank and second: of the last step, of all since the start, their mean, over a
    window, over complete blocks."""

    tokens: float = 0.0
    seconds: float = 0.0
    rates: float = 0.0
    steps: int = 0
    window: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    blocks: dict[int, float] = field(default_factory=lambda: dict.fromkeys(BLOCKS, 0))

    def add(self, tokens: float, seconds: float) -> dict[str, float]:
        """Take in a step of so many tokens per rank; the rates by name, to two digits."""
        rate = tokens / seconds
        self.tokens = self.tokens + tokens
        self.seconds = self.seconds + seconds
        self.rates = self.rates + rate
        self.steps = self.steps + 1
        self.window.append((tokens, seconds))
        for size in BLOCKS:
            if self.steps % size == 0:
                self.blocks[size] = _over(list(self.window)[-size:])
        rates = {
            "tgs (tokens/gpu/second)": rate,
            "tgs/last_tgs_1": rate,
            "tgs/tgs_all": self.tokens / self.seconds,
            "tgs/tgs_avg": self.rates / self.steps,
            "tgs/tgs_SMA": _over(self.window),
        }
        rates |= {f"tgs/last_tgs_{size}": value for size, value in self.blocks.items()}
        return {name: round(value, 2) for name, value in rates.items()}


def _over(steps: Any) -> float:
    return sum(tokens for tokens, _ in steps) / sum(seconds for _, seconds in steps)


class StepCounts(Hook):
    """What InternLM's line and the metrics have where subsets are counted: rates of tokens, and
    the number of updates that were not made."""

    before = ("IterationLog",)

    def __init__(self, seq_length: int, world_size: int):
        self._tokens = seq_length / world_size  # of a sample on a rank
        self._rates = TokenRates()
        self.rates: Mapping[str, float] = {}
        self.failed_updates = 0

    def add(self, r: IterationResult) -> None:
        """Take in one iteration."""
        if r.skipped != "user":
            self.failed_updates += r.skipped is not None
            self.rates = self._rates.add(r.global_batch_size * self._tokens, r.seconds)

    def after_step(self, result: IterationResult) -> None:
        self.add(result)
        result.counts.update(
            {
                **{name: value for name, value in self.rates.items() if name.startswith("tgs/")},
                "fwd_bwd_time": result.fwd_bwd_seconds,
                "inf_nan_skip_batches": self.failed_updates,
                "adam_beta2": result.adam_beta2,
            }
        )


def start_line(function: str, text: str, now: datetime) -> str:
    """A line at the start of a run, as in InternLM's demos; `function` is InternLM's."""
    stamp = f"{now:%Y-%m-%d %H:%M:%S},{now.microsecond // 1000:03d}"
    return f"{stamp} INFO {_SOURCE_LINES[function]} in {function} -- {text}"


def print_partition(elements: Sequence[int]) -> None:
    """How many elements of its data-parallel group's parameters each rank owns."""
    text = f"Number of elements on ranks: {elements}, rank:0"
    log.print_rank_0(start_line("_partition_param_list", text, datetime.now()))


def internlm_line(
    r: IterationResult,
    steps: StepCounts,
    *,
    teraflops: float,
    micro_num: int,
    consumed_tokens: int,
    now: datetime,
    process: int,
) -> str:
    """The line of a trained step, the last of `steps`."""
    loss = math.nan if r.loss is None else r.loss
    counts: Mapping[str, Any] = r.counts
    fields: dict[str, Any] = {
        "tflops": teraflops,
        "step": r.iteration - 1,
        "loss": loss,
        **steps.rates,
        "lr": r.learning_rate,
        "loss_scale": r.loss_scale,
        "grad_norm": {"0_default": r.grad_norm},
        "micro_num": micro_num,
        "num_consumed_tokens": consumed_tokens,
        "inf_nan_skip_batches": steps.failed_updates,
    }
    fields |= {name: counts[name] for name in _FILLED if name in counts}
    if r.adam_beta2 is not None:
        fields["adam_beta2"] = r.adam_beta2
    fields["fwd_bwd_time"] = round(r.fwd_bwd_seconds, 2)
    if "acc" in counts:
        fields["acc"] = round(counts["acc"], 4)
    metric = counts.get("loss_from_metric", loss)  # never smoothed
    fields["perplexity"] = round(math.exp(metric), 4) if metric < 700.0 else math.inf
    for kind, digits in (("acc/", 4), ("tokens/", 0)):
        fields |= {
            name: round(value or 0.0, digits) if digits else int(value)
            for name, value in counts.items()
            if name.startswith(kind)
        }
    fields["loss_from_metric"] = round(metric, 4)
    fields |= {
        name: math.nan if value is None else round(value, 4)
        for name, value in counts.items()
        if name.startswith("loss/")
    }
    fields |= {
        name: math.nan if value is None else float(f"{value:.4g}")
        for name, value in r.line_metrics.items()
    }
    stamp = now.astimezone().isoformat(timespec="milliseconds")
    shown = "".join(f"{name}={value} " for name, value in fields.items())
    return f"{stamp} INFO {_STEP} - pid={process} : {shown}"


def skipped_line(first: int, last: int, reason: str, now: datetime, process: int) -> str:
    """The line of steps that are not trained."""
    stamp = now.astimezone().isoformat(timespec="milliseconds")
    steps = str(first) if first == last else f"{first}-{last}"
    return (
        f"{stamp} INFO {_STEP} - pid={process} : Skip batch count:`{steps}`... skipped=1 "
        f"reason={reason} step={first}-{last}"
    )


def failed_line(step: int, now: datetime, process: int) -> str:
    """The line of a step that was computed and whose update was not made."""
    stamp = now.astimezone().isoformat(timespec="milliseconds")
    return f"{stamp} WARNING - pid={process} : Warning: skip parameter update at step {step}."


class InternlmLines(LineFormat):
    """--log-format internlm: the line of the last iteration of the interval."""

    def __init__(self, config: Config, plan: Plan, runtime: Runtime | None):
        super().__init__(config, plan, runtime)
        self._counts = StepCounts(config.model.seq_length, plan.world_size)

    def add(self, result: IterationResult) -> None:
        """Count the iteration."""
        super().add(result)
        self._counts.add(result)

    def start(self) -> None:
        """Where each rank runs, and the sizes of the layout, as InternLM's demos begin."""
        p = self._config.parallel
        plan = self.plan
        runtime = self._runtime
        assert runtime is not None
        device = "cpu" if runtime.device.type == "cpu" else runtime.device.index
        host = (
            f"process rank {launcher.rank()} is bound to host:{socket.gethostname()} device: "
            f"{device}"
        )
        print(start_line("set_device", host, datetime.now()), flush=True)
        log.print_rank_0(
            start_line(
                "launch",
                "Distributed environment is initialized, data parallel size: "
                f"{plan.data_parallel_size}, pipeline parallel size: "
                f"{p.pipeline_model_parallel_size}, tensor parallel size: "
                f"{p.tensor_model_parallel_size}",
                datetime.now(),
            )
        )

    def _text(self, r: IterationResult, interval: Interval, teraflops: float | None) -> str:
        now = datetime.now()
        process = os.getpid()
        if r.skipped == "user":
            reason = r.reason or "user"
            return skipped_line(r.iteration - r.iterations, r.iteration - 1, reason, now, process)
        m = self._config.model
        seq_length = m.seq_length
        full = self._config.training.recompute == "full"
        per_token = flops_per_token(m, self.plan.padded_vocab_size, full)
        operations = per_token * r.global_batch_size * seq_length
        failed = "" if r.skipped is None else f"{failed_line(r.iteration - 1, now, process)}\n"
        return failed + internlm_line(
            r,
            self._counts,
            teraflops=self._rate(operations, r.seconds),
            micro_num=r.global_batch_size // self.plan.batch.divisor,
            consumed_tokens=(r.consumed_samples - r.skipped_samples) * seq_length,
            now=now,
            process=process,
        )
