"""Where the results of an iteration go: log line, metrics file, TensorBoard, Weights & Biases."""

from __future__ import annotations

import json
import math
import os
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from megatron import device as devices
from megatron import launcher, log, optional
from megatron.config.moe import PER_LAYER
from megatron.config.plan.plan import Plan
from megatron.config.tree import Config
from megatron.parallel.collectives import gather_objects
from megatron.parallel.context import Axis
from megatron.timers import Timers
from megatron.training.launch.initialize import Runtime
from megatron.training.logging import flops, megatron_format, short_format
from megatron.training.logging.output import OutputFile
from megatron.training.logging.points import Board, Boards, given
from megatron.training.logging.short_log import ShortLog
from megatron.training.spikes.detector import Finding

# Megatron's tags of what megatron.device.memory_report measures.
_MEMORY_TAGS = {
    "reserved": "mem-reserved-bytes",
    "allocated": "mem-allocated-bytes",
    "allocations": "mem-allocated-count",
}


@dataclass
class IterationResult:
    """What one iteration did. `skipped`: None, `user` (its data was not read), or no update was
    made: `overflow` (fp16), `spike` or `nonfinite` (--spike-action)."""

    iteration: int
    global_batch_size: int
    consumed_samples: int
    learning_rate: float  # of the next step, as Megatron logs it
    loss_scale: float
    seconds: float
    loss: float | None = None
    grad_norm: float | None = None
    num_zeros: int | None = None
    params_norm: float | None = None
    skipped: str | None = None
    # how many at once, up to this one; more than one only where data are not read
    iterations: int = 1
    reason: str | None = None  # why the data were not read: user, spike ...
    # whose data were not read, in the whole run, and their samples
    skipped_iterations_total: int = 0
    skipped_samples: int = 0
    finding: Finding = Finding()
    packed: Mapping[str, Any] | None = None  # counts of subsets and of packed rows, by name
    metrics: Mapping[str, float | None] = field(default_factory=dict)  # of forward_step
    fwd_bwd_seconds: float = 0.0  # forward and backward with the sum of gradients
    adam_beta2: float | None = None


@dataclass(frozen=True)
class Writers:
    """The files of the last rank, where they are asked for."""

    boards: Boards
    metrics: OutputFile | None


def open_writers(config: Config) -> Writers:
    """Open them; on other ranks there are none. Raises ValueError or OSError where that cannot
    be."""
    logging = config.logging
    boards: list[Board] = []
    metrics = None
    if launcher.rank() == launcher.world_size() - 1:
        if logging.tensorboard_dir:
            if log.shows_details():
                log.print_rank_last("> setting tensorboard ...")
            tensorboard = optional.load("megatron.training.logging.tensorboard")
            boards.append(
                tensorboard.TensorBoard(logging.tensorboard_dir, logging.tensorboard_queue_size)
            )
        if logging.wandb_project:
            wandb = optional.load("megatron.training.logging.wandb")
            boards.append(
                wandb.WandB(
                    logging.wandb_project,
                    logging.wandb_exp_name,
                    logging.wandb_entity,
                    logging.wandb_save_dir or os.path.join(config.checkpoint.save or ".", "wandb"),
                )
            )
        if logging.metrics_file:
            metrics = OutputFile(logging.metrics_file, "--metrics-file")
    return Writers(Boards(boards, logging.is_short), metrics)


class TrainingLog:
    """Gathers iterations into intervals and writes them down. Lines and files are the last rank's,
    as Megatron's."""

    def __init__(
        self,
        config: Config,
        plan: Plan,
        timers: Timers,
        world: Axis,
        writers: Writers | None = None,
        runtime: Runtime | None = None,
    ):
        self._config = config
        self._plan = plan
        self._timers = timers
        self._world = world
        self._interval = megatron_format.Interval()
        self._failed_updates = 0
        self._tgs = {}
        self._counts_subsets = config.logging.counts_subsets(config.data.packed_samples)
        if self._counts_subsets:
            self._internlm = optional.load("megatron.training.logging.internlm_format")
            self._rates_of_tokens = self._internlm.TokenRates()
        if config.logging.log_format == "aurora":
            self._aurora = optional.load("megatron.training.logging.aurora_format")
        self._last = launcher.rank() == launcher.world_size() - 1
        self._shape = model_shape(config, plan)
        self._started = time.perf_counter()
        self._first: int | None = None
        writers = writers or open_writers(config)
        self._boards = writers.boards
        self._metrics = writers.metrics
        self._runtime = runtime
        self._memory_told = False
        self._latest: IterationResult | None = None
        self._short = ShortLog(config, plan, self._last) if config.logging.is_short else None

    @property
    def intervals(self) -> tuple[int, ...]:
        """Something is written at multiples of these; the same on all ranks."""
        logging = self._config.logging
        return (
            1 if logging.metrics_file else logging.log_interval,
            logging.log_interval,
            *((logging.tensorboard_log_interval,) if logging.has_boards else ()),
        )

    def start(self, seconds: float, backend: str) -> None:
        """The lines that end Megatron's initialisation, and the arguments as TensorBoard text;
        `backend` is that of the process groups."""
        log.detail(f"time to initialize megatron (seconds): {seconds:.3f}")
        log.detail(megatron_format.datetime_line("after megatron is initialized"))
        if self._config.logging.log_format == "internlm":
            self._tell_layout()
        if self._boards:
            argument_dump = optional.load("megatron.config.megatron_compat.argument_dump")
            self._boards.arguments(
                argument_dump.dumped_values(self._config, self._plan, backend), 0
            )

    def _tell_layout(self) -> None:
        """Where each rank runs, and the sizes of the layout, as InternLM's demos begin."""
        p = self._config.parallel
        plan = self._plan
        runtime = self._runtime
        device = "cpu" if runtime.device.type == "cpu" else runtime.device.index
        here = (
            f"process rank {launcher.rank()} is bound to host:{socket.gethostname()} device: "
            f"{device}"
        )
        print(self._internlm.start_line("set_device", here, datetime.now()), flush=True)
        log.print_rank_0(
            self._internlm.start_line(
                "launch",
                "Distributed environment is initialized, data parallel size: "
                f"{plan.data_parallel_size}, pipeline parallel size: "
                f"{p.pipeline_model_parallel_size}, tensor parallel size: "
                f"{p.tensor_model_parallel_size}",
                datetime.now(),
            )
        )

    def add(self, result: IterationResult) -> None:
        """Take in one iteration; print its line when the interval is full."""
        if self._first is None:
            self._first = result.iteration - result.iterations
        i = self._interval
        if result.skipped == "user":
            i.user_skips += result.iterations
            i.reasons.add(result.reason or "user")
        else:
            i.trained += 1
            i.samples += result.global_batch_size
            i.seconds += result.seconds
            if result.skipped is None and result.loss is not None:
                i.losses.append(result.loss)
                i.add_metrics(_of_line(result.metrics))
            if result.skipped:
                self._failed_updates += 1
                i.overflow_skips += result.skipped == "overflow"
                if result.skipped != "overflow":
                    i.spike_skips += 1
                    i.reasons.add(result.skipped)
                i.nan_iterations += result.loss is not None and not math.isfinite(result.loss)
            if self._counts_subsets:
                self._tgs = self._rates_of_tokens.add(
                    result.global_batch_size * self._shape.seq_length / self._plan.world_size,
                    result.seconds,
                )
            if self._short:
                self._short.count(result.global_batch_size, result.seconds)
        self._write_metrics(result)
        self._write_points(result)
        self._latest = result
        if self._line_due(result.iteration):
            self._print(result)
            self._tell_memory(result.iteration)
            self._interval = megatron_format.Interval()
            if self._config.logging.timing_log_level > 0:
                self.timers(points_at=result.iteration)
        elif self._short:
            self._short.status(result.iteration, result.seconds)

    def _line_due(self, iteration: int) -> bool:
        """Does the interval end with this iteration? The same on all ranks."""
        if self._short:
            return self._short.line_due(iteration)
        return iteration % self._config.logging.log_interval == 0

    def leave(self) -> None:
        """No iteration follows: with --log-format short the last one has a line, too."""
        i = self._interval
        if self._short and self._latest and (i.trained or i.user_skips):
            self._print(self._latest)
            self._interval = megatron_format.Interval()

    def finish(self, reason: str | None, iteration: int, checkpoint: str) -> None:
        """The summary of --log-format short; `reason` to stop before the end of training."""
        if self._short:
            self._short.finish(reason, iteration, checkpoint)

    def go_back(self) -> None:
        """The iterations since the last line will not count."""
        self._interval = megatron_format.Interval()
        self._latest = None

    def _rate(self, flops_per_iteration: float, seconds: float) -> float | None:
        return (
            flops.teraflops_per_rank(flops_per_iteration, seconds, self._plan.world_size)
            if seconds > 0
            else None
        )

    def _rates(self, tokens: int) -> tuple[float | None, float | None, float | None]:
        """TFLOP/s of the interval a rank: ours, and with --log-format aurora its two."""
        i = self._interval
        shape = self._shape
        if i.seconds <= 0:
            return None, None, None
        ours = self._rate(flops.flops_per_iteration(shape, i.samples), i.seconds)
        if self._config.logging.log_format != "aurora":
            return ours, None, None
        full = self._config.training.recompute == "full"
        return (
            ours,
            self._rate(self._aurora.aurora_lm_flops_per_token(shape) * tokens, i.seconds),
            self._rate(self._aurora.aurora_ds_flops_per_token(shape, full) * tokens, i.seconds),
        )

    def _print(self, result: IterationResult) -> None:
        if not self._last and not self._short:
            return
        config = self._config
        i = self._interval
        shape = self._shape
        tokens = i.samples * shape.seq_length
        row = megatron_format.IterationRow(
            result.iteration,
            self._plan.train_iters,
            result.consumed_samples,
            shape.seq_length,
            result.learning_rate,
            result.global_batch_size,
            result.loss_scale,
            None if result.skipped else result.grad_norm,
            i,
            self._plan.world_size,
            *self._rates(tokens),
            num_zeros=result.num_zeros,
            params_norm=result.params_norm,
        )
        if self._short:
            self._short.line(row)
            return
        if config.logging.log_format == "internlm":
            print(self._internlm_line(result), flush=True)
        elif config.logging.log_format == "aurora":
            print(self._aurora.aurora_line(row, datetime.now()), flush=True)
        else:
            print(megatron_format.megatron_line(row, config.logging.log_throughput), flush=True)
        mode = config.logging.progress
        if mode == "on" or (mode == "auto" and sys.stderr.isatty()):
            seconds = time.perf_counter() - self._started
            print(
                megatron_format.progress_line(
                    result.iteration,
                    self._plan.train_iters,
                    self._first,
                    seconds,
                    tokens / i.seconds if i.seconds else 0.0,
                ),
                file=sys.stderr,
                flush=True,
            )

    def _internlm_line(self, r: IterationResult) -> str:
        """The line of the last iteration of the interval."""
        process = os.getpid()
        plan = self._plan
        full = self._config.training.recompute == "full"
        if r.skipped == "user":
            return self._internlm.skipped_line(
                r.iteration - r.iterations,
                r.iteration - 1,
                r.reason or "user",
                datetime.now(),
                process,
            )
        tokens = r.global_batch_size * self._shape.seq_length
        count = self._internlm.flops_per_token(self._shape, full) * tokens
        return self._internlm.internlm_line(
            self._internlm.StepRow(
                r.iteration - 1,
                r.loss,
                self._rate(count, r.seconds) or 0.0,
                self._tgs,
                r.learning_rate,
                r.loss_scale,
                r.grad_norm,
                r.global_batch_size // plan.batch.divisor,
                (r.consumed_samples - r.skipped_samples) * self._shape.seq_length,
                self._failed_updates,
                r.adam_beta2,
                r.fwd_bwd_seconds,
                r.packed or {},
                _of_line(r.metrics),
            ),
            datetime.now(),
            process,
        )

    def _tell_memory(self, iteration: int) -> None:
        """Once, from every rank that is first among those that hold the same weights; nothing on
        CPU."""
        if self._memory_told or self._runtime is None or self._runtime.ctx.dp.rank:
            return
        self._memory_told = True
        report = devices.memory_report(self._runtime.device)
        if report:
            line = short_format.memory_line if self._short else megatron_format.memory_line
            log.print_line(line(launcher.rank(), iteration, report))

    def _write_metrics(self, r: IterationResult) -> None:
        if self._metrics is None:
            return
        trained = r.skipped != "user"
        tokens = r.global_batch_size * self._shape.seq_length
        rate = (
            self._rate(flops.flops_per_iteration(self._shape, r.global_batch_size), r.seconds)
            if trained
            else None
        )
        row = {
            "iteration": r.iteration,
            "lm_loss": _finite(r.loss),
            "grad_norm": _finite(r.grad_norm),
            "learning_rate": r.learning_rate,
            "consumed_samples": r.consumed_samples,
            "consumed_tokens": r.consumed_samples * self._shape.seq_length,
            "elapsed_ms": round(r.seconds * 1000.0, 3),
            "tokens_per_second": round(tokens / r.seconds, 3)
            if trained and r.seconds > 0
            else None,
            "tflops": None if rate is None else round(rate, 6),
            "loss_scale": r.loss_scale,
            "global_batch_size": r.global_batch_size,
            "skipped": int(r.skipped is not None),
            "skip_reason": r.reason or r.skipped,
            "skipped_iterations_total": r.skipped_iterations_total,
            "skipped_samples": r.skipped_samples,
            "spike": r.finding.kind or None,
            "spike_sigma": round(r.finding.sigma, 3),
        } | {key: _finite(value) for key, value in self._more(r).items()}
        taken = row.keys() & r.metrics.keys()
        if taken:
            raise ValueError(
                f"forward_step: --metrics-file has a column {min(taken)} already; give this metric "
                "another name [metric-name-taken]"
            )
        row |= {name: _finite(value) for name, value in r.metrics.items()}
        self._metrics.write(json.dumps(row) + "\n")

    def _more(self, r: IterationResult) -> dict[str, Any]:
        """What is logged where subsets are counted: their numbers, InternLM's rates of tokens, and
        what its line has."""
        if r.packed is None:
            return {}
        rates = {name: value for name, value in self._tgs.items() if name.startswith("tgs/")}
        return {
            **r.packed,
            **rates,
            "fwd_bwd_time": r.fwd_bwd_seconds,
            "inf_nan_skip_batches": self._failed_updates,
            "adam_beta2": r.adam_beta2,
        }

    def _write_points(self, r: IterationResult) -> None:
        """The scalars of an iteration for TensorBoard and Weights & Biases."""
        logging = self._config.logging
        n = r.iteration
        if self._boards and r.finding.spike:
            self._boards.scalar("spike", r.finding.sigma, n, r.consumed_samples)
        if not self._boards or n % logging.tensorboard_log_interval:
            return
        for tag, value in given(self._training_points(r)):
            self._boards.scalar(tag, value, n, r.consumed_samples)
        points = {**self._memory_points(), **self._more(r), **self._speed_points(r), **r.metrics}
        for tag, value in given(points):
            self._boards.scalar(tag, value, n)

    def _training_points(self, r: IterationResult) -> dict[str, float | None]:
        """What Megatron writes against iterations and against samples."""
        logging = self._config.logging
        asked = {
            "learning-rate": (logging.log_learning_rate_to_tensorboard, r.learning_rate),
            "batch-size": (logging.log_batch_size_to_tensorboard, r.global_batch_size),
            "lm loss": (r.skipped is None, r.loss),
            "skipped": (r.skipped not in (None, "overflow"), 1),
            "loss-scale": (logging.log_loss_scale_to_tensorboard, r.loss_scale),
            "world-size": (logging.log_world_size_to_tensorboard, self._plan.world_size),
            "grad-norm": (True, r.grad_norm),
            "num-zeros": (True, r.num_zeros),
            "params-norm": (True, r.params_norm),
        }
        return {tag: value for tag, (wanted, value) in asked.items() if wanted}

    def _memory_points(self) -> dict[str, float]:
        if not (self._config.logging.log_memory_to_tensorboard and self._runtime):
            return {}
        report = devices.memory_report(self._runtime.device)
        return {_MEMORY_TAGS[key]: value for key, value in report.items() if key in _MEMORY_TAGS}

    def _speed_points(self, r: IterationResult) -> dict[str, float]:
        if r.skipped == "user" or r.seconds <= 0:
            return {}
        points = {}
        logging = self._config.logging
        if self._short:
            tokens = r.global_batch_size * self._shape.seq_length
            points["tokens-per-second"] = tokens / r.seconds
        if logging.log_timers_to_tensorboard or self._short:
            points["iteration-time"] = r.seconds
            if logging.log_throughput:
                operations = flops.flops_per_iteration(self._shape, r.global_batch_size)
                points["throughput"] = self._rate(operations, r.seconds)
        return points

    def validation(
        self,
        prefix: str,
        losses: dict[str, float],
        iteration: int,
        samples: int,
        suffix: str = "",
        *,
        split: str = "validation",
        final: bool = False,
        bits_per_byte: float | None = None,
    ) -> None:
        """The lines and points of an evaluation; `split` is validation or test, `suffix` says of
        which of several sets, `final` that no iteration follows (it is on other samples than the
        last one of --eval-interval), `bits_per_byte` is there where the data say how many bytes
        their tokens are."""
        if self._short:
            name = f"{'final ' if final and split == 'validation' else ''}{split}{suffix}"
            log.print_rank_last(
                short_format.evaluation_line(name, iteration, losses, bits_per_byte)
            )
        else:
            log.print_rank_last(megatron_format.validation_block(prefix, losses, suffix))
        for key, loss in losses.items():
            perplexity = short_format.perplexity(loss)
            if self._metrics:
                row = {
                    "iteration": iteration,
                    "split": f"{split}{suffix}",
                    key.replace(" ", "_"): loss,
                    "perplexity": perplexity,
                    "bits_per_byte": bits_per_byte,
                    "consumed_samples": samples,
                }
                self._metrics.write(
                    json.dumps(
                        {
                            name: _finite(value) if isinstance(value, float) else value
                            for name, value in row.items()
                        }
                    )
                    + "\n"
                )
            ppl = self._short or self._config.logging.log_validation_ppl_to_tensorboard
            self._boards.evaluation(
                key,
                f"{split}{suffix}",
                iteration,
                samples,
                {
                    "loss": loss,
                    "perplexity": perplexity if ppl else None,
                    "bits_per_byte": bits_per_byte,
                },
            )

    def task_scores(self, iteration: int, samples: int, scores: Mapping[str, float]) -> None:
        """The line, the metrics and the points of the scores of --eval-tasks, by task and
        metric."""
        values = " | ".join(f"{name} {score:.4f}" for name, score in scores.items())
        log.print_rank_last(f" tasks at iteration {iteration} | {values}")
        if self._metrics:
            row = {"iteration": iteration, "split": "tasks", "consumed_samples": samples}
            row |= {name: _finite(score) for name, score in scores.items()}
            self._metrics.write(json.dumps(row) + "\n")
        for name, score in scores.items():
            self._boards.scalar(f"tasks/{name}", score, iteration, samples)

    def timers(self, names: list[str] | None = None, points_at: int | None = None) -> None:
        """Print the timers block of these names (all, without names) over all ranks, and start them
        again.

        With --log-format short only where --timing-log-level asks for timers.
        """
        mine = self._timers.pop(names)
        if self._short and not self._config.logging.timing_log_level:
            return
        ranks = gather_objects(mine, self._world)
        order = list(dict.fromkeys(name for rank in ranks for name in rank))
        text = megatron_format.timers_block(order, ranks, self._config.logging.timing_log_option)
        if text:
            log.print_rank_last(text)
        if points_at is not None and self._config.logging.log_timers_to_tensorboard:
            for name in order:
                self._boards.scalar(f"{name}-time", max(r.get(name, 0.0) for r in ranks), points_at)

    def flush(self) -> None:
        """Write what is still in memory."""
        self._boards.flush()

    def close(self) -> None:
        """Write what is still in memory; no more will come."""
        self._boards.close()
        if self._metrics:
            self._metrics.close()


def model_shape(config: Config, plan: Plan) -> flops.TransformerShape:
    """The sizes that floating-point operations depend on."""
    m = config.model
    return flops.TransformerShape(
        num_layers=m.num_layers,
        hidden_size=m.hidden_size,
        ffn_hidden_size=m.ffn,
        num_attention_heads=m.num_attention_heads,
        num_query_groups=m.query_groups,
        kv_channels=m.head_dim,
        gated=m.gated,
        vocab_size=plan.padded_vocab_size,
        seq_length=m.seq_length,
        active_width=sum(map(m.active_width, range(m.num_layers))),
        router_outputs=len(m.moe_layers) * ((m.num_experts or 0) + m.moe_shared_expert_gate),
    )


def _of_line(metrics: Mapping[str, float | None]) -> dict[str, float | None]:
    """Those that the log line has: no numbers of single MoE layers."""
    return {name: value for name, value in metrics.items() if not name.startswith(PER_LAYER)}


def _finite(value: float | None) -> Any:
    """JSON has no NaN: such numbers are written as strings."""
    return value if value is None or math.isfinite(value) else str(value)
