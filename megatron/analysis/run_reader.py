"""Reads a run from its directory, or from its log or metrics file, or what features wrote of it."""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from megatron.analysis.log_reader import (
    Log,
    LoggedEvaluation,
    Record,
    read_metrics,
    read_points,
    read_text,
)
from megatron.config.run_directory import (
    iterations,
)
from megatron.small_files import read_text as read_file

LOG_LIMIT = 4 << 30  # bytes
# What can be drawn, and the label of its axis.
PANELS = {
    "loss": "loss (nats per token)",
    "grad_norm": "gradient norm",
    "tokens_per_second": "tokens/s",
    "learning_rate": "learning rate",
}
Curve = tuple[list[int], list[float]]
Reader = Callable[[str], Iterable[tuple[str, int, float]] | None]  # `Feature.read_points`


@dataclass(frozen=True)
class RecordedRun:
    """Records in the order of iterations, the last of each; the iterations with which a restarted
    run took over, with the last one before; iterations and losses of each evaluated split."""

    name: str
    records: list[Record]
    joins: dict[int, int] = field(default_factory=dict)
    evaluations: dict[str, Curve] = field(default_factory=dict)

    @cached_property
    def panels(self) -> dict[str, Curve]:
        """Iterations and values of each of PANELS that was written; NaN where one was not."""
        curves = {}
        for name in PANELS:
            values = [
                r.numbers.get(name) if name == "tokens_per_second" else getattr(r, name)
                for r in self.records
            ]
            if any(value is not None for value in values):
                steps = [r.iteration for r in self.records]
                curves[name] = steps, [math.nan if value is None else value for value in values]
        return curves


def read_run(*paths: str, first: int = 1, readers: Sequence[Reader] = ()) -> RecordedRun:
    """The run that wrote these, one after the other, from iteration `first` on: run directories,
    metrics files, logs, or what the `readers` of features know.

    Raises ValueError that names the path.
    """
    logs = [_read(path, readers) for path in paths]
    records, joins = _joined(record for log in logs for record in log.records)
    records = [record for record in records if record.iteration >= first]
    if not records:
        raise ValueError(f"{paths[0]}: no iteration from --first {first} on [value-out-of-range]")
    evaluations = (
        evaluation
        for log in logs
        for evaluation in log.evaluations
        if first <= evaluation.iteration <= records[-1].iteration
    )
    return RecordedRun(paths[0], records, joins, _splits(evaluations))


def _read(path: str, readers: Sequence[Reader]) -> Log:
    """The first file of `path` with iterations."""
    if Path(path).is_dir():
        logs = _logs_in(Path(path), readers)
        run_log = next((log for log in logs if log.records), Log([], []))
        where = "holds no metrics file (metrics.jsonl), no log and no scalars with losses"
    else:
        run_log = next(_of_readers(path, readers), None) or _read_file(path)
        where = "no iteration line of a training log is in it ('iteration N/M | ...')"
    if not run_log.records:
        raise ValueError(f"{path}: {where} [log-without-losses]")
    return run_log


def _logs_in(folder: Path, readers: Sequence[Reader]) -> Iterator[Log]:
    """What a directory holds: metrics before scalars, both with every iteration, before logs."""
    for file in sorted(
        folder.glob("*.jsonl"), key=lambda file: (file.name != "metrics.jsonl", file.name)
    ):
        if '"lm_loss"' in _text(str(file)).partition("\n")[0]:  # not run_events.jsonl
            yield _read_file(str(file))
    yield from _of_readers(str(folder), readers)
    for pattern in ("log*", "*.txt", "*.log", "*.out"):
        for file in sorted(folder.glob(pattern)):
            if file.is_file():
                yield read_text(_text(str(file)))


def _of_readers(path: str, readers: Sequence[Reader]) -> Iterator[Log]:
    readings = (reader(path) for reader in readers)
    return (read_points(points) for points in readings if points is not None)


def _read_file(path: str) -> Log:
    text = _text(path)
    if text.lstrip().startswith('{"'):
        return read_metrics(text.splitlines(), path)
    return read_text(text)


def _text(path: str) -> str:
    try:
        return read_file(path, errors="replace", limit=LOG_LIMIT)
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be read ({error.strerror or error}) [file-not-readable]"
        ) from None


def _joined(records: Iterable[Record]) -> tuple[list[Record], dict[int, int]]:
    """One history of records that may go back in time, as a restarted run does; to which iterations
    it did, from which."""
    latest: dict[int, Record] = {}
    joins = {}
    last = 0
    for record in records:
        if record.iteration <= last:
            joins[record.iteration] = last
            for later in [iteration for iteration in latest if iteration > record.iteration]:
                del latest[later]  # the run that was given up
        latest[record.iteration] = record
        last = record.iteration
    return [latest[iteration] for iteration in sorted(latest)], joins


def _splits(evaluations: Iterable[LoggedEvaluation]) -> dict[str, Curve]:
    """The curve of each split, `test` last; the last of several losses counts."""
    latest = {
        (evaluation.split, evaluation.iteration): evaluation.loss for evaluation in evaluations
    }
    splits: dict[str, Curve] = {}
    for split, iteration in sorted(latest, key=lambda key: (key[0] == "test", key)):
        steps, losses = splits.setdefault(split, ([], []))
        steps.append(iteration)
        losses.append(latest[split, iteration])
    return splits


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """The mean over `window` neighbouring values, centered; fewer at the ends. What is no number is
    omitted."""
    if window <= 1:
        return list(values)
    means = []
    for index, value in enumerate(values):
        near = [
            number
            for number in values[max(0, index - (window - 1) // 2) : index + window // 2 + 1]
            if math.isfinite(number)
        ]
        means.append(sum(near) / len(near) if near and math.isfinite(value) else value)
    return means


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
