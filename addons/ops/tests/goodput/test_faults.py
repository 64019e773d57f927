"""bench/faults: runs with faults end as they must, and a wrong end is seen."""

from __future__ import annotations

import json
import uuid
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from bench.faults import __main__ as program
from bench.faults import hangs, inject, ranks, results
from bench.faults.inject import Fault

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
END = {"event": "end", "time": 3}


@pytest.mark.campaign
@pytest.mark.parametrize(
    "words",
    [
        "results --runs 1 --faults 2 --seed 6 --kinds SIGKILL exception",
        "hangs --cells 1 --seed 5 --only data",
    ],
)
def test_a_small_campaign(words):
    assert program.main(words.split()) == 0


def test_faults_come_one_after_the_other_to_their_rank(tmp_path):
    faults = [Fault("hang", "data", 1, 2), Fault("hang", "write", 0), Fault("hang", "data", 1)]
    injectors = [inject.Injector(faults, rank, tmp_path) for rank in range(2)]
    calls = [(1, "data"), (0, "data"), (0, "write"), (1, "data"), (1, "data"), (0, "write")]
    calls += [(1, "write"), (1, "data"), (1, "data")]
    come = [injectors[rank].due(place) for rank, place in calls]
    assert [number for number, fault in enumerate(come) if fault] == [3, 5, 7]
    assert len(inject.injected(tmp_path)) == 3


def test_a_seed_draws_all_that_there_is():
    kinds = list(results.KINDS)
    cases = [results.drawn(seed, 8, kinds) for seed in range(300)]
    assert cases == [results.drawn(seed, 8, kinds) for seed in range(300)]
    assert {case.launcher for case in cases} == set(results.LAUNCHERS)
    assert {case.layout for case in cases} == set(results.LAYOUTS)
    assert {case.checkpoints for case in cases} == set(results.CHECKPOINTS)
    pairs = {(fault.kind, fault.site) for case in cases for fault in case.faults}
    assert pairs == {(kind, place) for kind in kinds for place in results.KINDS[kind]}
    cells = hangs.drawn(hangs.all_cells(), 60, 1)
    assert cells == hangs.drawn(hangs.all_cells(), 60, 1)
    every = {(cell.site, cell.kind) for cell in hangs.all_cells()}
    assert {(cell.site, cell.kind) for cell in cells} == every


@pytest.mark.parametrize(
    ("events", "problems"),
    [
        ([START, FAILURE, START, END], 0),
        ([START, FAILURE, START], 1),
        ([START, START, END], 1),
        ([START, FAILURE, START, FAILURE, START, END], 1),
        ([START, {**FAILURE, "recovered": True}, START, END], 1),
        ([], 1),
    ],
)
def test_a_ledger_that_lacks_something(tmp_path, events, problems):
    path = tmp_path / results.NAME
    path.write_text("".join(json.dumps(one) + "\n" for one in events))
    case = results.Case(1, "dp 2", "env", "plain", (Fault("exception", "step", 0),))
    assert len(results.check_ledger(case, path, 2)) == problems


@pytest.mark.parametrize(
    ("codes", "loaded", "output", "differing"),
    [
        ([[-9, 1], [0, 0]], [0, 6], "", 0),
        ([[-9, 1], [0, 0]], [0, 3], "", 1),  # iteration 6 was saved
        ([[-9, 1], [1, 1], [0, 0]], [0, 6, 6], "", 1),  # one failure has no fault
        ([[-9, 1], [0, 0]], [0, 6], "cannot load iteration 6", 1),
    ],
)
def test_what_is_wrong_in_attempts_is_seen(tmp_path, monkeypatch, codes, loaded, output, differing):
    case = results.Case(1, "dp 2", "env", "plain", (Fault("SIGKILL", "data", 0),))
    done = []

    def attempt(launch, folder, *_):
        (folder / "saved").mkdir(exist_ok=True)
        (folder / "log").touch()
        (folder / "err").write_text(output)
        (folder / "injected.0").write_text('{"pid": 1, "time": 1, "iteration": 0}')
        done.append(codes[len(done)])
        return done[-1], True

    monkeypatch.setattr(results.ranks, "attempt", attempt)
    monkeypatch.setattr(results, "starts_of", lambda folder: loaded[: len(done)])
    monkeypatch.setattr(results.reading, "latest", lambda folder: 6)
    monkeypatch.setattr(results, "check_ledger", lambda *_: [])
    problems, starts = results.run(case, tmp_path / "run")
    assert (len(problems), starts) == (differing, len(codes)), problems


@pytest.mark.parametrize(
    ("changes", "problems"),
    [
        ({}, 0),
        ({"to_report": 18.5}, 1),
        ({"to_end": 5.5}, 1),
        ({"files": ["torch_1"]}, 1),
        ({"codes": [4, 1]}, 1),
        ({"codes": [-9, -9]}, 1),
    ],
)
def test_a_hang_that_ends_badly(changes, problems):
    cell = hangs.Cell("data", "hang", 0, 2, "env")
    good = {"to_report": 5.0, "to_end": 1.0, "codes": [4, -9], "files": []}
    assert len(hangs.problems_of(cell, **{**good, **changes})) == problems


@pytest.mark.parametrize(
    ("changes", "right"),
    [
        ({}, True),
        ({"named": ("1", "11", "h", "data")}, False),
        ({"named": ("0", "11", "h", "data")}, False),
        ({"named": ("0", "10", "other", "data")}, False),
        ({"named": ("0", "10", "h", "save")}, False),
        ({"kind": hangs.CUT, "named": ("1", "11", "h", "data, collective")}, True),
    ],
)
def test_who_hangs_is_named(monkeypatch, changes, right):
    """Rank, process, host and phase; where the network is cut, either end."""
    monkeypatch.setattr(hangs.socket, "gethostname", lambda: "h")
    case = {"kind": "hang", "named": ("0", "10", "h", "data"), **changes}
    cell = hangs.Cell("data", case["kind"], 0, 2, "env")
    assert hangs.is_culprit(cell, case["named"], [10, 11], 10) is right


def test_files_left_in_shared_memory_are_those_that_no_living_process_has_mapped():
    """Other programs use /dev/shm during a campaign."""
    before = ranks.shared_files()
    mapped = SharedMemory(f"psm_{uuid.uuid4().hex}", create=True, size=64)
    unmapped = Path("/dev/shm", f"psm_{uuid.uuid4().hex}")
    unmapped.write_bytes(b"x")
    try:
        files = ranks.left_behind(before, seconds=0)
    finally:
        unmapped.unlink()
        mapped.close()
        mapped.unlink()
    assert unmapped.name in files and mapped.name not in files
