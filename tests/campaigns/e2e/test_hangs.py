"""A rank that makes no progress: it is named with its phase and stack, and every rank ends. A run of
one rank, and one on a busy machine, is warned about and goes on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.campaigns.e2e.programs import Program, fork_program, fork_ranks
from tests.forkrun import run_ranks
from tests.runs import SMALL, with_flags, write_text
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


def alone(rank: int, world: int, folder: Path) -> tuple[int, list[int], str]:
    """A run of one rank without launcher variables that hangs in its ITERATION-th iteration, and is
    interrupted ten limits after the warning."""
    words = [*SMALL, "--data-path", str(folder.parent / "text"), "--split", "90,10,0"]
    words += ["--train-iters", "50", "--hang-timeout-seconds", "1"]
    folder.mkdir()
    program = fork_program(words, folder, before=lambda: hang("hang", "step", 0, folder))
    program.wait_until(lambda: "in strike" in program.err, 60, "no warning")
    time.sleep(10)
    program.interrupt()
    return program.end(60), program.left_behind(20.0), program.err


@pytest.mark.campaign
def test_one_rank_is_warned_about_and_goes_on(tmp_path):
    write_text(tmp_path / "text", 100)
    code, left, err = run_ranks(1, alone, tmp_path / "run")[0]
    assert (code, left) == (130, []), err
    assert len(re.findall(r"^WARNING: rank 0 .* phase: training step; strike", err, re.M)) == 1


@contextmanager
def busy_core(core: int, count: int, seconds: float) -> Iterator[list[subprocess.Popen]]:
    """So many processes compute on this core, at nice 0, at most so many seconds. The scheduler may
    share cores between sessions first, so each has its own."""
    code = f"import time; end = time.time() + {seconds}\nwhile time.time() < end: pass"
    command = ["taskset", "-c", str(core), sys.executable, "-S", "-c", code]
    processes = [subprocess.Popen(command, start_new_session=True) for _ in range(count)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def seconds_for(computing: float, core: int) -> float:
    """How long so many seconds of computing on this core take."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, [core])
    begun = time.monotonic()
    until = time.thread_time() + computing
    while time.thread_time() < until:
        pass
    os.sched_setaffinity(0, cores)
    return time.monotonic() - begun


STRAGGLER = re.compile("^straggler: rank .*computes", re.M)
SLOW = re.compile("^WARNING: rank 0 .*made no progress.*computes", re.M)


def starved(rank: int, world: int, folder: Path, seconds: float) -> dict:
    """A run of one rank and one of two on a core with a load of 20; then a rank is stopped. Half of
    the micro-batches compute for longer than 0.1 s, and the limit is 60 % of what that takes."""
    core = max(os.sched_getaffinity(0))
    words = with_flags(
        SMALL,
        *("--num-layers", "4", "--hidden-size", "256"),
        *("--micro-batch-size", "1", "--global-batch-size", "2"),
        *("--seq-length", "448", "--max-position-embeddings", "448", "--eval-interval", "10000"),
        *("--train-iters", "10000", "--data-path", str(folder.parent / "text")),
        *("--split", "90,10,0"),
    )
    folder.mkdir()
    programs: list[Program] = []

    def pin() -> None:
        os.sched_setaffinity(0, [core])

    try:
        with busy_core(core, 20, seconds + 400) as others:
            time.sleep(2)
            limit = max(1.0, 0.6 * seconds_for(0.1, core))
            words += ["--hang-timeout-seconds", f"{limit:.1f}"]
            for other in others:
                other.send_signal(signal.SIGSTOP)
            programs += fork_ranks(words, folder / "two", 2, before=pin)
            programs.append(fork_program(words, folder / "one", before=pin))
            for program in programs[1:]:  # the last rank prints iterations
                program.wait_until(lambda p=program: iterations(p.out) > 0, 240, "no iteration")
            for other in others:
                other.send_signal(signal.SIGCONT)
            time.sleep(seconds)
            two, alone = programs[0], programs[2]
            two.wait_until(lambda: STRAGGLER.search(two.out) is not None, 120, "no straggler")
            alone.wait_until(lambda: SLOW.search(alone.err) is not None, 120, "no warning")
            codes = [program.poll() for program in programs]
            if codes == [None, None, None]:
                programs[1].signal(signal.SIGSTOP)
            stopped = time.monotonic()
            ends = [program.end(120) for program in programs[:2]]
            to_end = time.monotonic() - stopped
        done = iterations(programs[2].out)
        programs[2].wait_until(lambda: iterations(programs[2].out) > done, 120, "no iteration")
        programs[2].interrupt()
        return {
            "codes": codes,
            "ends": [*ends, programs[2].end(60)],
            "seconds": to_end - limit,
            "out": [program.out for program in programs],
            "err": [program.err for program in programs],
        }
    finally:
        for program in programs:
            program.kill()


def iterations(text: str) -> int:
    """That were logged."""
    return len(re.findall(r"^ iter +\d+/", text, re.M))


@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(40, marks=pytest.mark.campaign),
        pytest.param(180, marks=pytest.mark.sweep),
    ],
)
def test_a_busy_machine_is_no_hang(tmp_path, seconds):
    """Micro-batches take longer than the limit there."""
    write_text(tmp_path / "text", 2000)
    result = run_ranks(1, starved, tmp_path / "run", seconds, seconds=seconds + 300.0)[0]
    first, second, alone = result["err"]
    assert result["codes"] == [None, None, None], first + second + alone
    assert result["ends"] == [HUNG, -signal.SIGKILL, 130]
    assert result["seconds"] < 60  # until both have ended, of which each second is 1/20 of a core
