"""tools/benchmarks/chaos.py: a run with faults ends as one without, and a wrong end is seen."""

from __future__ import annotations

import json
import uuid
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from tests.load_tool import load_tool

TOOL = "benchmarks/chaos"
START = {"event": "start", "time": 1, "process_start": 0, "iteration": 1, "starter": "a"}
FAILURE = {
    "event": "failure",
    "time": 2,
    "iteration": 3,
    "rank": 1,
    "code": 1,
    "host": "h",
    "reason": "r",
}


@pytest.mark.campaign
def test_a_small_campaign(capsys):
    """Three faults in a run."""
    kinds = ["SIGKILL", "exception", "failing disk", "clock one hour back"]
    words = ["--runs", "1", "--faults", "3", "--seed", "6", "--kinds", *kinds]
    assert load_tool(TOOL).main(words) == 0
    assert "1 of 1 runs as they must be, 3 faults" in capsys.readouterr().out


def test_the_same_seed_draws_the_same_faults():
    tool = load_tool(TOOL)
    kinds = list(tool.KINDS)
    cases = [tool.drawn(seed, 5, kinds) for seed in range(40)]
    assert cases == [tool.drawn(seed, 5, kinds) for seed in range(40)]
    assert {case.launcher for case in cases} == set(tool.LAUNCHERS)
    assert {case.layout for case in cases} == set(tool.LAYOUTS)
    assert {one.kind for case in cases for one in case.faults} == set(kinds)
    assert all(
        case.launcher == "torchrun loop"
        for case in cases
        if any(one.kind == "launcher killed" for one in case.faults)
    )


def test_files_left_in_shared_memory_are_those_that_no_living_process_has_mapped():
    """Other programs use /dev/shm during a campaign."""
    ranks = load_tool(TOOL).ranks
    before = ranks.shared_files()
    mapped = SharedMemory(f"psm_{uuid.uuid4().hex}", create=True, size=64)
    left = Path("/dev/shm", f"psm_{uuid.uuid4().hex}")
    left.write_bytes(b"x")
    try:
        found = ranks.left_behind(before, seconds=0)
    finally:
        left.unlink()
        mapped.close()
        mapped.unlink()
    assert left.name in found
    assert mapped.name not in found


@pytest.mark.parametrize(
    ("events", "problems"),
    [
        ([START, FAILURE, START, {"event": "end", "time": 3}], 0),
        ([START, FAILURE, START], 1),
        ([START, START, {"event": "end", "time": 3}], 1),
        ([START, FAILURE, START, FAILURE, START, {"event": "end", "time": 3}], 1),
        ([], 1),
    ],
)
def test_a_ledger_that_lacks_something(tmp_path: Path, events, problems):
    tool = load_tool(TOOL)
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / tool.NAME).write_text("".join(json.dumps(one) + "\n" for one in events))
    case = tool.Case(1, "dp 2", "loop", (tool.Fault("exception", 0, "step", 1),))
    assert len(tool.check_ledger(case, tmp_path / "saved" / tool.NAME, 2)) == problems
