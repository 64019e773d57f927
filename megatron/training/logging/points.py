"""Scalars of a run by tag and iteration, and the interface of what stores them (TensorBoard,
Weights & Biases)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

# What Megatron's tags are called with --log-format short.
GROUPED = {
    "lm loss": "train/loss",
    "grad-norm": "train/grad_norm",
    "learning-rate": "train/learning_rate",
    "loss-scale": "train/loss_scale",
    "batch-size": "train/batch_size",
    "num-zeros": "train/num_zeros",
    "params-norm": "train/params_norm",
    "skipped": "train/skipped",
    "spike": "train/spike_sigma",
    "iteration-time": "perf/iteration_time",
    "tokens-per-second": "perf/tokens_per_second",
    "throughput": "perf/tflops_per_rank",
    "world-size": "perf/world_size",
    "mem-reserved-bytes": "memory/reserved_bytes",
    "mem-allocated-bytes": "memory/allocated_bytes",
    "mem-allocated-count": "memory/allocations",
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

    def arguments(self, values: Mapping[str, Any], iteration: int) -> None:
        """Store every argument."""

    def scalar(self, tag: str, value: float, iteration: int, samples: int | None = None) -> None:
        """Store one value under Megatron's `tag`."""

    def flush(self) -> None:
        """Write what is still in memory."""

    def close(self) -> None:
        """Write what is still in memory; no more will come."""


class Boards:
    """All boards of a run, in one call each; empty on ranks that write nothing."""

    def __init__(self, boards: Sequence[Board] = (), is_grouped: bool = False):
        self._boards = list(boards)
        self._grouped = is_grouped

    def __bool__(self) -> bool:
        return bool(self._boards)

    def arguments(self, values: Mapping[str, Any], iteration: int) -> None:
        """Store every argument."""
        for board in self._boards:
            board.arguments(values, iteration)

    def scalar(self, tag: str, value: float, iteration: int, samples: int | None = None) -> None:
        """Store one value under Megatron's `tag`, or under its group; then without samples."""
        if self._grouped:
            tag = grouped(tag)
            samples = None
        for board in self._boards:
            board.scalar(tag, value, iteration, samples)

    def evaluation(
        self,
        key: str,
        split: str,
        iteration: int,
        samples: int,
        values: Mapping[str, float | None],
    ) -> None:
        """Store the values of an evaluation: `loss`, and `perplexity` and `bits_per_byte` unless
        None. `key` is the loss's name, `split` validation, validation-NAME or test."""
        for name, value in values.items():
            if value is not None:
                self.scalar(self._evaluation_tag(key, split, name), value, iteration, samples)

    def _evaluation_tag(self, key: str, split: str, name: str) -> str:
        if self._grouped:
            return f"{split.replace('validation', 'valid')}/{name}"
        # Megatron has one tag for validation and test
        return f"{key} {split.replace('test', 'validation')}{EVALUATION_ENDINGS[name]}"

    def flush(self) -> None:
        """Write what is still in memory."""
        for board in self._boards:
            board.flush()

    def close(self) -> None:
        """Write what is still in memory; no more will come."""
        for board in self._boards:
            board.close()


def given(values: Mapping[str, float | None]) -> Iterator[tuple[str, float]]:
    """The values that are not None, by tag."""
    return ((tag, value) for tag, value in values.items() if value is not None)
