"""skips.jsonl: whole lines come back, a torn one is dropped, anything else is refused; nothing that
was written is lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.checkpoint import skip_log
from megatron.checkpoint.filesystem import CheckpointError
from megatron.checkpoint.skip_log import SkipRecord
from megatron.checkpoint.state import RunState
from megatron.training.skipping.history import SkipHistory


def record(a: int, b: int, reason: str = "user") -> SkipRecord:
    return SkipRecord(
        f"{a}-{b}", a, b, 8 * a - 8, 8 * b, 256, reason, "command line", skip_log.now(), "ab"
    )


ONE = record(10, 20)
TWO = record(30, 31)


def test_there_and_back(tmp_path):
    assert skip_log.read(tmp_path / "none") == ([], "")
    skip_log.append(tmp_path / "run", [ONE.line()])
    skip_log.append(tmp_path / "run", [TWO.line(), skip_log.forget_line("10-20")])
    lines, torn = skip_log.read(tmp_path / "run")
    assert (len(lines), torn) == (3, "") and skip_log.active(skip_log.parse(lines, "x")) == {
        "30-31": TWO
    }
    assert skip_log.active(skip_log.parse([*lines, ONE.line()], "x")) == {
        "30-31": TWO,
        "10-20": ONE,
    }
    assert [name for name, _ in skip_log.parse(lines, "x")] == ["10-20", "30-31", "10-20"]
    assert set(json.loads(lines[0])) == {
        "id",
        "a",
        "b",
        "s0",
        "s1",
        "tokens",
        "reason",
        "source",
        "time",
        "hash",
    }


@pytest.mark.parametrize("keep", range(0, len(ONE.line()) + 2, 7))
def test_a_line_cut_off_anywhere(tmp_path, keep):
    """It does not count and goes with the next line; a whole one without its end counts and
    stays."""
    whole = f"{ONE.line()}\n{TWO.line()}\n"
    path = tmp_path / skip_log.FILE_NAME
    path.write_text(whole + ONE.line()[:keep])
    lines, torn = skip_log.read(tmp_path)
    assert (lines, torn) == ([ONE.line(), TWO.line()], ONE.line()[:keep])
    skip_log.append(tmp_path, [TWO.line()])
    assert path.read_text() == whole + TWO.line() + "\n"
    path.write_text(whole + ONE.line())
    assert skip_log.read(tmp_path) == ([ONE.line(), TWO.line(), ONE.line()], "")
    skip_log.append(tmp_path, [TWO.line()])
    assert path.read_text() == whole + ONE.line() + "\n" + TWO.line() + "\n"


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "x",
        "[]",
        "{}",
        '{"forget": 3, "time": "x"}',
        ONE.line().replace('"a"', '"c"'),
        ONE.line().replace('"a": 10', '"a": "10"'),
        ONE.line().replace('"a": 10', '"a": 21'),
    ],
)
def test_damage_is_one_clear_error(bad):
    with pytest.raises(
        CheckpointError,
        match=r"^F, line 2: not a record of skipped iterations \(.*; fix or remove that ",
    ):
        skip_log.parse([ONE.line(), bad, TWO.line()], "F")


MANY = SkipRecord(
    "5-37x3",
    5,
    37,
    32,
    296,
    256,
    "user",
    "command line",
    skip_log.now(),
    "ab",
    ranges="5-7 15-15 35-37",
)


def test_a_record_of_many_ranges():
    ((name, back),) = skip_log.parse([MANY.line()], "F")
    assert (name, back, back.parts.ranges) == ("5-37x3", MANY, ((5, 7), (15, 15), (35, 37)))
    assert skip_log.named(back.parts) == {
        "id": "5-37x3",
        "a": 5,
        "b": 37,
        "ranges": "5-7 15-15 35-37",
    }
    assert skip_log.named(ONE.parts) == {"id": "10-20", "a": 10, "b": 20, "ranges": ""}
    history = SkipHistory({"5-37x3": MANY, "11-13": record(11, 13, "spike")})
    assert [history.reason(n) for n in (6, 10, 12, 15)] == ["user", "user", "spike", "user"]


@pytest.mark.parametrize(
    "ranges",
    [
        "5-7 15-15",
        "5-7 6-15 35-37",
        "15-15 5-7 35-37",
        "5-7 8-9 35-37",
        "5-7 15 35-37",
        "5-x 35-37",
        "6-7 35-37",
        "5-37 ",
        "5_0-5_1",
        "0-37",
    ],
)
def test_ranges_that_are_none(ranges):
    with pytest.raises(CheckpointError, match=r"^F, line 1: not a record of skipped iterations"):
        skip_log.parse([MANY.line().replace("5-7 15-15 35-37", ranges)], "F")


def test_a_thousand_new_ranges_are_records_and_more_are_one():
    few = [(2 * n, 2 * n) for n in range(1, 1001)]
    many = [(2 * n, 2 * n) for n in range(1, 1002)]
    assert [one.ranges for one in skip_log.grouped(few)] == [(one,) for one in few]
    assert [one.ranges for one in skip_log.grouped(many)] == [tuple(many)]


def test_replacing(tmp_path):
    skip_log.append(tmp_path, [ONE.line()])
    skip_log.replace(tmp_path, [TWO.line(), ONE.line()])
    assert (
        skip_log.read(tmp_path) == ([TWO.line(), ONE.line()], "")
        and len(list(Path(tmp_path).iterdir())) == 1
    )


def test_the_history():
    history = SkipHistory({"10-20": ONE, "15-16": record(15, 16, "spike")})
    for first, last in ((10, 12), (13, 20), (30, 30)):
        history.note(first, last)
    assert history.executed == [[10, 20], [30, 30]] and history.total == 12
    assert [history.reason(n) for n in (10, 15, 17, 99)] == ["user", "spike", "user", "user"]
    history.take(history.executed, 15)
    assert history.executed == [[10, 15]] and history.total == 6


def test_the_past_in_run_states():
    """That of now, and that of older checkpoints, which had the ranges of the flags."""
    assert RunState(iteration=25, skips=[ONE.line()], skipped=[[10, 20]]).skipped_ranges() == [
        [10, 20]
    ]
    assert RunState(iteration=15, skips=[[10, 20], [22, 23]]).skipped_ranges() == [[10, 15]]
    assert RunState(iteration=15).skipped_ranges() == []
    old = json.loads(RunState(iteration=15, skips=[[10, 20]]).dump())
    del old["skipped"]
    assert RunState.parse(json.dumps(old).encode(), "x").skipped_ranges() == [[10, 15]]
    for bad in ([1], ["ab"], [[3, 2]], [[0, 2]], [[1, 2, 3]], [[1, "2"]], [[True, 2]]):
        with pytest.raises(CheckpointError, match="the checkpoint is damaged"):
            RunState(iteration=25, skipped=bad).skipped_ranges()
