"""Scalars of a run by tag and iteration for TensorBoard and Weights & Biases."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from megatron import log
from megatron.config.logging import LoggingConfig
from megatron.config.tree import Config
from megatron.features.boards.flags import BoardFlags
from megatron.training.hook import Hook
from megatron.training.logging.iteration import ResultWriter
from megatron.training.result import IterationResult
from megatron.training.run import Run

# What Megatron's tags are called with --log-format short.
GROUPED = {
    "lm loss": "loss/train",  # first by letter, which is how TensorBoard sorts
    "grad-norm": "train/grad_norm",
    "learning-rate": "train/learning_rate",
    "loss-scale": "train/loss_scale",
    "batch-size": "train/batch_size",
    "num-zeros": "train/num_zeros",
    "params-norm": "train/params_norm",
    "skipped": "train/skipped",
    "iteration-time": "perf/iteration_time",
    "tokens-per-second": "perf/tokens_per_second",
    "throughput": "perf/tflops_per_rank",
    "world-size": "perf/world_size",
    "mem-reserved-bytes": "memory/reserved_bytes",
    "mem-allocated-bytes": "memory/allocated_bytes",
    "mem-allocated-count": "memory/allocations",
}
# Megatron's tags of what megatron.device.memory_report measures.
MEMORY = {
    "reserved": "mem-reserved-bytes",
    "allocated": "mem-allocated-bytes",
    "allocations": "mem-allocated-count",
}
EVALUATION_ENDINGS = {"loss": "", "perplexity": " ppl", "bits_per_byte": " bits per byte"}


def grouped(tag: str) -> str:
    """The name of Megatron's `tag` with --log-format short; tags without a group belong to
    `train`."""
    if tag not in GROUPED and tag.endswith("-time"):
        return f"timers/{tag.removesuffix('-time')}"
    return GROUPED.get(tag) or (tag if "/" in tag else f"train/{tag}")


class Board(Protocol):
    """Stores scalars. `samples`: consumed samples, for a second curve against them."""

    def start(self, iteration: int, against_samples: bool) -> None:
        """Points after `iteration` follow, those of a run that is resumed or went back to it;
        `against_samples`: some have samples for steps."""

    def arguments(self, values: Mapping[str, Any], iteration: int) -> None:
        """Store every argument."""

    def scalar(self, tag: str, value: float, iteration: int, samples: int | None = None) -> None:
        """Store one value under Megatron's `tag`."""

    def flush(self) -> None:
        """Write what is still in memory."""

    def close(self) -> None:
        """Write what is still in memory; no more will come."""


class Boards(ResultWriter):
    """All boards of a run, in one call each. `world_size` is a scalar of its own if requested."""

    takes_points = True

    def __init__(
        self,
        boards: Sequence[Board],
        flags: BoardFlags,
        logging: LoggingConfig,
        seq_length: int = 0,
        world_size: int = 1,
    ):
        self._boards = list(boards)
        self._flags = flags
        self._logging = logging
        self._seq_length = seq_length
        self._world_size = world_size

    def start(self, iteration: int) -> None:
        """Points after `iteration` follow, whatever was written before."""
        for board in self._boards:
            board.start(iteration, not self._logging.is_short)

    def scalar(self, tag: str, value: float, iteration: int, samples: int | None = None) -> None:
        """Store one value under Megatron's `tag`, or under its group; then without samples."""
        if self._logging.is_short:
            tag = grouped(tag)
            samples = None
        for board in self._boards:
            board.scalar(tag, value, iteration, samples)

    def arguments(self, values: Callable[[], Mapping[str, Any]]) -> None:
        """As ResultWriter's."""
        dumped = values()
        for board in self._boards:
            board.arguments(dumped, 0)

    def iteration(
        self,
        r: IterationResult,
        teraflops: float | None,
        memory: Callable[[], Mapping[str, float]],
    ) -> None:
        """As ResultWriter's, every --tensorboard-log-interval iterations; `r.points` at once."""
        n = r.iteration
        for tag, point in r.points.items():
            self.scalar(tag, point, n, r.consumed_samples)
        if n % self._flags.tensorboard_log_interval:
            return
        for tag, value in self._training_points(r).items():
            if value is not None:
                self.scalar(tag, value, n, r.consumed_samples)
        points = {**r.counts, **self._speed_points(r, teraflops), **r.metrics}
        if self._flags.log_memory_to_tensorboard:
            points |= {MEMORY[key]: value for key, value in memory().items() if key in MEMORY}
        for tag, value in points.items():
            if value is not None:
                self.scalar(tag, value, n)

    def _training_points(self, r: IterationResult) -> dict[str, float | None]:
        """What Megatron writes against iterations and against samples."""
        flags = self._flags
        asked = {
            "learning-rate": (flags.log_learning_rate_to_tensorboard, r.learning_rate),
            "batch-size": (flags.log_batch_size_to_tensorboard, r.global_batch_size),
            "lm loss": (r.skipped is None, r.loss),
            "skipped": (r.skipped not in (None, "overflow"), 1),
            "loss-scale": (flags.log_loss_scale_to_tensorboard, r.loss_scale),
            "world-size": (flags.log_world_size_to_tensorboard, self._world_size),
            "grad-norm": (True, r.grad_norm),
            "num-zeros": (True, r.num_zeros),
            "params-norm": (True, r.params_norm),
        }
        return {tag: value for tag, (wanted, value) in asked.items() if wanted}

    def _speed_points(self, r: IterationResult, teraflops: float | None) -> dict[str, float | None]:
        if r.skipped == "user" or r.seconds <= 0:
            return {}
        points: dict[str, float | None] = {}
        logging = self._logging
        if logging.is_short:
            points["tokens-per-second"] = r.global_batch_size * self._seq_length / r.seconds
        if self._flags.log_timers_to_tensorboard or logging.is_short:
            points["iteration-time"] = r.seconds
            if logging.log_throughput:
                points["throughput"] = teraflops
        return points

    def evaluation(
        self, key: str, split: str, iteration: int, samples: int, values: Mapping[str, float | None]
    ) -> None:
        """As ResultWriter's; perplexity in Megatron's form only if asked for. `split`: validation,
        validation-NAME or test."""
        for name, value in values.items():
            asked = name != "perplexity" or self._logging.is_short
            if value is not None and (asked or self._flags.log_validation_ppl_to_tensorboard):
                self.scalar(self._evaluation_tag(key, split, name), value, iteration, samples)

    def _evaluation_tag(self, key: str, split: str, name: str) -> str:
        if self._logging.is_short:
            split = split.replace("validation", "valid")
            return f"loss/{split}" if name == "loss" else f"{split}/{name}"
        # Megatron has one tag for validation and test
        return f"{key} {split.replace('test', 'validation')}{EVALUATION_ENDINGS[name]}"

    def tasks(self, iteration: int, samples: int, scores: Mapping[str, float]) -> None:
        """As ResultWriter's."""
        for name, score in scores.items():
            self.scalar(f"tasks/{name}", score, iteration, samples)

    def points(self, iteration: int, values: Mapping[str, float]) -> None:
        """As ResultWriter's."""
        for tag, value in values.items():
            self.scalar(tag, value, iteration)

    def timers(self, seconds: Mapping[str, float], iteration: int) -> None:
        """As ResultWriter's, if asked for."""
        if self._flags.log_timers_to_tensorboard:
            for name, value in seconds.items():
                self.scalar(f"{name}-time", value, iteration)

    def flush(self) -> None:
        """As ResultWriter's."""
        for board in self._boards:
            board.flush()

    def close(self) -> None:
        """As ResultWriter's."""
        for board in self._boards:
            board.close()


class BoardIntervals(Hook):
    """Says at which iterations something is written, and tells the boards (of the last rank) where
    the run begins."""

    def __init__(self, flags: BoardFlags, run: Run, writers: Sequence[ResultWriter] = ()):
        self._flags = flags
        self._run = run
        self._boards = [writer for writer in writers if isinstance(writer, Boards)]

    def on_rollback(self) -> None:
        for boards in self._boards:
            boards.start(self._run.progress.iteration)

    def on_start(self) -> None:
        for boards in self._boards:
            boards.start(self._run.progress.iteration)
        on_cpu = self._run.runtime.device.type == "cpu"
        chosen = self._run.config.training.device == "auto"
        if self._flags.log_memory_to_tensorboard and chosen and on_cpu:
            log.print_rank_0(
                "--log-memory-to-tensorboard: no effect on the CPU, the only device here"
            )

    def intervals(self) -> Sequence[int | None]:
        return (self._flags.tensorboard_log_interval,)


def open_boards(flags: BoardFlags, config: Config, world_size: int) -> Boards:
    """The boards that the flags request. Raises ValueError or OSError where one cannot be
    opened."""
    boards: list[Board] = []
    if flags.tensorboard_dir:
        if log.shows_details():
            log.print_rank_last("> setting tensorboard ...")
        from megatron.features.boards.tensorboard import TensorBoard

        boards.append(TensorBoard(flags.tensorboard_dir, flags.tensorboard_queue_size))
    if flags.wandb_project:
        from megatron.features.boards import wandb

        directory = flags.wandb_save_dir or os.path.join(config.checkpoint.save or ".", "wandb")
        boards.append(
            wandb.WandB(flags.wandb_project, flags.wandb_exp_name, flags.wandb_entity, directory)
        )
    return Boards(boards, flags, config.logging, config.model.seq_length, world_size)
