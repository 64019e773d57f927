"""skips.jsonl: whole lines come back, a torn one is dropped, anything else is refused; nothing that
was written is lost."""

import json
from pathlib import Path

from megatron.checkpoint import skip_log, state_reader
from megatron.checkpoint.filesystem import CheckpointError
from megatron.checkpoint.skip_log import SkipRecord
from megatron.checkpoint.state import RunState
from tests import problems


def record(ranges: str, reason: str = "user") -> SkipRecord:
    return SkipRecord(ranges, 72, 160, 256, reason, "command line", skip_log.now())


ONE = record("10-20")
TWO = record("30-31 35-35")
OLD = {"s0": 72, "s1": 160, "tokens": 256, "reason": "user", "source": "command line", "time": "t"}


def test_there_and_back(tmp_path):
    assert skip_log.read(tmp_path / "none") == ([], "")
    skip_log.record(tmp_path / "run", [ONE])
    skip_log.record(tmp_path / "run", [ONE, TWO])
    lines, torn = skip_log.read(tmp_path / "run")
    assert torn == "" and skip_log.parse(lines, "x") == [ONE, TWO]
    assert TWO.iterations.ranges == ((30, 31), (35, 35))


def test_files_of_earlier_programs():
    """One record a range, with an id by which it was taken back and changed."""
    lines = [
        json.dumps({"id": "10-20", "a": 10, "b": 20, **OLD, "hash": "ab"}),
        json.dumps({"id": "10-20", "a": 10, "b": 20, **OLD, "hash": "cd"}),
        json.dumps({"id": "30-31", "a": 30, "b": 31, **OLD, "hash": "ab"}),
        json.dumps({"id": "5-9x2", "a": 5, "b": 9, **OLD, "hash": "ab", "ranges": "5-6 9-9"}),
        json.dumps({"forget": "30-31", "time": "t"}),
    ]
    found = skip_log.parse(lines, "x")
    assert found == [SkipRecord(ranges, **OLD) for ranges in ("10-20", "5-6 9-9")]


def test_replacing(tmp_path):
    skip_log.record(tmp_path, [ONE])
    skip_log.write(tmp_path, [TWO.line(), ONE.line()])
    assert (
        skip_log.read(tmp_path) == ([TWO.line(), ONE.line()], "")
        and len(list(Path(tmp_path).iterdir())) == 1
    )


def test_the_past_in_run_states():
    """That of now, and that of older checkpoints, which had the ranges of the flags."""
    assert RunState(iteration=25, skips=[ONE.line()], skipped=[[10, 20]]).skipped_ranges() == [
        [10, 20]
    ]
    assert RunState(iteration=15, skips=[[10, 20], [22, 23]]).skipped_ranges() == [[10, 15]]
    assert RunState(iteration=15).skipped_ranges() == []
    old = json.loads(RunState(iteration=15, skips=[[10, 20]]).dump())
    del old["skipped"]
    assert state_reader.parse(json.dumps(old).encode(), "x").skipped_ranges() == [[10, 15]]
    for bad in ([1], ["ab"], [[3, 2]], [[0, 2]], [[1, 2, 3]], [[1, "2"]], [[True, 2]]):
        with problems.raises(CheckpointError, "checkpoint-damaged"):
            RunState(iteration=25, skipped=bad).skipped_ranges()
