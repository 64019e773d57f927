"""Iterations read back from what runs wrote: Megatron's lines, AuroraGPT's, metrics files, scalars. Judges nothing.

A log may hold other text between its lines and inside them, and several runs one after the other: a later line about an
iteration replaces an earlier one, as the restarted run replaced it.
"""
from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

_HEAD = re.compile(r"iteration\s*=?\s*(\d+)\s*/\s*(\d+)\s*\|")
_NUMBER = r"\s*[=:]\s*([-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf))"
_REACH = 2000           # characters of a line, whatever is written between
_NAMES = {
    "consumed_samples": "consumed[ _]samples", "learning_rate": "learning[ _]rate", "loss": "lm loss",
    "global_batch_size": "global[ _]batch[ _]size", "grad_norm": "grad[ _]norm", "loss_scale": "loss[ _]scale",
    "consumed_tokens": "consumed_tokens", "milliseconds": r"elapsed[ _]time[ _]per[ _]iteration[ _]\(?ms\)?",
    "skipped": "number[ _]of[ _]skipped[ _]iterations",
    "user_skipped": "number of user-skipped iterations", "samples_per_second": "samples_per_second",
    "tokens_per_gpu": "tokens_per_gpu_per_second_tgs", "lm_tflops": r"\[LM\]TFLOPs", "ds_tflops": r"\[DS\]TFLOPs",
}
_FIELDS = {name: re.compile(("" if spelling.startswith("\\[") else r"(?<![\w-])") + spelling + _NUMBER, re.IGNORECASE)
           for name, spelling in _NAMES.items()}


@dataclass(frozen=True)
class Record:
    """What was written of one iteration, or of an interval that ends with it. What is not there is None or 0.

    `loss` is the mean over the interval in nats a token. On a line without a loss nothing was trained, and the gradient
    norm that some loops print again there is left out.
    """
    iteration: int
    train_iters: int | None
    loss: float | None
    grad_norm: float | None
    learning_rate: float | None = None
    consumed_samples: int | None = None
    global_batch_size: int | None = None
    skipped: int = 0
    user_skipped: int = 0
    numbers: dict[str, float] = field(default_factory=dict)     # rates, by the names above

    @property
    def trained(self) -> bool:
        """Is there a loss?"""
        return self.loss is not None


@dataclass(frozen=True)
class History:
    """Records in the order of iterations, the last of each, and the iterations with which a restarted run took over."""
    records: list[Record]
    joins: list[int]


def read_text(text: str) -> list[Record]:
    """The records of a log in the order of its lines."""
    heads = list(_HEAD.finditer(text))
    ends = [head.start() for head in heads[1:]] + [len(text)]
    return [_record(head, text[head.end():min(end, head.end() + _REACH)]) for head, end in zip(heads, ends, strict=False)]


def _record(head: re.Match[str], text: str) -> Record:
    found = {name: float(match[1]) for name, pattern in _FIELDS.items() if (match := pattern.search(text))}
    whole = {name: int(found.pop(name)) for name in ("consumed_samples", "global_batch_size") if name in found}
    skipped, user = int(found.pop("skipped", 0)), int(found.pop("user_skipped", 0))
    loss, norm = found.pop("loss", None), found.pop("grad_norm", None)
    return Record(int(head[1]), int(head[2]), loss, norm if loss is not None else None, found.pop("learning_rate", None),
                  **whole, skipped=skipped, user_skipped=user, numbers=found)


def read_metrics(lines: Iterable[str], path: str) -> Iterator[Record]:
    """The records of a --metrics-file. Raises ValueError that names the file and the line; a torn last line is left out."""
    previous = None
    for number, line in enumerate(lines, 1):
        if previous is not None:
            raise ValueError(f"{path}, line {number - 1}: {previous}; not a line of --metrics-file")
        if not line.strip():
            continue
        try:
            yield _row(json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            previous = f"{type(error).__name__}: {error}"


def _row(row: dict[str, Any]) -> Record:
    def number(name: str) -> float | None:
        value = row[name]
        return None if value is None else float(value)

    user = row["skip_reason"] not in (None, "overflow") and row["lm_loss"] is None      # its data were not read
    return Record(int(row["iteration"]), None, number("lm_loss"), number("grad_norm"), number("learning_rate"),
                  int(row["consumed_samples"]), int(row["global_batch_size"]),
                  skipped=int(row["skipped"] and not user), user_skipped=int(user),
                  numbers={"milliseconds": float(row["elapsed_ms"]), "consumed_tokens": float(row["consumed_tokens"])})


_TAGS = {"lm loss": "loss", "grad-norm": "grad_norm", "learning-rate": "learning_rate", "batch-size": "global_batch_size"}


def read_points(points: Iterable[tuple[str, int, float]]) -> Iterator[Record]:
    """The records of TensorBoard's (tag, step, value), in their order. An iteration without a loss was skipped."""
    for step, group in groupby((point for point in points if point[0] in _TAGS), key=lambda point: point[1]):
        found: dict[str, Any] = {_TAGS[tag]: value for tag, _, value in group}
        loss, batch = found.get("loss"), found.get("global_batch_size")
        yield Record(step, None, loss, found.get("grad_norm") if loss is not None else None, found.get("learning_rate"),
                     global_batch_size=None if batch is None else int(batch), skipped=int(loss is None))


def joined(records: Iterable[Record]) -> History:
    """One history of records that may go back in time."""
    latest: dict[int, Record] = {}
    joins, last = [], -math.inf
    for record in records:
        if record.iteration <= last:
            joins.append(record.iteration)
            for later in [iteration for iteration in latest if iteration > record.iteration]:
                del latest[later]       # the run that was given up
        latest[record.iteration] = record
        last = record.iteration
    return History([latest[iteration] for iteration in sorted(latest)], joins)


def without_nan(value: object) -> object:
    """JSON has no NaN: such numbers are written as strings."""
    if isinstance(value, dict):
        return {key: without_nan(one) for key, one in value.items()}
    if isinstance(value, list):
        return [without_nan(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
