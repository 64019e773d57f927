"""`skips.jsonl` of a run directory: which iterations are skipped, and why, in JSON Lines; lines are
only appended. Whoever removes a line takes its ranges back.

A line is a record. Earlier programs wrote one for each range, with an `id`, and took it back with
`{"forget": id, ...}`.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path

from megatron.checkpoint.filesystem import DISK, CheckpointError, explained, read_small_file
from megatron.config.skip_ranges import FILE_NAME, SkipRanges
from megatron.small_files import path_inside


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
    return ([*complete, tail], "") if _is_json(tail) else (complete, tail)


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
        descriptor = os.open(
            path_inside(path.parent, FILE_NAME), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666
        )
    try:
        with explained("append to", path):
            existing = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
            end = len(existing)
            lead = ""
            if not existing.endswith(b"\n") and existing:
                lead = "\n"
                if not _is_json(existing.rpartition(b"\n")[2].decode(errors="replace")):
                    end = existing.rfind(b"\n") + 1
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
