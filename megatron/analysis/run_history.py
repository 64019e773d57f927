"""Reads the iterations and checkpoints that a run has written, for tools."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from megatron.analysis import log_reader
from megatron.analysis.log_reader import History, Record
from megatron.checkpoint.filesystem import iterations
from megatron.small_files import read_text
from megatron.training.logging.tensorboard import read_scalars

LOG_LIMIT = 4 << 30  # bytes


def read_history(paths: Sequence[str]) -> History:
    """The history of these logs, metrics files and TensorBoard directories, which followed each
    other.

    Raises ValueError that names the path.
    """
    return log_reader.joined(record for path in paths for record in _records(path))


def _records(path: str) -> list[Record]:
    if Path(path).is_dir() or "tfevents" in Path(path).name:
        found = list(log_reader.read_points(read_scalars(path)))
        if not any(record.trained for record in found):
            raise ValueError(
                f"{path}: no TensorBoard file with the scalar 'train/loss' or 'lm loss' is in it "
                "[log-without-losses]"
            )
        return found
    text = read_file(path)
    found = (
        list(log_reader.read_metrics(text.splitlines(), path))
        if is_metrics(text)
        else log_reader.read_text(text)
    )
    if not found:
        raise ValueError(
            f"{path}: no iteration line of a training log is in it ('iteration N/M | ...') "
            "[log-without-losses]"
        )
    return found


def read_file(path: str) -> str:
    """A log or a metrics file. Raises ValueError that names it."""
    try:
        return read_text(path, errors="replace", limit=LOG_LIMIT)
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be read ({error.strerror or error}) [file-not-readable]"
        ) from None


def is_metrics(text: str) -> bool:
    """Is this the text of a --metrics-file?"""
    return text.lstrip().startswith('{"')


def checkpoints(directory: str | None) -> list[int]:
    """The iterations that a run directory holds whole checkpoints of, in order. Raises
    ValueError."""
    if directory is None:
        return []
    try:
        os.listdir(directory)
    except OSError as error:
        raise ValueError(
            f"--load {directory}: cannot be read ({error.strerror or error}) [file-not-readable]"
        ) from None
    return iterations(directory)
