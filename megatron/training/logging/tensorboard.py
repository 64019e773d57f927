"""TensorBoard scalars, in groups or under Megatron's tags, written and read back. The only importer
of tensorboard."""

from __future__ import annotations

import io
import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.training.logging.output import OutputFile

REFRESH = 60.0  # seconds after which queued events are written

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


def _grouped(tag: str) -> str:
    if tag not in GROUPED and tag.endswith("-time"):
        return f"timers/{tag.removesuffix('-time')}"
    return GROUPED.get(tag) or (tag if "/" in tag else f"train/{tag}")


class _EventFile:
    """A file of events, each with a step. It is written in this thread, so that a disk that fails
    is seen where it does."""

    def __init__(self, directory: str, queue_size: int):
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        process = f"{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        name = f"events.out.tfevents.{int(time.time()):010d}.{process}"
        self._file = OutputFile(os.path.join(directory, name), "--tensorboard-dir")
        self._queue = io.BytesIO()
        self._records = RecordWriter(self._queue)
        self._make = Event
        self._queue_size = queue_size
        self._queued = 0
        self._written_at = time.monotonic()
        self._put(Event(file_version="brain.Event:2"))
        self.flush()

    def add(self, summary: Any, step: int) -> None:
        """Queue a summary; write the queue when it is full or a minute old."""
        self._put(self._make(summary=summary, step=int(step)))
        if self._queued >= self._queue_size or time.monotonic() - self._written_at > REFRESH:
            self.flush()

    def _put(self, event: Any) -> None:
        event.wall_time = time.time()
        self._records.write(event.SerializeToString())
        self._queued += 1

    def flush(self) -> None:
        """Write what is queued."""
        self._written_at = time.monotonic()
        if self._queued:
            self._file.write(self._queue.getvalue())
            self._queue.seek(0)
            self._queue.truncate()
            self._queued = 0

    def close(self) -> None:
        """Write what is queued; no more will come."""
        self.flush()
        self._file.close()


class TensorBoard:
    """A writer of scalars against iterations: in groups, or under Megatron's tags and then against
    samples, too."""

    def __init__(self, directory: str, queue_size: int, grouped: bool = False):
        """Opens an event file in `directory`; `queue_size` events are kept in memory before they
        are written. Raises ValueError where the package is missing, OSError for a directory that
        cannot be written."""
        self._grouped = grouped
        try:
            from torch.utils.tensorboard import summary
        except ImportError:
            raise ValueError(
                "--tensorboard-dir needs the package tensorboard: pip install tensorboard, or "
                "leave the flag out (--metrics-file needs no package) [package-missing]"
            ) from None
        self._summary = summary
        self._events = _EventFile(directory, queue_size)

    def arguments(self, values: Mapping[str, Any], iteration: int) -> None:
        """Every argument as text."""
        for name, value in values.items():
            self._events.add(self._summary.text(name, str(value)), iteration)

    def scalar(self, tag: str, value: float, iteration: int, samples: int | None = None) -> None:
        """A point at `iteration`, under Megatron's `tag` and under `tag vs samples` when the
        samples are given; or in a group: tags that have none belong to `train`."""
        if self._grouped:
            tag = _grouped(tag)
            samples = None
        self._events.add(self._summary.scalar(tag, value), iteration)
        if samples is not None:
            self._events.add(self._summary.scalar(f"{tag} vs samples", value), samples)

    def evaluation(
        self,
        key: str,
        split: str,
        iteration: int,
        samples: int,
        loss: float,
        perplexity: float | None,
        bits_per_byte: float | None,
    ) -> None:
        """Points of an evaluation; `key` is the loss's name, `split` validation, validation-NAME or
        test."""
        group = split.replace("validation", "valid") + "/"
        values = {"loss": loss, "perplexity": perplexity, "bits_per_byte": bits_per_byte}
        endings = {"loss": "", "perplexity": " ppl", "bits_per_byte": " bits per byte"}
        # which writes both under one tag
        megatron = f"{key} {split.replace('test', 'validation')}"
        for name, value in values.items():
            if value is not None:
                self.scalar(
                    f"{group}{name}" if self._grouped else f"{megatron}{endings[name]}",
                    value,
                    iteration,
                    samples,
                )

    def flush(self) -> None:
        """Write what is queued."""
        self._events.flush()

    def close(self) -> None:
        """Write what is queued; no more will come."""
        self._events.close()


def read_scalars(directory: str) -> Iterator[tuple[str, int, float]]:
    """(tag, step, value) of every scalar under a directory, file by file as they were begun and in
    the order written.

    Raises ValueError where the package is missing.
    """
    try:
        from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
        from tensorboard.util.tensor_util import make_ndarray
    except ImportError:
        raise ValueError(
            f"{directory}: TensorBoard files need the package tensorboard: pip install "
            "tensorboard [package-missing]"
        ) from None
    for path in sorted(Path(directory).rglob("*tfevents*"), key=lambda path: (path.name, path)):
        for event in LegacyEventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    yield value.tag, event.step, value.simple_value
                elif value.HasField("tensor") and value.metadata.plugin_data.plugin_name in (
                    "",
                    "scalars",
                ):
                    number = make_ndarray(value.tensor)
                    if number.ndim == 0 and number.dtype.kind == "f":
                        yield value.tag, event.step, float(number)
