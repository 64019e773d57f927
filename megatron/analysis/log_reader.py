"""Reads what runs wrote of their iterations: one reader for logs of every --log-format, one for
metrics files, one for points that a feature wrote.

A log may hold other text between its lines and inside them, and several runs one after the other.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

from megatron.small_files import parse_json


@dataclass(frozen=True)
class Record:
    """What was written of one iteration, or of an interval that ends with it. What is not there is
    None or 0.

    `loss` is the mean over the interval in nats per token. On a line without a loss nothing was
    trained, and the gradient norm that some loops print again there is omitted.
    """

    iteration: int
    train_iters: int | None = None
    loss: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    consumed_samples: int | None = None
    global_batch_size: int | None = None
    skipped: int = 0
    user_skipped: int = 0
    numbers: dict[str, float] = field(default_factory=dict)  # rates, by the names below

    @property
    def trained(self) -> bool:
        """Is there a loss?"""
        return self.loss is not None


@dataclass(frozen=True)
class LoggedEvaluation:
    """A loss in nats per token on a split (`validation`, `validation-NAME`, `test`) after an
    iteration."""

    iteration: int
    split: str
    loss: float
    bits_per_byte: float | None = None


class Log(NamedTuple):
    """Records and evaluations in the order in which they were written."""

    records: list[Record]
    evaluations: list[LoggedEvaluation]


class Dialect(NamedTuple):
    """How a log format writes an iteration: from `head` as far as `body` goes, with these fields
    in it."""

    head: re.Pattern[str]
    body: re.Pattern[str]
    fields: Mapping[str, re.Pattern[str]]


_NUMBER = r"(?P<number>[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf))"
_UNITS = {"": 1.0, "ms": 1.0, "s": 1e3, "k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def _dialect(head: str, body: str, pattern: str, fields: Mapping[str, str]) -> Dialect:
    """`pattern` is that of every field; NAME in it stands for the field's spelling, <N> in either
    for its number."""
    compiled = {
        name: re.compile(pattern.replace("NAME", spelling).replace("<N>", _NUMBER))
        for name, spelling in fields.items()
    }
    return Dialect(re.compile(head), re.compile(body), compiled)


_DIALECTS = (
    _dialect(  # Megatron-LM and forks of it
        r"iteration\s*=?\s*(?P<iteration>\d+)\s*/\s*(?P<of>\d+)\s*\|",
        r"[\s\S]{0,2000}",  # characters, whatever is written between
        r"(?i)(?:(?<![\w-])|(?=\[))NAME\s*[=:]\s*<N>",
        {
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
        },
    ),
    _dialect(  # short: name before the number or unit behind it, between bars; may be folded
        r"\biter +(?P<iteration>\d+)/(?P<of>\d+) \|",
        r".*(?:\n {6}.*)*",
        r"(?m)(?:^|\|) *NAME *(?=\||$)",
        {
            "loss": "loss <N>",
            "grad_norm": "grad norm <N>",
            "learning_rate": "lr <N>",
            "global_batch_size": "batch <N>",
            "loss_scale": "loss scale <N>",
            "milliseconds": "<N> (?P<unit>ms|s)",
            "overflow": r"skipped <N> \(fp16 overflow\)",
            "vetoed": r"(?!user-)\w+-skipped <N> \([^)]*\)",
            "user_skipped": r"user-skipped <N> \([^)]*\)",
            "teraflops": "<N> TFLOP/s per rank",
            "tokens_per_second": "<N>(?P<unit>[kMBT]?) tok/s",
        },
    ),
    _dialect(  # name=value, whose steps count from 0
        r"\btflops=\S+ step=(?P<last_step>\d+) ",
        r"[\s\S]{0,2000}",
        r"(?<!\S)NAME<N>",
        {
            "loss": "loss=",
            "grad_norm": r"grad_norm=\{'0_default': ",
            "learning_rate": "lr=",
            "loss_scale": "loss_scale=",
            "consumed_tokens": "num_consumed_tokens=",
            "tokens_per_gpu": r"tgs/last_tgs_1=",
        },
    ),
    _dialect(r"\bskipped=1 reason=\S+ step=(?P<first_step>\d+)-(?P<last_step>\d+)", "", "NAME", {}),
)
_EVALUATION = re.compile(
    r"(?m)^ (?:final )?(?P<split>validation(?:-\S+)?|test)(?: loss)? at iteration "
    r"(?P<iteration>\d+)(?: on (?P<of>test|validation) set)? \| (?:lm loss value:|loss) "
    rf"{_NUMBER}(?: \| perplexity \S+ \| bits per byte (?P<bits>\d+(?:\.\d+)?))?"
)
_SEQ_LENGTH = re.compile(r"(?m)^  seq_length \.+ (\d+)$|\bactual_seqlen= *(\d+)")
_RANKS = re.compile(
    r"data parallel size: (\d+), pipeline parallel size: (\d+), tensor parallel size: (\d+)"
)


def read_text(text: str) -> Log:
    """A log, whose format need not be known. Tokens per second of all ranks are computed where
    the log has its sequence length or, with name=value, its ranks."""
    heads = sorted(
        (head.start(), dialect, head)
        for dialect in range(len(_DIALECTS))
        for head in _DIALECTS[dialect].head.finditer(text)
    )
    ends = [start for start, *_ in heads[1:]] + [len(text)]
    lengths = _SEQ_LENGTH.search(text)
    seq_length = int(lengths[1] or lengths[2]) if lengths else None
    ranks = _RANKS.search(text)
    world_size = math.prod(map(int, ranks.groups())) if ranks else 1
    records = []
    for (_, dialect, head), end in zip(heads, ends, strict=False):
        body = _DIALECTS[dialect].body.match(text, head.end(), end)
        assert body is not None, "the bodies of dialects may be empty"
        numbers = {
            name: float(match["number"]) * _UNITS[match.groupdict().get("unit", "")]
            for name, pattern in _DIALECTS[dialect].fields.items()
            if (match := pattern.search(body[0]))
        }
        record = _record(head.groupdict(), numbers)
        _add_rate(record, seq_length, world_size)
        records.append(record)
    evaluations = [
        LoggedEvaluation(
            int(match["iteration"]),
            "test" if match["of"] == "test" else match["split"],
            float(match["number"]),
            None if match["bits"] is None else float(match["bits"]),
        )
        for match in _EVALUATION.finditer(text)
    ]
    return Log(records, evaluations)


def _record(head: Mapping[str, str], numbers: dict[str, float]) -> Record:
    """A record of what its line begins with, and of the numbers that follow."""
    iteration = int(head["last_step"]) + 1 if "last_step" in head else int(head["iteration"])
    loss = numbers.pop("loss", None)
    norm = numbers.pop("grad_norm", None)
    counts = {
        name: int(number)
        for name in ("consumed_samples", "global_batch_size")
        if math.isfinite(number := numbers.pop(name, math.nan))
    }
    skipped = sum(numbers.pop(name, 0) for name in ("skipped", "overflow", "vetoed"))
    user_skipped = numbers.pop("user_skipped", 0)
    if "first_step" in head:
        user_skipped = iteration - int(head["first_step"])
    return Record(
        iteration,
        int(head["of"]) if "of" in head else None,
        loss,
        None if loss is None else norm,
        numbers.pop("learning_rate", None),
        **counts,
        skipped=_count(skipped),
        user_skipped=_count(user_skipped),
        numbers=numbers,
    )


def _count(number: float) -> int:
    """A count; 0 for one that no float holds."""
    return int(number) if math.isfinite(number) else 0


def _add_rate(record: Record, seq_length: int | None, world_size: int) -> None:
    """Add tokens per second of all ranks to the numbers of a record, as far as they follow."""
    n = record.numbers
    if "tokens_per_second" in n:
        return
    if "tokens_per_gpu" in n and "samples_per_second" not in n:
        n["tokens_per_second"] = n["tokens_per_gpu"] * world_size
    elif seq_length and "samples_per_second" in n:
        n["tokens_per_second"] = n["samples_per_second"] * seq_length
    elif seq_length and record.trained and record.global_batch_size and n.get("milliseconds"):
        tokens = record.global_batch_size * seq_length
        n["tokens_per_second"] = tokens / n["milliseconds"] * 1000


def read_metrics(lines: Iterable[str], path: str) -> Log:
    """A --metrics-file. Raises ValueError that names the file and the line; a torn last line is
    omitted, as is an evaluation without its values."""
    metrics = Log([], [])
    previous = None
    for number, line in enumerate(lines, 1):
        if previous is not None:
            raise ValueError(
                f"{path}, line {number - 1}: {previous}; give what --metrics-file wrote "
                "[log-without-losses]"
            )
        if not line.strip():
            continue
        try:
            row = parse_json(line)
            if "split" in row:
                metrics.evaluations.extend(_evaluation(row))
            else:
                metrics.records.append(_row(row))
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            missing = isinstance(error, KeyError)
            previous = f"{'has no ' * missing}{error}"
    return metrics


def _number(row: Mapping[str, Any], name: str) -> float | None:
    value = row[name]
    return None if value is None else float(value)


def _row(row: Mapping[str, Any]) -> Record:
    loss = _number(row, "lm_loss")
    # its data were not read
    user = row["skip_reason"] not in (None, "overflow") and loss is None
    numbers = {
        "milliseconds": float(row["elapsed_ms"]),
        "consumed_tokens": float(row["consumed_tokens"]),
    }
    if row.get("tokens_per_second") is not None:
        numbers["tokens_per_second"] = float(row["tokens_per_second"])
    return Record(
        int(row["iteration"]),
        None,
        loss,
        None if loss is None else _number(row, "grad_norm"),
        _number(row, "learning_rate"),
        int(row["consumed_samples"]),
        int(row["global_batch_size"]),
        skipped=int(row["skipped"] and not user),
        user_skipped=int(user),
        numbers=numbers,
    )


def _evaluation(row: Mapping[str, Any]) -> list[LoggedEvaluation]:
    try:
        if not isinstance(row["split"], str):
            return []
        bits = None if row.get("bits_per_byte") is None else float(row["bits_per_byte"])
        return [LoggedEvaluation(int(row["iteration"]), row["split"], float(row["lm_loss"]), bits)]
    except (ValueError, KeyError, TypeError, OverflowError):
        return []


def read_points(points: Iterable[tuple[str, int, float]]) -> Log:
    """What a feature wrote (`Feature.read_points`). An iteration without a loss was skipped; where
    none has one, there are no records."""
    written = Log([], [])
    training_points = []
    for name, iteration, value in points:
        if name.partition("-")[0] in ("validation", "test"):
            written.evaluations.append(LoggedEvaluation(iteration, name, value))
        else:
            training_points.append((iteration, name, value))
    for iteration, group in groupby(training_points, key=lambda point: point[0]):
        numbers = {name: value for _, name, value in group}
        numbers["skipped"] = float("loss" not in numbers)
        written.records.append(_record({"iteration": str(iteration)}, numbers))
    return written if any(record.trained for record in written.records) else Log([], [])
