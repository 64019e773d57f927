"""TensorBoard scalars, in groups or under Megatron's tags, written and read back. The only importer of tensorboard."""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

# What Megatron's tags are called with --log-format short.
GROUPED = {
    "lm loss": "train/loss", "grad-norm": "train/grad_norm", "learning-rate": "train/learning_rate",
    "loss-scale": "train/loss_scale", "batch-size": "train/batch_size", "num-zeros": "train/num_zeros",
    "params-norm": "train/params_norm", "skipped": "train/skipped", "spike": "train/spike_sigma",
    "iteration-time": "perf/iteration_time", "tokens-per-second": "perf/tokens_per_second",
    "throughput": "perf/tflops_per_rank", "world-size": "perf/world_size",
    "mem-reserved-bytes": "memory/reserved_bytes", "mem-allocated-bytes": "memory/allocated_bytes",
    "mem-allocated-count": "memory/allocations",
}


def _grouped(tag: str) -> str:
    if tag not in GROUPED and tag.endswith("-time"):
        return f"timers/{tag.removesuffix('-time')}"
    return GROUPED.get(tag) or (tag if "/" in tag else f"train/{tag}")


class TensorBoard:
    """A writer of scalars against iterations: in groups, or under Megatron's tags and then against samples, too."""

    def __init__(self, directory: str, queue_size: int, grouped: bool = False):
        self._grouped = grouped
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ValueError("--tensorboard-dir needs the package tensorboard: pip install tensorboard, or leave the "
                             "flag out (--metrics-file needs no package)") from None
        self._writer = SummaryWriter(log_dir=directory, max_queue=queue_size)

    def arguments(self, values: Mapping[str, Any], iteration: int) -> None:
        """Every argument as text."""
        for name, value in values.items():
            self._writer.add_text(name, str(value), global_step=iteration)

    def scalar(self, tag: str, value: float, iteration: int, samples: int | None = None) -> None:
        """A point at `iteration`, under Megatron's `tag` and under `tag vs samples` when the samples are given; or in a
        group: tags that have none belong to `train`."""
        if self._grouped:
            tag, samples = _grouped(tag), None
        self._writer.add_scalar(tag, value, iteration)
        if samples is not None:
            self._writer.add_scalar(f"{tag} vs samples", value, samples)

    def evaluation(self, key: str, split: str, iteration: int, samples: int, loss: float, perplexity: float | None,
                   bits_per_byte: float | None) -> None:
        """Points of an evaluation; `key` is the loss's name, `split` validation, validation-NAME or test."""
        group = split.replace("validation", "valid") + "/"
        values = {"loss": loss, "perplexity": perplexity, "bits_per_byte": bits_per_byte}
        endings = {"loss": "", "perplexity": " ppl", "bits_per_byte": " bits per byte"}
        megatron = f"{key} {split.replace('test', 'validation')}"       # which writes both under one tag
        for name, value in values.items():
            if value is not None:
                self.scalar(f"{group}{name}" if self._grouped else f"{megatron}{endings[name]}", value, iteration, samples)

    def flush(self) -> None:
        """Write what is queued."""
        self._writer.flush()

    def close(self) -> None:
        """Write what is queued; no more will come."""
        self._writer.close()


def read_scalars(directory: str) -> Iterator[tuple[str, int, float]]:
    """(tag, step, value) of every scalar under a directory, file by file as they were begun and in the order written.

    Raises ValueError where the package is missing.
    """
    try:
        from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
        from tensorboard.util.tensor_util import make_ndarray
    except ImportError:
        raise ValueError(f"{directory}: TensorBoard files need the package tensorboard: pip install tensorboard") from None
    for path in sorted(Path(directory).rglob("*tfevents*"), key=lambda path: (path.name, path)):
        for event in LegacyEventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    yield value.tag, event.step, value.simple_value
                elif value.HasField("tensor") and value.metadata.plugin_data.plugin_name in ("", "scalars"):
                    number = make_ndarray(value.tensor)
                    if number.ndim == 0 and number.dtype.kind == "f":
                        yield value.tag, event.step, float(number)
