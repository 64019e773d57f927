"""The curves of a run, for pictures: what its metrics file, TensorBoard files or log hold, by
iteration. Draws nothing."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron.analysis import log_reader
from megatron.analysis.log_reader import Evaluation, Record
from megatron.analysis.run_history import is_metrics, read_file, read_history
from megatron.training.logging.tensorboard import read_scalars

# What can be drawn, and the label of its axis.
PANELS = {
    "loss": "loss (nats per token)",
    "grad_norm": "gradient norm",
    "tokens_per_second": "tokens/s",
    "learning_rate": "learning rate",
}
_SEQ_LENGTH = re.compile(r"(?m)^  seq_length \.+ (\d+)$|\bactual_seqlen= *(\d+)")
_RANKS = re.compile(
    r"data parallel size: (\d+), pipeline parallel size: (\d+), tensor parallel size: (\d+)"
)
Curve = tuple[list[int], list[float]]


@dataclass(frozen=True)
class Curves:
    """A run: iterations and values of each panel that it has, and losses of each evaluated
    split."""

    name: str
    panels: dict[str, Curve]
    evaluations: dict[str, Curve] = field(default_factory=dict)


def read_run(path: str, first: int = 1) -> Curves:
    """The curves of a run directory, a metrics file, a log or a TensorBoard directory, from
    iteration `first` on.

    Of iterations that were repeated the last counts. Raises ValueError that names the path.
    """
    source = _source(path)
    records = [r for r in read_history([source]).records if r.iteration >= first]
    if not records:
        raise ValueError(f"{path}: no iteration from --first {first} on")
    evaluations, text = _evaluations(source)
    sizes = _SEQ_LENGTH.search(text)
    ranks = _RANKS.search(text)
    seq_length = int(sizes[1] or sizes[2]) if sizes else None
    world_size = math.prod(map(int, ranks.groups())) if ranks else 1
    panels = {
        name: _curve(records, [getattr(r, name) for r in records])
        for name in PANELS
        if name in _FIELDS
    }
    panels["tokens_per_second"] = _curve(
        records, [_rate(r, seq_length, world_size) for r in records]
    )
    latest = {
        (e.split, e.iteration): e.loss
        for e in evaluations
        if first <= e.iteration <= records[-1].iteration
    }
    splits: dict[str, Curve] = {}
    for (split, iteration), loss in sorted(
        latest.items(), key=lambda one: (one[0][0] == "test", one[0])
    ):
        steps, values = splits.setdefault(split, ([], []))
        steps.append(iteration)
        values.append(loss)
    return Curves(path, {name: curve for name, curve in panels.items() if curve}, splits)


_FIELDS = {"loss", "grad_norm", "learning_rate"}


def _source(path: str) -> str:
    """The file to read of a run directory: metrics before scalars, which have every iteration,
    before logs."""
    folder = Path(path)
    if not folder.exists():
        raise ValueError(
            f"{path}: does not exist; give a run directory, a metrics file, a log or a "
            "TensorBoard directory"
        )
    if not folder.is_dir():
        return path
    for found in sorted(
        folder.glob("*.jsonl"), key=lambda file: (file.name != "metrics.jsonl", file.name)
    ):
        text = read_file(str(found))
        if is_metrics(text) and '"lm_loss"' in text.partition("\n")[0]:  # not run_events.jsonl
            return str(found)
    if any(folder.rglob("*tfevents*")):
        return path
    logs = [
        file
        for pattern in ("log*", "*.txt", "*.log", "*.out")
        for file in sorted(folder.glob(pattern))
    ]
    for file in dict.fromkeys(logs):
        if file.is_file() and log_reader.read_text(read_file(str(file))):
            return str(file)
    raise ValueError(
        f"{path}: holds no metrics file (metrics.jsonl), no TensorBoard file and no log with "
        "iterations"
    )


def _evaluations(source: str) -> tuple[list[Evaluation], str]:
    """The evaluations of a source, and its text where it is a log."""
    if Path(source).is_dir() or "tfevents" in Path(source).name:
        return list(log_reader.read_point_evaluations(read_scalars(source))), ""
    text = read_file(source)
    if is_metrics(text):
        return list(log_reader.read_metrics_evaluations(text.splitlines())), ""
    return log_reader.read_evaluations(text), text


def _rate(record: Record, seq_length: int | None, world_size: int) -> float | None:
    """Tokens per second of all ranks, as far as it is recorded."""
    n = record.numbers
    if "tokens_per_second" in n:
        return n["tokens_per_second"]
    if "tokens_per_gpu" in n and "samples_per_second" not in n:
        return n["tokens_per_gpu"] * world_size
    if seq_length and "samples_per_second" in n:
        return n["samples_per_second"] * seq_length
    if seq_length and record.trained and record.global_batch_size and n.get("milliseconds"):
        return record.global_batch_size * seq_length / n["milliseconds"] * 1000
    return None


def _curve(records: Sequence[Record], values: Sequence[float | None]) -> Curve | None:
    """None where no value is there; NaN interrupts a curve."""
    if all(value is None for value in values):
        return None
    return [r.iteration for r in records], [
        math.nan if value is None else value for value in values
    ]


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """The mean over `window` neighbouring values, centered; fewer at the ends. What is no number is
    omitted."""
    if window <= 1:
        return list(values)
    found = []
    for at, value in enumerate(values):
        near = [
            one
            for one in values[max(0, at - (window - 1) // 2) : at + window // 2 + 1]
            if math.isfinite(one)
        ]
        found.append(sum(near) / len(near) if near and math.isfinite(value) else value)
    return found
