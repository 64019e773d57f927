"""A rank that makes no progress: it is named with its phase and stack, and every rank ends."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from tests.campaigns.e2e.programs import fork_program, fork_ranks
from tests.forkrun import run_ranks
from tests.runs import SMALL, write_text
from tools.benchmarks.faults import inject
from tools.benchmarks.faults.inject import Fault

HUNG = 4
ITERATION = 4


def hang(kind: str, place: str, rank: int, folder: Path) -> None:
    """A hook: this rank hangs in its ITERATION-th call of the place's function."""
    own = int(os.environ.get("RANK", "0"))
    inject.install([Fault(kind, place, rank, ITERATION)], own, folder)


def hung(rank: int, world: int, folder: Path, culprit: int, kind: str, place: str) -> dict:
    words = [*SMALL, "--data-path", str(folder.parent / "text"), "--split", "90,10,0"]
    words += ["--train-iters", "50", "--micro-batch-size", "2", "--hang-timeout-seconds", "2"]
    folder.mkdir()
    programs = fork_ranks(words, folder, 2, before=lambda: hang(kind, place, culprit, folder))
    codes = [program.end(120) for program in programs]
    return {
        "codes": codes,
        "pid": programs[culprit].pid,
        "left": [program.left_behind(20.0) for program in programs],
        "err": "".join(program.err for program in programs),
    }


@pytest.mark.campaign
@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize(
    "kind, place, phase",
    [
        ("hang", "data", "data"),
        ("hang", "step", "training step"),
        ("SIGSTOP", "data", "data"),
        ("C code with the lock", "data", "data"),
    ],
)
def test_the_rank_that_hangs_is_named(tmp_path, kind, place, phase, culprit):
    write_text(tmp_path / "text", 260)
    found = run_ranks(1, hung, tmp_path / "run", culprit, kind, place)[0]
    codes = [HUNG, HUNG]
    if kind != "hang":
        codes[culprit] = -signal.SIGKILL
    assert found["codes"] == codes, found["err"]
    assert found["left"] == [[], []]
    named = re.findall(
        r"^hang: rank (\d+) \(process (\d+) on .*phase: ([\w -]+);", found["err"], re.M
    )
    assert named == [(str(culprit), str(found["pid"]), phase)], found["err"]
    assert "in strike" in found["err"]


def alone(rank: int, world: int, folder: Path) -> dict:
    """A run of one rank without launcher variables that hangs in its ITERATION-th iteration."""
    words = [*SMALL, "--data-path", str(folder.parent / "text"), "--split", "90,10,0"]
    words += ["--train-iters", "50", "--hang-timeout-seconds", "1"]
    words += ["--save", str(folder / "save"), "--save-interval", "50"]
    folder.mkdir()
    program = fork_program(words, folder, before=lambda: hang("hang", "step", 0, folder))
    code = program.end(60)
    return {
        "code": code,
        "pid": program.pid,
        "left": program.left_behind(20.0),
        "err": program.err,
    }


@pytest.mark.campaign
def test_one_rank_is_watched_too(tmp_path):
    """It is named with phase and stack, the ledger has the failure, the lock is free."""
    write_text(tmp_path / "text", 100)
    found = run_ranks(1, alone, tmp_path / "run")[0]
    assert (found["code"], found["left"]) == (HUNG, []), found["err"]
    assert re.findall(
        r"^hang: rank 0 \(process (\d+) on .*phase: ([\w ]+);", found["err"], re.M
    ) == [(str(found["pid"]), "training step")]
    assert "in strike" in found["err"]
    events = tmp_path / "run" / "save" / "run_events.jsonl"
    if events.exists():  # with the feature goodput
        last = json.loads(events.read_text().splitlines()[-1])
        assert (last["event"], last["code"], last["iteration"]) == ("failure", HUNG, ITERATION)
    assert not list((tmp_path / "run" / "save").glob(".lock*"))
