"""`skips.jsonl` of a run directory: which iterations are skipped, and why, in JSON Lines; and what
a resume makes of them. Whoever removes a line takes its ranges back. Loads no torch.

A line is a record. Earlier programs wrote one for each range, with an `id`, and took it back with
`{"forget": id, ...}`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron import log
from megatron.checkpoint.filesystem import (
    DISK,
    CheckpointError,
)
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.plan.plan import Plan
from megatron.config.run_directory import (
    FINAL,
    MANIFEST,
    iterations,
    read_small_file,
)
from megatron.config.skip_ranges import FILE_NAME, RANGE_FLAG, SHOWN, SkipRanges, shorten


@dataclass(frozen=True)
class SkipRecord:
    """Iterations `ranges` ("5-7 15-17 ..."), which begin at sample `s0`, end before sample `s1` and
    have `tokens`, are not trained. `reason`: user, spike ...; `source`: who asked."""

    ranges: str
    s0: int
    s1: int
    tokens: int
    reason: str
    source: str
    time: str

    @cached_property
    def iterations(self) -> SkipRanges:
        """The iterations. Raises ValueError for `ranges` that are none."""
        numbers = list(map(int, self.ranges.replace("-", " ").split()))
        parsed = SkipRanges().joined(zip(numbers[::2], numbers[1::2], strict=True))
        if not parsed or parsed.ranges[0][0] < 1 or spelled(parsed) != self.ranges:
            raise ValueError("its ranges are not in order")
        return parsed

    def line(self) -> str:
        """The record as a line of the file, without its end."""
        return json.dumps(asdict(self))


def spelled(iterations: SkipRanges) -> str:
    """Ranges as a record has them."""
    return " ".join([f"{first}-{last}" for first, last in iterations.ranges])


_NAMES = [column.name for column in fields(SkipRecord)]
_TYPES = [int if column.type == "int" else str for column in fields(SkipRecord)]


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse(lines: Iterable[str], source: str) -> list[SkipRecord]:
    """The records; `source` is where the lines are from, for messages. Raises CheckpointError for a
    line that is none."""
    records: dict[str, SkipRecord] = {}
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if isinstance(row, dict) and isinstance(row.get("forget"), str):
                records.pop(row["forget"], None)
                continue
            name = row.pop("id", line)
            row.pop("hash", None)
            if "a" in row:
                row = {"ranges": "{a}-{b}".format(**row)} | row
                del row["a"], row["b"]
            record = SkipRecord(**row)
            typed = [type(getattr(record, name)) for name in _NAMES] == _TYPES
            if not typed or not 0 <= record.s0 < record.s1 or not record.iterations:
                raise ValueError("its values make no sense")
        except (
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
            OverflowError,
            RecursionError,
        ) as e:
            raise CheckpointError(
                f"{source}, line {number}: not a record of skipped iterations ({e}): "
                f"{line[:80]!r}; fix or remove that line [skip-record-malformed]"
            ) from None
        records[str(name)] = record
    return list(records.values())


def read(directory: Path | str) -> tuple[list[str], str]:
    """(complete lines of the file in `directory`, the incomplete text of an interrupted write
    behind them). Raises CheckpointError if it cannot be read."""
    try:
        data = read_small_file(Path(directory) / FILE_NAME)
    except CheckpointError as error:
        if isinstance(error.__cause__, (FileNotFoundError, NotADirectoryError)):
            return [], ""
        raise
    *complete, tail = data.decode(errors="replace").split("\n")
    try:
        whole = isinstance(json.loads(tail), dict)
    except (ValueError, RecursionError):
        whole = False
    return ([*complete, tail], "") if whole else (complete, tail)


def record(
    directory: Path | str, records: Sequence[SkipRecord], fence: Callable[[], None] = lambda: None
) -> None:
    """Have these records in the file, durably, all or none; the incomplete text of an interrupted
    write at its end is removed. `fence` is called before it is written. Raises CheckpointError."""
    lines, _ = read(directory)
    before = parse(lines, str(directory))
    if new := [record.line() for record in records if record not in before]:
        fence()
        write(directory, [*lines, *new])


def write(directory: Path | str, lines: Sequence[str]) -> None:
    """Atomically replace the file in `directory` by one with these lines. Raises
    CheckpointError."""
    text = "".join(f"{line}\n" for line in lines)
    DISK.replace_file(Path(directory) / FILE_NAME, text.encode())


@dataclass(frozen=True)
class Position:
    """Where a run continues: iterations done, samples consumed, and which of those iterations were
    skipped."""

    iteration: int = 0
    consumed: int = 0
    skipped: SkipRanges = field(default_factory=SkipRanges)

    @classmethod
    def of(cls, iteration: int, consumed: int, skipped: Iterable[Sequence[int]]) -> Position:
        """That of a run which has skipped these ranges [first, last]."""
        return cls(
            iteration, consumed, SkipRanges().joined((first, last) for first, last in skipped)
        )


@dataclass(frozen=True)
class Skips:
    """The ranges `typed` and the `records`, each with the file it is from, for a run that continues
    at a `position`. `checkpoints`: those of the run directory `load`. `read_at`: when, in UTC."""

    typed: SkipRanges
    records: Mapping[SkipRecord, str]
    position: Position
    checkpoints: Sequence[int] = ()
    load: str = ""
    read_at: str = ""

    @classmethod
    def read(
        cls,
        c: CheckpointConfig,
        typed: SkipRanges,
        position: Position,
        of_checkpoint: Iterable[Any] = (),
    ) -> Skips:
        """With the records in the directories of --load and --save; where that of --load has no
        file, with those `of_checkpoint` (`RunState.skips`). Raises CheckpointError."""
        root = None
        if c.load and not c.finetune:
            load = Path(c.load)
            alone = FINAL.fullmatch(load.name) or (load / MANIFEST).is_file()
            root = load.parent if alone else load
        records = {}
        if root and not (root / FILE_NAME).exists():
            lines = [line for line in of_checkpoint if isinstance(line, str)]
            records = dict.fromkeys(parse(lines, "the checkpoint"), "the checkpoint")
        for directory in dict.fromkeys(str(Path(path)) for path in (root, c.save) if path):
            lines, torn = read(directory)
            source = f"{directory}/{FILE_NAME}"
            if torn:
                log.warn_once(
                    f"{source}: its last line was cut off while it was written and does not count: "
                    f"{torn[:80]!r}"
                )
            records |= dict.fromkeys(parse(lines, source), source)
        checkpoints = iterations(root) if root else ()
        return cls(typed, records, position, checkpoints, str(root or ""), now())

    def all(self) -> SkipRanges:
        """What is skipped."""
        recorded = (span for record in self.records for span in record.iterations.ranges)
        return SkipRanges().joined([*recorded, *self.typed.ranges])

    def new(self) -> SkipRanges:
        """What is to be recorded: ranges of the flags that are neither recorded nor behind."""
        covered = replace(self, typed=self.position.skipped).all()
        return SkipRanges(
            (first, last)
            for first, last in self.typed.ranges
            if covered.count_in(first, last) < last - first + 1
        )

    def problems(self, plan: Plan) -> list[str]:
        """Why a run cannot continue with these."""
        here = self.position
        typed = self.typed.ranges
        wanted = {span: (f"{RANGE_FLAG} {span[0]} {span[1]}", "omit the range") for span in typed}
        problems = []
        not_applicable = []
        for record, source in self.records.items():
            for span in record.iterations.ranges:
                wanted.setdefault(span, (f"{source}: {span[0]}-{span[1]}", "remove it there"))
            if record.s1 > here.consumed and not _is_applicable(record, plan, here):
                not_applicable.append(
                    f"{source}: {record.ranges[:80]} are samples {record.s0} to {record.s1 - 1}, "
                    "and others with these batch sizes; give those of before, or remove that line "
                    f"and give the ranges as they are now with {RANGE_FLAG} "
                    "[skip-record-not-applicable]"
                )
        for (first, last), (name, remedy) in wanted.items():
            done = min(last, here.iteration)
            if here.skipped.count_in(first, done) < done - first + 1:
                problems.append(
                    f"{name}: iterations of {first} to {done} have been trained already, the run "
                    f"resumes from iteration {here.iteration}; {self._earlier(first)}, or "
                    f"{remedy} [skip-already-trained]"
                )
        problems += not_applicable
        nothing = self.all().nothing_to_train(here.iteration, plan.train_iters)
        if not problems and nothing and self.new():
            problems.append(
                f"{RANGE_FLAG}: nothing to train, iterations {here.iteration + 1} to "
                f"{plan.train_iters} are skipped; narrow the ranges [skip-leaves-nothing-to-train]"
            )
        return shorten(problems)

    def listed(self) -> list[str]:
        """A line with the ranges to come and where they are from."""
        shown = [
            f"{_short(record.iterations)} ({record.reason}, {source})"
            for record, source in self.records.items()
            if record.iterations.ranges[-1][1] > self.position.iteration
        ]
        if new := self.new():
            shown.append(f"{_short(new)} (user, command line, new)")
        return ["iterations to skip: " + ", ".join(shown)] if shown else []

    def _earlier(self, first: int) -> str:
        """The remedy: how to resume from before an iteration."""
        before = [number for number in self.checkpoints if number < first]
        if before:
            return f"give --ckpt-step {max(before)}, the newest checkpoint before them"
        return (
            f"{self.load or 'there'} has no checkpoint before them: start a new run without "
            "--load, into another --save"
        )


def _is_applicable(record: SkipRecord, plan: Plan, here: Position) -> bool:
    """Whether a record's iterations to come are still its samples."""
    shift = here.consumed - plan.consumed_samples(here.iteration)
    first = record.iterations.ranges[0][0]
    last = record.iterations.ranges[-1][1]
    begins = first <= here.iteration or record.s0 == plan.consumed_samples(first - 1) + shift
    return begins and record.s1 == plan.consumed_samples(last) + shift


def _short(iterations: SkipRanges) -> str:
    text = spelled(SkipRanges(iterations.ranges[:SHOWN]))
    more = len(iterations.ranges) - SHOWN
    return f"{text} and {more} more" if more > 0 else text
