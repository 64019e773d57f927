"""`skips.jsonl` of a run directory: which ranges of iterations are skipped, in JSON Lines; lines
are only appended.

A line is a record of a range (or, where one command line has more than a thousand, of all of
them), or `{"forget": id, ...}`, which takes one back; the last line about an id counts.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron.checkpoint.filesystem import DISK, CheckpointError, explained, read_small_file
from megatron.config.skip_ranges import FILE_NAME, Range, SkipRanges

MANY = 1000  # new ranges of one command line that get a record each


@dataclass(frozen=True)
class SkipRecord:
    """Iterations `a` to `b`, which read samples `s0` to `s1` (excluded), are not trained; `id` is
    "a-b".

    `reason`: user, spike ...; `source`: who asked; `hash`: what decides which data these samples
    are. A record of n ranges spells them in `ranges`, as "5-7 15-17 ..."; a, b, s0 and s1 are then
    where the first begins and the last ends, `tokens` are theirs without the gaps, and `id` is
    "a-bxn".
    """

    id: str
    a: int
    b: int
    s0: int
    s1: int
    tokens: int
    reason: str
    source: str
    time: str
    hash: str
    ranges: str = ""

    @cached_property
    def parts(self) -> SkipRanges:
        """The iterations. Raises ValueError for `ranges` that are none."""
        if not self.ranges:
            return SkipRanges([(self.a, self.b)])
        numbers = list(map(int, self.ranges.replace("-", " ").split()))
        found = SkipRanges().joined(zip(numbers[::2], numbers[1::2], strict=True))
        if _spelled(found) != self.ranges or (found.ranges[0][0], found.ranges[-1][1]) != (
            self.a,
            self.b,
        ):
            raise ValueError("its ranges are not in order")
        return found

    def line(self) -> str:
        """The record as a line of the file, without its end."""
        return json.dumps(
            {name: value for name in _NAMES if (value := getattr(self, name)) or name != "ranges"}
        )


def named(parts: SkipRanges) -> dict[str, Any]:
    """What a record of these iterations calls them: its `id`, `a`, `b` and `ranges`."""
    (a, _), *_, (_, b) = [parts.ranges[0], *parts.ranges]
    many = len(parts.ranges) > 1
    return {
        "id": f"{a}-{b}x{len(parts.ranges)}" if many else f"{a}-{b}",
        "a": a,
        "b": b,
        "ranges": _spelled(parts) if many else "",
    }


def grouped(ranges: Sequence[Range]) -> list[SkipRanges]:
    """The records that new ranges of one command line get: one each, or one for all of very
    many."""
    return [SkipRanges(ranges)] if len(ranges) > MANY else [SkipRanges([one]) for one in ranges]


def _spelled(parts: SkipRanges) -> str:
    return " ".join([f"{first}-{last}" for first, last in parts.ranges])


Entry = tuple[str, SkipRecord | None]  # an id, and its record, or None where it is taken back
_NAMES = [one.name for one in fields(SkipRecord)]
_TYPES = [int if one.type == "int" else str for one in fields(SkipRecord)]


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def forget_line(identity: str) -> str:
    """The line that takes a record back."""
    return json.dumps({"forget": identity, "time": now()})


def parse(lines: Iterable[str], source: str) -> list[Entry]:
    """What each line says; `source` is where they are from, for messages. Raises CheckpointError
    for one that is neither a record nor takes one back."""
    found: list[Entry] = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if (
                isinstance(row, dict)
                and row.keys() == {"forget", "time"}
                and isinstance(row["forget"], str)
            ):
                found.append((row["forget"], None))
                continue
            record = SkipRecord(**row)
            typed = [type(getattr(record, name)) for name in _NAMES] == _TYPES
            if (
                not typed
                or not (1 <= record.a <= record.b and 0 <= record.s0 < record.s1)
                or not record.parts
            ):
                raise ValueError("its values make no sense")
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise CheckpointError(
                f"{source}, line {number}: not a record of skipped iterations ({error}): "
                f"{line[:80]!r}; fix or remove that line [skip-record-malformed]"
            ) from None
        found.append((record.id, record))
    return found


def active(entries: Iterable[Entry]) -> dict[str, SkipRecord]:
    """The records that count, by id, in the order of their lines."""
    found: dict[str, SkipRecord] = {}
    for name, record in entries:
        found.pop(name, None)
        if record:
            found[name] = record
    return found


def read(directory: Path | str) -> tuple[list[str], str]:
    """(complete lines of the file in `directory`, the incomplete text of an interrupted write
    behind them). Raises CheckpointError if it cannot be read."""
    try:
        data = read_small_file(Path(directory) / FILE_NAME)
    except CheckpointError as error:
        if isinstance(error.__cause__, (FileNotFoundError, NotADirectoryError)):
            return [], ""
        raise
    *whole, rest = data.decode(errors="replace").split("\n")
    return ([*whole, rest], "") if _is_json(rest) else (whole, rest)


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def append(directory: Path | str, lines: Sequence[str]) -> None:
    """Append lines durably, in one write; the incomplete text of an interrupted write at the end is
    removed. Raises CheckpointError."""
    path = Path(directory) / FILE_NAME
    DISK.make_root(path.parent)
    new = not path.exists()
    with explained("append to", path):
        DISK.step("append", path)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        with explained("append to", path):
            there = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
            end = len(there)
            lead = ""
            if not there.endswith(b"\n") and there:
                lead = "\n"
                if not _is_json(there.rpartition(b"\n")[2].decode(errors="replace")):
                    end = there.rfind(b"\n") + 1
                    lead = ""
                    os.ftruncate(descriptor, end)
        DISK.write(descriptor, path, (lead + "".join(f"{line}\n" for line in lines)).encode(), end)
        DISK.fsync(descriptor, path)
    finally:
        DISK.close(descriptor, path)
    if new:
        DISK.fsync_directory(path.parent)


def replace(directory: Path | str, lines: Sequence[str]) -> None:
    """Atomically replace the file in `directory` by one with these lines. Raises
    CheckpointError."""
    path = Path(directory) / FILE_NAME
    temporary = path.with_name(f".{FILE_NAME}.tmp-{secrets.token_hex(4)}")
    DISK.make_root(path.parent)
    DISK.write_file(temporary, "".join(f"{line}\n" for line in lines).encode())
    DISK.rename(temporary, path)
    DISK.fsync_directory(path.parent)
