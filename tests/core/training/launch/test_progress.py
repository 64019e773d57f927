"""What follows from a rank that makes no progress, whether a process computes, and the watch of a run
of one rank."""

import contextlib
import io
import itertools
import re
import subprocess
import sys
import time

import pytest

from megatron.config import command_line
from megatron.training.launch import progress
from megatron.training.launch.hang_limits import HangAction, RankState, RunPhase, decide
from megatron.training.launch.initialize import connect
from megatron.training.launch.progress import Clock
from megatron.training.launch.signals import SignalWatch
from tests.forkrun import run_ranks
from tests.runs import SMALL

LIMIT = 60.0
DP = "all_reduce over dp (ranks 0-3)"
TP = "all_reduce over tp (ranks 0-1)"
# a rank in each situation that the monitor distinguishes
STATES = {
    "works": RankState(5.0, LIMIT),
    "works, no limit": RankState(5000.0, None),
    "starved": RankState(61.0, LIMIT, computes=True),
    "starved for nearly ten limits": RankState(600.0, LIMIT, computes=True),
    "computes without end": RankState(601.0, LIMIT, computes=True),
    "sleeps": RankState(61.0, LIMIT),
    "waits": RankState(61.0, LIMIT, waits=DP),
    "waits and spins": RankState(61.0, LIMIT, waits=DP, computes=True),
    "waits for more than four limits": RankState(241.0, LIMIT, waits=DP),
    "waits elsewhere for more than four limits": RankState(241.0, LIMIT, waits=TP, computes=True),
    "exits": RankState(61.0, LIMIT, waits=""),
    "stopped": RankState(1.0, LIMIT, answers=False, stopped=True),
    "silent": RankState(1.0, 0.0, answers=False),
    "silent in a save": RankState(5.0, LIMIT, answers=False),
    "silent without a core": RankState(1.0, 0.0, answers=False, computes=True),
}
HEALTHY = {"works", "works, no limit", "starved", "starved for nearly ten limits"}
HUNG = {"computes without end", "sleeps", "stopped", "silent"}


@pytest.mark.parametrize("name", STATES)
def test_a_run_of_one_rank_is_never_ended(name):
    state = STATES[name]
    expected = HangAction.WARN if state.limit is not None and state.seconds > state.limit else None
    assert decide({0: state}, 1).action is (expected or HangAction.NOTHING)


@pytest.mark.parametrize(
    ("first", "second", "action", "ranks"),
    [
        ("waits", "works", HangAction.WARN, (1,)),
        ("waits", "starved", HangAction.WARN, (1,)),
        ("waits", "starved for nearly ten limits", HangAction.WARN, (1,)),
        ("waits", "computes without end", HangAction.END, (1,)),
        ("waits and spins", "sleeps", HangAction.END, (1,)),
        ("waits", "silent", HangAction.END, (1,)),
        ("waits", "silent in a save", HangAction.NOTHING, ()),
        ("waits", "silent without a core", HangAction.NOTHING, ()),
        ("silent without a core", "stopped", HangAction.END, (1,)),
        ("waits", "exits", HangAction.NOTHING, ()),
        ("starved", "sleeps", HangAction.WARN, (0,)),
        ("starved", "stopped", HangAction.END, (1,)),
        ("starved", "silent", HangAction.WARN, (0,)),
        ("sleeps", "computes without end", HangAction.END, (0, 1)),
        ("waits and spins", "waits", HangAction.NOTHING, ()),
        ("waits for more than four limits", "waits", HangAction.NOTHING, ()),
        *[("waits for more than four limits",) * 2 + (HangAction.END, (0, 1))],
    ],
)
def test_two_ranks(first, second, action, ranks):
    assert decide({0: STATES[first], 1: STATES[second]}, 2) == (action, ranks)


def test_of_ranks_that_wait_those_hang_that_wait_for_something_else():
    common = STATES["waits for more than four limits"]
    states = {0: common, 1: STATES["waits elsewhere for more than four limits"], 2: common}
    assert decide(states, 3) == (HangAction.END, (1,))


def test_what_holds_of_any_three_ranks():
    """The end names only ranks that hang. A rank that works or computes keeps the others from being
    ended, unless one is stopped; without it a rank that hangs ends the run."""
    for names in itertools.product(STATES, repeat=3):
        action, ranks = decide(dict(enumerate(STATES[name] for name in names)), 3)
        named = {names[rank] for rank in ranks}
        is_healthy = bool(HEALTHY & set(names)) and "stopped" not in names
        assert (action is HangAction.WARN) == is_healthy, names
        if is_healthy:
            assert named == HEALTHY & set(names), names
        elif HUNG & set(names):
            assert action is HangAction.END and named == HUNG & set(names), names
        elif not all("four limits" in name for name in names):
            assert action is HangAction.NOTHING, names


# prints whether this process computes, on a CPU and with an accelerator, while `call` runs
COMPUTES = """
import hashlib, multiprocessing, os, threading, time
from megatron.training.launch import progress
from megatron.training.launch.hang_limits import HangLimits
progress.TICK = 0.2

def collatz(number):
    return 1 if number == 1 else 1 + collatz(number // 2 if number % 2 == 0 else 3 * number + 1)

def spin():
    while True:
        for number in range(1, 1000):
            collatz(number)

def wake():
    while True:
        time.sleep(0.5)

def one_call():
    hashlib.pbkdf2_hmac("sha256", b"1" * 1000, b"2" * 1000, 50_000_000)

def workers():
    context = multiprocessing.get_context("fork")
    for worker in [context.Process(target=spin, daemon=True) for _ in range(4)]:
        worker.start()
        os.sched_setaffinity(worker.pid, [min(os.sched_getaffinity(0))])
    threading.Event().wait()

def computes(has_accelerator):
    watched = progress.RankProgress(HangLimits(0.1, None, None, None, None))
    watched.has_accelerator = has_accelerator
    for _ in range(6):
        watched._look()
        time.sleep(progress.TICK)
    return watched._computes()

threading.Thread(target=CALL, daemon=True).start()
time.sleep(0.5)
print(computes(False), computes(True), flush=True)
for worker in multiprocessing.active_children():
    worker.kill()
os._exit(0)
"""


@pytest.mark.parametrize(
    ("call", "on_cpu", "with_accelerator"),
    [
        ("threading.Event().wait", "False", "False"),
        # seen by chance, somewhere else than in its sleep
        pytest.param("wake", "False", None, marks=pytest.mark.campaign),
        ("spin", "True", "True"),
        # as a thread that waits for a device
        pytest.param("one_call", "True", "False", marks=pytest.mark.campaign),
        pytest.param("workers", "True", "True", marks=pytest.mark.campaign),
    ],
)
def test_a_process_computes(call, on_cpu, with_accelerator):
    code = COMPUTES.replace("CALL", call)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    seen = done.stdout.split()
    assert seen == [on_cpu, with_accelerator or seen[1]], done.stderr


def test_a_clock_counts_no_sleep(monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    clock = Clock()
    for later, seconds in ((100.5, 0.5), (101.5, 1.5), (90_000.0, 3.5), (5.0, 3.5), (6.0, 4.5)):
        now = later
        assert clock.now() == pytest.approx(seconds)


def stalled(rank: int, world: int, computes: bool) -> str:
    """What a run of one rank that makes no progress for 20 limits of its phase has printed."""
    progress.TICK = 0.1
    watch = SignalWatch()
    words = [*SMALL, "--mock-data", "--train-iters", "10"]
    with contextlib.redirect_stderr(io.StringIO()) as err:
        connect(command_line.read(words, {}).config, watch)
        watch.monitor.has_accelerator = False
        watch.monitor.begin(RunPhase("evaluation", limit=0.2))
        end = time.monotonic() + 4.0
        while time.monotonic() < end:
            if not computes:
                time.sleep(4.0)
        return err.getvalue()


@pytest.mark.parametrize("computes", [False, pytest.param(True, marks=pytest.mark.campaign)])
def test_a_run_of_one_rank_that_stalls_goes_on(computes):
    """It is warned about, once; of one that waits the stack is shown."""
    text = run_ranks(1, stalled, computes)[0]
    assert len(re.findall(r"^WARNING: rank 0 \(process \d+ .* evaluation;", text, re.M)) == 1
    assert ("in stalled\n" in text) == (not computes)
