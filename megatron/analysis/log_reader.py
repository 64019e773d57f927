"""Reads iterations back from what runs wrote: logs of the four formats, metrics files, scalars.

A log may hold other text between its lines and inside them, and several runs one after the other: a
later line about an iteration replaces an earlier one, as the restarted run replaced it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from megatron.small_files import parse_json

_HEAD = re.compile(r"iteration\s*=?\s*(\d+)\s*/\s*(\d+)\s*\|")
_NUMBER = r"\s*[=:]\s*([-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf))"
_REACH = 2000  # characters of a line, whatever is written between
_NAMES = {
    "consumed_samples": "consumed[ _]samples",
    "learning_rate": "learning[ _]rate",
    "loss": "lm loss",
    "global_batch_size": "global[ _]batch[ _]size",
    "grad_norm": "grad[ _]norm",
    "loss_scale": "loss[ _]scale",
    "consumed_tokens": "consumed_tokens",
    "milliseconds": r"elapsed[ _]time[ _]per[ _]iteration[ _]\(?ms\)?",
    "skipped": "number[ _]of[ _]skipped[ _]iterations",
    "user_skipped": "number of user-skipped iterations",
    "samples_per_second": "samples_per_second",
    "tokens_per_gpu": "tokens_per_gpu_per_second_tgs",
    "lm_tflops": r"\[LM\]TFLOPs",
    "ds_tflops": r"\[DS\]TFLOPs",
}
_FIELDS = {
    name: re.compile(
        ("" if spelling.startswith("\\[") else r"(?<![\w-])") + spelling + _NUMBER, re.IGNORECASE
    )
    for name, spelling in _NAMES.items()
}
# --log-format short: fields between bars, with the name before the number or the unit behind it.
_SHORT_HEAD = re.compile(r"\biter +(\d+)/(\d+) \|")
_PLAIN = r"([-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf))"
_SHORT = {
    name: re.compile(rf"[|\n] *{spelling.replace('N', _PLAIN)} *(?:\||\n|$)")
    for name, spelling in {
        "loss": "loss N",
        "grad_norm": "grad norm N",
        "learning_rate": "lr N",
        "global_batch_size": "batch N",
        "loss_scale": "loss scale N",
        "milliseconds": "N ms",
        "seconds": "N s",
        "overflow": r"skipped N \(fp16 overflow\)",
        "spike": r"spike-skipped N \([^)]*\)",
        "user_skipped": r"user-skipped N \([^)]*\)",
        "teraflops": "N TFLOP/s per rank",
    }.items()
}
_RATE = re.compile(rf"\| *{_PLAIN}([kMBT]?) tok/s")
_UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
# --log-format internlm, whose steps count from 0.
_INTERNLM_HEAD = re.compile(r"\btflops=\S+ step=(\d+) |\bskipped=1 reason=\S+ step=(\d+)-(\d+)")
_INTERNLM = {
    name: re.compile(rf"(?<!\S){spelling}{_PLAIN}")
    for name, spelling in {
        "loss": "loss=",
        "grad_norm": r"grad_norm=\{'0_default': ",
        "learning_rate": "lr=",
        "loss_scale": "loss_scale=",
        "consumed_tokens": "num_consumed_tokens=",
        "tokens_per_gpu": r"tgs/last_tgs_1=",
    }.items()
}
_EVALUATION = re.compile(
    r"(?m)^ (?:final )?(?P<split>validation(?:-\S+)?|test)(?: loss)? at iteration "
    r"(?P<iteration>\d+)"
    rf"(?: on (?P<of>test|validation) set)? \| (?:lm loss value:|loss) (?P<loss>{_PLAIN[1:-1]})"
    rf"(?: \| perplexity \S+ \| bits per byte (?P<bits>[\d.]+))?"
)


@dataclass(frozen=True)
class Record:
    """What was written of one iteration, or of an interval that ends with it. What is not there is
    None or 0.

    `loss` is the mean over the interval in nats per token. On a line without a loss nothing was
    trained, and the gradient norm that some loops print again there is omitted.
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
    numbers: dict[str, float] = field(default_factory=dict)  # rates, by the names above

    @property
    def trained(self) -> bool:
        """Is there a loss?"""
        return self.loss is not None


@dataclass(frozen=True)
class Evaluation:
    """A loss in nats per token on a split (`validation`, `validation-NAME`, `test`) after an
    iteration."""

    iteration: int
    split: str
    loss: float
    bits_per_byte: float | None = None


@dataclass(frozen=True)
class History:
    """Records in the order of iterations, the last of each, and the iterations with which a
    restarted run took over."""

    records: list[Record]
    joins: list[int]


def read_text(text: str) -> list[Record]:
    """The records of a log in the order of its lines."""
    found = sorted(
        (
            (head.start(), head, read)
            for pattern, read in _READERS
            for head in pattern.finditer(text)
        ),
        key=lambda one: one[0],
    )
    ends = [start for start, _, _ in found[1:]] + [len(text)]
    return [
        read(head, text[head.end() : min(end, head.end() + _REACH)])
        for (_, head, read), end in zip(found, ends, strict=False)
    ]


def read_evaluations(text: str) -> list[Evaluation]:
    """The evaluations of a log in the order of its lines."""
    found = []
    for match in _EVALUATION.finditer(text):
        split = "test" if match["of"] == "test" else match["split"]
        bits = None if match["bits"] is None else float(match["bits"])
        found.append(Evaluation(int(match["iteration"]), split, float(match["loss"]), bits))
    return found


def _whole(number: float) -> int:
    """A count; 0 for one that no float holds."""
    return int(number) if math.isfinite(number) else 0


def _short_record(head: re.Match[str], text: str) -> Record:
    line = "|" + text.split("\n", 1)[0]
    for more in text.split("\n")[1:]:
        if not more.startswith("      "):
            break
        line += f" | {more.strip()}"
    fields = line.replace("|", "||")  # neighbours share a bar
    found = {
        name: float(match[1])
        for name, pattern in _SHORT.items()
        if (match := pattern.search(fields))
    }
    rate = _RATE.search(line)
    if rate:
        found["tokens_per_second"] = float(rate[1]) * _UNITS[rate[2]]
    if "seconds" in found:
        found["milliseconds"] = 1000 * found.pop("seconds")
    skipped = _whole(found.pop("overflow", 0) + found.pop("spike", 0))
    user = _whole(found.pop("user_skipped", 0))
    batch = found.pop("global_batch_size", None)
    return Record(
        int(head[1]),
        int(head[2]),
        found.pop("loss", None),
        found.pop("grad_norm", None),
        found.pop("learning_rate", None),
        global_batch_size=None if batch is None else _whole(batch),
        skipped=skipped,
        user_skipped=user,
        numbers=found,
    )


def _internlm_record(head: re.Match[str], text: str) -> Record:
    if head[1] is None:
        first = int(head[2])
        last = int(head[3])
        return Record(last + 1, None, None, None, user_skipped=last - first + 1)
    found = {
        name: float(match[1])
        for name, pattern in _INTERNLM.items()
        if (match := pattern.search(text))
    }
    return Record(
        int(head[1]) + 1,
        None,
        found.pop("loss", None),
        found.pop("grad_norm", None),
        found.pop("learning_rate", None),
        numbers=found,
    )


def _record(head: re.Match[str], text: str) -> Record:
    found = {
        name: float(match[1])
        for name, pattern in _FIELDS.items()
        if (match := pattern.search(text))
    }
    whole = {
        name: int(number)
        for name in ("consumed_samples", "global_batch_size")
        if math.isfinite(number := found.pop(name, math.nan))
    }
    skipped = _whole(found.pop("skipped", 0))
    user = _whole(found.pop("user_skipped", 0))
    loss = found.pop("loss", None)
    norm = found.pop("grad_norm", None)
    return Record(
        int(head[1]),
        int(head[2]),
        loss,
        norm if loss is not None else None,
        found.pop("learning_rate", None),
        **whole,
        skipped=skipped,
        user_skipped=user,
        numbers=found,
    )


_READERS = ((_HEAD, _record), (_SHORT_HEAD, _short_record), (_INTERNLM_HEAD, _internlm_record))


def read_metrics(lines: Iterable[str], path: str) -> Iterator[Record]:
    """The records of a --metrics-file. Raises ValueError that names the file and the line; a torn
    last line is omitted."""
    previous = None
    for number, line in enumerate(lines, 1):
        if previous is not None:
            raise ValueError(f"{path}, line {number - 1}: {previous}; not a line of --metrics-file")
        if not line.strip():
            continue
        try:
            row = parse_json(line)
            if "split" not in row:  # of an evaluation
                yield _row(row)
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            previous = f"{type(error).__name__}: {error}"


def _row(row: dict[str, Any]) -> Record:
    def number(name: str) -> float | None:
        value = row[name]
        return None if value is None else float(value)

    # its data were not read
    user = row["skip_reason"] not in (None, "overflow") and row["lm_loss"] is None
    return Record(
        int(row["iteration"]),
        None,
        number("lm_loss"),
        number("grad_norm"),
        number("learning_rate"),
        int(row["consumed_samples"]),
        int(row["global_batch_size"]),
        skipped=int(row["skipped"] and not user),
        user_skipped=int(user),
        numbers={
            "milliseconds": float(row["elapsed_ms"]),
            "consumed_tokens": float(row["consumed_tokens"]),
        }
        | (
            {}
            if row.get("tokens_per_second") is None
            else {"tokens_per_second": float(row["tokens_per_second"])}
        ),
    )


def read_metrics_evaluations(lines: Iterable[str]) -> Iterator[Evaluation]:
    """The evaluations of a --metrics-file; lines that cannot be read are left to `read_metrics`."""
    for line in lines:
        try:
            row = parse_json(line)
            if not isinstance(row, dict) or not isinstance(row.get("split"), str):
                continue
            bits = row.get("bits_per_byte")
            bits = None if bits is None else float(bits)
            found = Evaluation(int(row["iteration"]), row["split"], float(row["lm_loss"]), bits)
        except (ValueError, KeyError, TypeError, OverflowError):
            continue
        yield found


_TAGS = {
    "lm loss": "loss",
    "grad-norm": "grad_norm",
    "learning-rate": "learning_rate",
    "batch-size": "global_batch_size",
    "train/loss": "loss",
    "train/grad_norm": "grad_norm",
    "train/learning_rate": "learning_rate",
    "train/batch_size": "global_batch_size",
    "perf/tokens_per_second": "tokens_per_second",
}
_EVALUATED = re.compile(r"(?:lm loss )?(?P<split>valid(?:ation)?|test)(?P<name>-[^/ ]+)?(?:/loss)?")


def read_points(points: Iterable[tuple[str, int, float]]) -> Iterator[Record]:
    """The records of TensorBoard's (tag, step, value), in their order. An iteration without a loss
    was skipped."""
    for step, group in groupby(
        (point for point in points if point[0] in _TAGS), key=lambda point: point[1]
    ):
        found: dict[str, Any] = {_TAGS[tag]: value for tag, _, value in group}
        loss = found.get("loss")
        batch = found.get("global_batch_size")
        yield Record(
            step,
            None,
            loss,
            found.get("grad_norm") if loss is not None else None,
            found.get("learning_rate"),
            global_batch_size=None if batch is None else int(batch),
            skipped=int(loss is None),
            numbers={name: found[name] for name in ("tokens_per_second",) if name in found},
        )


def read_point_evaluations(points: Iterable[tuple[str, int, float]]) -> Iterator[Evaluation]:
    """The evaluations among TensorBoard's (tag, step, value)."""
    for tag, step, value in points:
        match = _EVALUATED.fullmatch(tag)
        if match:
            split = "test" if match["split"] == "test" else f"validation{match['name'] or ''}"
            yield Evaluation(step, split, value)


def joined(records: Iterable[Record]) -> History:
    """One history of records that may go back in time."""
    latest: dict[int, Record] = {}
    joins = []
    last = -math.inf
    for record in records:
        if record.iteration <= last:
            joins.append(record.iteration)
            for later in [iteration for iteration in latest if iteration > record.iteration]:
                del latest[later]  # the run that was given up
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
