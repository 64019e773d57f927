"""A rank that makes no progress: it is named with its phase and stack, and every rank ends."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import time
from pathlib import Path

import pytest

from megatron.training import loop, step
from megatron.training.logging.run_events_file import NAME, read_events
from tests.e2e.programs import fork_program, fork_ranks
from tests.forkrun import run_ranks
from tests.runs import SMALL, write_text

HUNG = 4
ITERATION = 4


def sleep() -> None:
    time.sleep(1000)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hold_the_lock() -> None:
    """In C, without giving other threads of Python their turn."""
    ctypes.PyDLL(None).sleep(1000)


def hang_on(rank: int, module, name: str, act) -> None:
    """On this rank the module's function hangs in its ITERATION-th call."""
    if os.environ.get("RANK", "0") != str(rank):
        return
    right = getattr(module, name)
    calls = []

    def wrong(*args, **kwargs):
        calls.append(1)
        if len(calls) == ITERATION:
            act()
        return right(*args, **kwargs)

    wrong.__code__ = wrong.__code__.replace(co_name=name)  # as its stack shows it
    setattr(module, name, wrong)


PLACES = {"data": (step, "make_batch"), "training step": (loop, "train_step")}


def hung(rank: int, world: int, folder: Path, culprit: int, place: str, act) -> dict:
    words = [*SMALL, "--data-path", str(folder.parent / "text"), "--split", "90,10,0"]
    words += ["--train-iters", "50", "--micro-batch-size", "2", "--hang-timeout-seconds", "2"]
    folder.mkdir()
    programs = fork_ranks(words, folder, 2, before=lambda: hang_on(culprit, *PLACES[place], act))
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
    "act, place, killed",
    [
        (sleep, "data", False),
        (sleep, "training step", False),
        (stop, "data", True),
        (hold_the_lock, "data", True),
    ],
    ids=["sleep in data", "sleep in a step", "stopped", "holds the lock"],
)
def test_the_rank_that_hangs_is_named(tmp_path, act, place, killed, culprit):
    write_text(tmp_path / "text", 260)
    found = run_ranks(1, hung, tmp_path / "run", culprit, place, act)[0]
    codes = [HUNG, HUNG]
    if killed:
        codes[culprit] = -signal.SIGKILL
    assert found["codes"] == codes, found["err"]
    assert found["left"] == [[], []]
    named = re.findall(
        r"^hang: rank (\d+) \(process (\d+) on .*phase: ([\w -]+);", found["err"], re.M
    )
    assert named == [(str(culprit), str(found["pid"]), place)], found["err"]
    assert f"in {act.__name__}" in found["err"]


def alone(rank: int, world: int, folder: Path, act, place: str) -> dict:
    """A run of one rank without launcher variables that hangs in its ITERATION-th iteration."""
    words = [*SMALL, "--data-path", str(folder.parent / "text"), "--split", "90,10,0"]
    words += ["--train-iters", "50", "--hang-timeout-seconds", "1"]
    words += ["--save", str(folder / "save"), "--save-interval", "50"]
    folder.mkdir()
    program = fork_program(words, folder, before=lambda: hang_on(0, *PLACES[place], act))
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
    found = run_ranks(1, alone, tmp_path / "run", sleep, "training step")[0]
    assert (found["code"], found["left"]) == (HUNG, []), found["err"]
    assert re.findall(
        r"^hang: rank 0 \(process (\d+) on .*phase: ([\w ]+);", found["err"], re.M
    ) == [(str(found["pid"]), "training step")]
    assert "in sleep" in found["err"]
    last = read_events(tmp_path / "run" / "save" / NAME)[-1]
    assert (last["event"], last["code"], last["iteration"]) == ("failure", HUNG, ITERATION)
    assert not list((tmp_path / "run" / "save").glob(".lock*"))
