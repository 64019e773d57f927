"""A rank fails or dies, anywhere: within seconds every other one ends, and what a user reads last
is what happened, once.

Ranks without an agent that would end them, as srun's: forked, with stderr on one terminal. torchrun
is in test_launchers.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.utils.data._utils import worker as data_worker

from megatron.parallel import context
from megatron.training import build_data, loop, step
from megatron.training.launch import initialize, rendezvous
from tests.campaigns.e2e.programs import Program, fork_ranks
from tests.forkrun import run_ranks
from tests.runs import SMALL, write_text

LOOP = loop.__name__
TP2 = ("--tensor-model-parallel-size", "2")
ENDS_WITHIN = 15.0
Hook = Callable[[], None]


def argv(folder: Path, *extra: str) -> list[str]:
    return [
        *SMALL,
        "--data-path",
        str(folder.parent / "text"),
        "--split",
        "90,10,0",
        "--train-iters",
        "8",
        *extra,
    ]


@pytest.fixture
def folder(tmp_path) -> Path:
    write_text(tmp_path / "text", 260)
    return tmp_path / "run"


def on_rank(rank: int, act: Callable[[], None], place: str, name: str, at: int = 1) -> Hook:
    """A hook: on this rank, the call number `at` of the module's function does `act` first, and
    says when."""

    def hook() -> None:
        if os.environ["RANK"] == str(rank):
            right = getattr(sys.modules[place], name)
            calls = []

            def wrong(*args, **kwargs):
                calls.append(1)
                if len(calls) == at:
                    print(f"now {time.time()}", flush=True)
                    act()
                return right(*args, **kwargs)

            setattr(sys.modules[place], name, wrong)

    return hook


def fail() -> None:
    raise KeyError("planted")


def leave() -> None:
    sys.exit(3)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def stand() -> None:
    time.sleep(1000)


def complain() -> None:
    raise ValueError("planted")


def run_out() -> None:
    raise torch.OutOfMemoryError("planted")


def poison() -> None:
    """The losses after this are no numbers."""
    right = step.make_batch

    def nan(*args):
        batch = right(*args)
        object.__setattr__(batch, "loss_mask", batch.tokens * float("nan"))
        return batch

    step.make_batch = nan


def ended(
    folder: Path,
    world: int,
    hooks: list[Hook],
    extra: tuple[str, ...],
    ranks: list[int] | None = None,
) -> dict:
    """Exit codes, what stands on the terminal, and how long after the fault the last rank ended."""

    def before() -> None:
        for hook in hooks:
            hook()

    folder.mkdir()
    (folder / "err.0").touch()
    for rank in range(1, world):
        (folder / f"err.{rank}").symlink_to("err.0")
    programs = fork_ranks(argv(folder, *extra), folder, world, before=before, ranks=ranks)
    codes = [program.end() for program in programs]
    now = time.time()
    left = [program.left_behind(8.0) for program in programs]
    said = [
        line.split()[1]
        for program in programs
        for line in program.out.splitlines()
        if line.startswith("now ")
    ]
    return {
        "codes": codes,
        "left": left,
        "seconds": now - float(said[0]) if said else None,
        "pids": pids(programs),
        "terminal": programs[0].err,
        "log": "".join(program.out for program in programs),
    }


def pids(programs: list[Program]) -> list[int]:
    return [program.pid for program in programs]


def result(folder: Path, world: int, hooks: list[tuple], *extra: str) -> dict:
    """`ended`, in a process that has torch; within the time, and nobody is left."""
    found = run_ranks(1, run_hooks, folder, world, hooks, extra)[0]
    assert found["seconds"] is None or found["seconds"] < ENDS_WITHIN
    assert found["left"] == [[]] * len(found["codes"])
    return found


def run_hooks(rank: int, world: int, folder: Path, ranks: int, hooks: list[tuple], extra) -> dict:
    # how often one that lives on looks for its parent; torch's is 5
    data_worker.MP_STATUS_CHECK_INTERVAL = 1.0
    return ended(folder, ranks, [on_rank(*hook) for hook in hooks], extra)


def assert_traceback_last(found: dict, rank: int, error: str) -> None:
    """One traceback, of this rank, named with its process, and nothing below; of the others at most
    one line."""
    text = found["terminal"]
    head, _, body = text.partition("Traceback (most recent call last):\n")
    assert body.endswith(f"\n{error}\n") and "Traceback" not in body and body.count(error) == 1, (
        text
    )
    name = f"rank {rank} (process {found['pids'][rank]} on "
    *others, heading = head.splitlines()
    assert heading.startswith(name) and heading.endswith(" failed:")
    assert len(others) == (rank != 0) and all(
        line.startswith(f"rank 0 ends, because {name}") for line in others
    ), text


FAULTS = {
    "in a step": (LOOP, "train_step", 3),
    "in forward, in the middle of a step": (step.__name__, "make_batch", 4),
    "before the process group": (initialize.__name__, "initialize", 1),
    "while the data is built": (build_data.__name__, "data_source", 1),
}


@pytest.mark.parametrize(
    "rank, where",
    [
        (2, "in forward, in the middle of a step"),
        (2, "before the process group"),
        *[pytest.param(2, where, marks=pytest.mark.campaign) for where in list(FAULTS)[::3]],
        *[pytest.param(0, where, marks=pytest.mark.campaign) for where in FAULTS],
    ],
)
def test_an_exception(folder, rank, where):
    found = result(folder, 4, [(rank, fail, *FAULTS[where])], *TP2)
    assert found["codes"] == [1] * 4
    assert_traceback_last(found, rank, "KeyError: 'planted'")


def test_sys_exit_of_one_rank(folder):
    found = result(folder, 3, [(1, leave, LOOP, "train_step", 3)], "--global-batch-size", "6")
    assert found["codes"] == [3] * 3
    assert_traceback_last(found, 1, "SystemExit: 3")


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.campaign)])
def test_a_killed_rank(folder, rank):
    """With data workers, which hold copies of its connections and outlive it for a second."""
    found = result(
        folder,
        3,
        [(rank, kill, LOOP, "train_step", 3)],
        "--global-batch-size",
        "6",
        "--num-workers",
        "1",
    )
    assert found["codes"] == [-signal.SIGKILL if r == rank else 1 for r in range(3)]
    (line,) = found["terminal"].splitlines()
    speaker = 0 if rank else 1
    assert line.startswith(f"rank {speaker} ends, ") and "SIGKILL" in line, line
    assert f"rank {rank} (process {found['pids'][rank]} on " in line, line


def test_a_crash_inside_a_library(folder):
    found = result(folder, 2, [(1, crash, LOOP, "train_step", 3)])
    assert found["codes"] == [1, -signal.SIGSEGV]
    first = found["terminal"].splitlines()[0]
    last = found["terminal"].splitlines()[-1]
    assert first.endswith("Segmentation fault") and " in crash\n" in found["terminal"]
    assert last.startswith("rank 0 ends, ") and f"rank 1 (process {found['pids'][1]} on " in last


@pytest.mark.parametrize("fault, code", [(fail, 1), (kill, -signal.SIGKILL)])
def test_ranks_that_hear_nothing_of_their_collectives_end_too(folder, fault, code):
    """As with NCCL, whose collectives wait for the dead: here the others stand somewhere else for
    good."""
    found = result(
        folder,
        3,
        [
            (1, fault, LOOP, "train_step", 3),
            (0, stand, LOOP, "train_step", 3),
            (2, stand, LOOP, "train_step", 3),
        ],
        "--global-batch-size",
        "6",
    )
    assert found["codes"] == [1, code, 1]
    if fault is fail:
        assert_traceback_last(found, 1, "KeyError: 'planted'")


def test_what_all_ranks_meet_is_said_once(folder):
    found = result(folder, 4, [(rank, complain, LOOP, "train_step", 2) for rank in range(4)])
    assert found["codes"] == [1] * 4 and found["terminal"] == "error: planted\n"


# --- what the user can mend is a line


def test_a_single_process(folder):
    """Its data workers end too. A fault of the program has its traceback."""
    words = ("--num-workers", "2")
    found = result(folder, 1, [(0, complain, LOOP, "train_step", 3)], *words)
    assert found["codes"] == [1] and found["terminal"] == "error: planted\n"
    found = result(folder.with_name("again"), 1, [(0, fail, LOOP, "train_step", 3)], *words)
    text = found["terminal"]
    assert found["codes"] == [1] and text.count("Traceback") == 1
    assert text.startswith("Traceback") and text.endswith("KeyError: 'planted'\n")


@pytest.mark.parametrize("fault, end", [(complain, ": planted"), (run_out, " [out-of-memory]")])
@pytest.mark.parametrize(
    "layout", [(), TP2, ("--pipeline-model-parallel-size", "2")], ids=["dp", "tp", "pp"]
)
def test_a_lone_culprit_says_it_and_rank_0_points_to_it(folder, layout, fault, end):
    found = result(folder, 2, [(1, fault, LOOP, "train_step", 3)], *layout)
    pointing, error = sorted(found["terminal"].splitlines())
    assert found["codes"] == [1, 1]
    assert error.startswith("rank 1: error: ") and error.endswith(end)
    assert pointing.startswith("rank 0 ends, ")
    assert f" rank 1 (process {found['pids'][1]} on " in pointing


def test_a_nan_names_the_rank_that_has_it(folder):
    found = result(folder, 2, [(1, poison, step.__name__, "make_batch")])
    (line,) = found["terminal"].splitlines()
    assert found["codes"] == [1, 1] and line.startswith("error: iteration ")
    assert line.endswith("[loss-not-finite]") and "rank 1" in line


# --- time


def seconds_for_minutes() -> None:
    for module in (initialize, context, rendezvous):
        module.timedelta = lambda minutes=0, seconds=0: timedelta(seconds=minutes + seconds)


def late(
    rank: int, world: int, folder: Path, ranks: int, minutes: str, hooks: list[tuple], extra, only
) -> dict:
    return ended(
        folder,
        ranks,
        [seconds_for_minutes, *(on_rank(*hook) for hook in hooks)],
        ("--distributed-timeout-minutes", minutes, *extra),
        only,
    )


@pytest.mark.campaign
@pytest.mark.parametrize("layout", [(), TP2], ids=["dp", "tp dp"])
def test_a_collective_that_waits_too_long(folder, layout):
    """The limit, here seconds, holds in every group; the message says who was waited for and where
    that rank stands."""
    found = run_ranks(1, late, folder, 4, "5", [(2, stand, LOOP, "train_step", 3)], layout, None)[0]
    assert (
        found["codes"] == [1] * 4
        and found["left"] == [[]] * 4
        and 5 <= found["seconds"] < 5 + ENDS_WITHIN
    )
    # whose time is over first tells; rank 0 says so if that is another
    *others, line = found["terminal"].splitlines()
    assert (
        len(others) == ("rank " in line.partition("error: ")[0])
        and "Traceback" not in found["terminal"]
    )
    assert "--distributed-timeout-minutes 5 " in line and "collectives.py:" in line
    line = line.partition("error: ")[2]
    assert f": rank 2 (process {found['pids'][2]} on " in line and "): stand (" in line
    assert (
        line.count("rank 2") == 1
        and "rank 3" not in line
        and "rank 1" not in line
        and line.endswith(" is right")
    )


@pytest.mark.campaign
def test_a_rank_that_never_comes(folder):
    found = run_ranks(1, late, folder, 3, "3", [], ("--global-batch-size", "6"), [0, 1])[0]
    assert found["codes"] == [1] * 2 and found["terminal"].count("error: ") == 1
    line = found["terminal"].splitlines()[-1]  # torch has warnings of its own
    assert "--distributed-timeout-minutes 3 " in line and " in initialize (" in line
    assert ": rank 2 never joined" in line
