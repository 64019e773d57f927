"""TensorBoard scalars under Megatron's tags: written on the last rank, and read back. The only importer of tensorboard."""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


class TensorBoard:
    """A writer of scalars against iterations and, beside each, against samples."""

    def __init__(self, directory: str, queue_size: int):
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
        """A point at `iteration`, and one under `tag vs samples` when the samples are given."""
        self._writer.add_scalar(tag, value, iteration)
        if samples is not None:
            self._writer.add_scalar(f"{tag} vs samples", value, samples)

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
