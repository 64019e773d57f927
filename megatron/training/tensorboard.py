"""TensorBoard scalars under Megatron's tags, on the last rank. The only importer of tensorboard."""
from __future__ import annotations

from collections.abc import Mapping
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
