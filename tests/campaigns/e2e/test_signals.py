"""Signals and Ctrl-C as they reach a run: what it says, its exit code, what it leaves, and that it
goes on."""

import functools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.checkpoint import reading
from megatron.training import loop
from megatron.training.launch import signals
from tests.campaigns.e2e.programs import Program, fork_program, fork_ranks
from tests.forkrun import run_ranks
from tests.runs import EXACT, SMALL, Finished, same_tensors, train, write_text

ITERATIONS = 12
SAVE_EVERY = 4
SECOND = "second signal: exiting immediately, without a save\n"
GOES_ON = "interrupted: the same command resumes from the last checkpoint\n"


def argv(folder: Path, *extra: str) -> list[str]:
    save = str(folder / "save")
    return [
        *SMALL,
        "--data-path",
        str(folder.parent / "text"),
        "--split",
        "90,10,0",
        "--train-iters",
        str(ITERATIONS),
        "--save",
        save,
        "--load",
        save,
        "--save-interval",
        str(SAVE_EVERY),
        *extra,
    ]


def measured(folder: Path, *extra: str) -> list[str]:
    """... with the metrics file that `tests.runs.train` adds for itself."""
    return argv(folder, *extra, "--metrics-file", str(folder / "metrics.jsonl"))


def slow_from(iteration: int, seconds: float):
    """A hook that makes training steps slow from `iteration` on, and announces each."""

    def hook() -> None:
        step = loop.train_step

        def slow(run, forward_step, samples, number, flag):
            if number >= iteration:
                print(f"slow step {number}", flush=True)
                time.sleep(seconds)
            return step(run, forward_step, samples, number, flag)

        loop.train_step = slow

    return hook


def ended(programs: list[Program]) -> list[tuple[int, str, list[int]]]:
    """(exit code, stderr, processes left) of each."""
    return [(p.end(), p.err, p.left_behind()) for p in programs]


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Callable[[int], Finished]:
    """The run on so many ranks that was never interrupted."""

    @functools.cache
    def run(world: int) -> Finished:
        folder = tmp_path_factory.mktemp("straight")
        write_text(folder / "text", 260)
        return train(folder / "run", argv(folder / "run"), world)

    return run


def assert_goes_on(folder: Path, straight: Finished, world: int = 1) -> None:
    """The same command ends the run, and it is the run that was never interrupted."""
    resumed = train(folder, argv(folder), world)
    assert resumed.series(*EXACT) == straight.series(*EXACT) and len(straight.rows) == ITERATIONS
    same_tensors(resumed.tensors(), straight.tensors())


@pytest.fixture
def folder(tmp_path) -> Path:
    write_text(tmp_path / "text", 260)
    return tmp_path / "run"


# --- Ctrl-C


def interrupt(rank: int, world: int, folder: Path, extra: list[str], hook, text: str) -> list:
    program = fork_program(measured(folder, *extra), folder, before=hook)
    program.wait_for(text)
    program.interrupt()
    return ended([program])


def interrupt_in_training(rank: int, world: int, folder: Path, extra: list[str]) -> list:
    return interrupt(rank, world, folder, extra, slow_from(6, 0.2), "slow step 7")


def test_ctrl_c_in_training(folder, straight):
    """With data workers: one line, exit code 130, nobody left, and the same command goes on bit for
    bit."""
    assert run_ranks(1, interrupt_in_training, folder, ["--num-workers", "2"]) == [
        [(130, GOES_ON, [])]
    ]
    assert reading.latest(folder / "save") == SAVE_EVERY
    assert_goes_on(folder, straight(1))


def interrupt_while_waiting(rank: int, world: int, folder: Path) -> tuple:
    """Rank 1 stands still, so that rank 0 waits for it inside a collective, where Python runs no
    handler."""
    programs = fork_ranks(measured(folder), folder, 2, before=slow_from(6, 0.1))
    programs[1].wait_for("slow step 6")
    programs[1].signal(signal.SIGSTOP)
    time.sleep(0.5)
    start = time.monotonic()
    programs[0].interrupt()
    first = programs[0].end(), programs[0].err, programs[0].left_behind()
    seconds = time.monotonic() - start
    programs[1].kill()
    return first, seconds


def test_ctrl_c_while_waiting_for_another_rank(folder):
    first, seconds = run_ranks(1, interrupt_while_waiting, folder)[0]
    assert first == (130, GOES_ON, []) and seconds < 30


def interrupt_without(rank: int, world: int, folder: Path, dropped: list[str], at: int) -> list:
    words = argv(folder)
    for flag in dropped:
        del words[words.index(flag) : words.index(flag) + 2]
    program = fork_program(words, folder, before=slow_from(at, 0.2))
    program.wait_for(f"slow step {at}")
    program.interrupt()
    return ended([program])


@pytest.mark.parametrize(
    "dropped, at, advice",
    [
        ([], 2, "no checkpoint"),
        (["--load"], 6, "--load {}/save "),
        (["--load", "--save", "--save-interval"], 6, "--save "),
    ],
)
def test_the_line_says_what_is_true(folder, dropped, at, advice):
    [[code, line, left]] = run_ranks(1, interrupt_without, folder, dropped, at)[0]
    assert (code, left, line.count("\n")) == (130, [], 1)
    assert line.startswith("interrupted: ") and advice.format(folder) in line


# --- SIGTERM and SIGUSR1


def request(
    rank: int, world: int, folder: Path, ranks: int, to: list[int], number: int, extra: list[str]
) -> list:
    programs = fork_ranks(
        measured(folder, "--exit-signal-handler", *extra), folder, ranks, before=slow_from(6, 0.3)
    )
    programs[0].wait_for("slow step 6")
    for target in to:
        if "2" in extra:
            # its data workers too, as schedulers do
            os.killpg(programs[target].pid, number)
        programs[target].signal(number)  # ... and once more by its launcher
    return ended(programs)


@pytest.mark.parametrize(
    "ranks, to, number, extra",
    [
        (1, [0], signal.SIGTERM, ["--num-workers", "2"]),
        (1, [0], signal.SIGUSR1, []),
        (2, [1], signal.SIGTERM, []),
        pytest.param(2, [0, 1], signal.SIGTERM, [], marks=pytest.mark.campaign),
        (4, [0, 1, 2, 3], signal.SIGUSR1, []),
    ],
    ids=[
        "whole process group with workers",
        "USR1",
        "only one of two",
        "both of two",
        "all of four",
    ],
)
def test_a_request_saves_and_leaves(folder, straight, ranks, to, number, extra):
    """Every rank exits with 0 after the step that the request fell into; the log names the
    signal."""
    assert run_ranks(1, request, folder, ranks, to, number, extra) == [[(0, "", [])] * ranks]
    assert reading.latest(folder / "save") == 6
    log = (folder / f"log.{ranks - 1}").read_text()
    assert log.count(f" receiving {number.name} |") == 1
    if to == [1]:
        assert_goes_on(folder, straight(2), world=2)


def second_signal(rank: int, world: int, folder: Path) -> list:
    """The main thread waits in a collective for a rank that stands still: no Python handler would
    ever run."""
    signals.SAME_REQUEST_SECONDS = 0.2  # in this process, which ends with the test
    programs = fork_ranks(
        argv(folder, "--exit-signal-handler"), folder, 2, before=slow_from(6, 0.1)
    )
    programs[1].wait_for("slow step 6")
    programs[1].signal(signal.SIGSTOP)
    programs[0].signal(signal.SIGTERM)
    time.sleep(0.5)
    assert programs[0].poll() is None
    programs[0].signal(signal.SIGTERM)
    result = ended(programs[:1])
    programs[1].kill()
    return result


def test_a_second_signal_leaves_at_once(folder):
    assert run_ranks(1, second_signal, folder) == [[(128 + signal.SIGTERM, SECOND, [])]]
    assert reading.latest(folder / "save") == SAVE_EVERY
