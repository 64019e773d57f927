"""A rank that makes no progress: it is named with its phase and stack, and every rank ends. A run of
one rank, and one on a busy machine, is warned about and goes on."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from bench.faults import inject
from bench.faults.inject import Fault
from tests.campaigns.e2e.programs import fork_program, fork_ranks
from tests.forkrun import run_ranks
from tests.runs import SMALL, write_text

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
@pytest.mark.parametrize(
    "kind, place, phase, culprit",
    [
        ("hang", "data", "data", 1),
        ("hang", "step", "training step", 0),
        ("SIGSTOP", "data", "data", 0),
        ("C code with the lock", "data", "data", 1),
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


def alone(rank: int, world: int, folder: Path) -> tuple[int, list[int], str]:
    """A run of one rank without launcher variables that hangs in its ITERATION-th iteration, and is
    interrupted four limits after the warning."""
    words = [*SMALL, "--data-path", str(folder.parent / "text"), "--split", "90,10,0"]
    words += ["--train-iters", "50", "--hang-timeout-seconds", "1"]
    folder.mkdir()
    program = fork_program(words, folder, before=lambda: hang("hang", "step", 0, folder))
    program.wait_until(lambda: "in strike" in program.err, 60, "no warning")
    time.sleep(4)
    program.interrupt()
    return program.end(60), program.left_behind(20.0), program.err


@pytest.mark.campaign
def test_one_rank_is_warned_about_and_goes_on(tmp_path):
    write_text(tmp_path / "text", 100)
    code, left, err = run_ranks(1, alone, tmp_path / "run")[0]
    assert (code, left) == (130, []), err
    assert len(re.findall(r"^WARNING: rank 0 .* phase: training step; strike", err, re.M)) == 1
