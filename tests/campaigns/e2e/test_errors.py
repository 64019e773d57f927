"""A rank that fails: its error is said once, the others end without noise, nothing is left."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from megatron.training import loop, step
from tests.campaigns.e2e.programs import Program, fork_program, fork_ranks
from tests.forkrun import run_ranks
from tests.runs import SMALL, write_text


def argv(folder: Path, *extra: str) -> list[str]:
    return [
        *SMALL,
        "--data-path",
        str(folder.parent / "text"),
        "--split",
        "90,10,0",
        "--train-iters",
        "6",
        *extra,
    ]


@pytest.fixture
def folder(tmp_path) -> Path:
    write_text(tmp_path / "text", 260)
    return tmp_path / "run"


def failing(error: type[Exception], *ranks: int):
    """A hook: iteration 3 raises on these ranks."""

    def hook() -> None:
        right = loop.train_step

        def wrong(run, forward_step, samples, iteration, own):
            if iteration == 3 and run.runtime.rank in ranks:
                raise error("planted")
            return right(run, forward_step, samples, iteration, own)

        loop.train_step = wrong

    return hook


def ended(programs: list[Program]) -> list[tuple[int, str]]:
    """(exit code, stderr) of each; nobody is left of any."""
    found = [(p.end(), p.err) for p in programs]
    assert [p.left_behind() for p in programs] == [[]] * len(programs)
    return found


def one_fails_alone(rank: int, world: int, folder: Path, error: type[Exception]) -> list:
    program = fork_program(argv(folder, "--num-workers", "2"), folder, before=failing(error, 0))
    return ended([program])


def test_a_single_process_fails_with_one_line_or_a_traceback(folder):
    """What the user can mend is a line; what is a fault of the program has its traceback. Data
    workers end too."""
    assert run_ranks(1, one_fails_alone, folder, ValueError) == [[(1, "error: planted\n")]]
    ((code, text),) = run_ranks(1, one_fails_alone, folder.with_name("again"), KeyError)[0]
    assert code == 1 and text.startswith("Traceback") and text.endswith("KeyError: 'planted'\n")
    assert text.count("Traceback") == 1


def last_fails(rank: int, world: int, folder: Path, error: type[Exception]) -> list:
    return ended(fork_ranks(argv(folder), folder, 2, before=failing(error, 1)))


def test_a_lone_culprit_says_it_and_rank_0_points_to_it(folder):
    (code, other), culprit = run_ranks(1, last_fails, folder, OSError)[0]
    assert culprit == (1, "rank 1: error: planted\n")
    assert (
        code == 1
        and other.startswith("rank 0 ends, ")
        and " rank 1 (process " in other
        and other.endswith(") failed: planted\n")
    )


def runs_out(rank: int, world: int, folder: Path, layout: str) -> list:
    start = time.monotonic()
    programs = fork_ranks(
        argv(folder, *layout.split()), folder, 2, before=failing(torch.OutOfMemoryError, 1)
    )
    return [*ended(programs), time.monotonic() - start]


@pytest.mark.parametrize(
    "layout",
    ["", "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"],
    ids=["dp", "tp", "pp"],
)
def test_out_of_memory_is_one_message_of_the_rank_that_had_none(folder, layout):
    (code, other), (own_code, own), seconds = run_ranks(1, runs_out, folder, layout)[0]
    assert code == own_code == 1
    assert own.startswith("rank 1: error: ") and own.count("\n") == 1
    assert own.endswith("[out-of-memory]\n")
    assert other.count("\n") == 1 and "because rank 1 (process " in other


def nan_hook() -> None:
    right = step.make_batch

    def nan(*args):
        batch = right(*args)
        if os.environ["RANK"] == "1":
            object.__setattr__(batch, "loss_mask", batch.tokens * float("nan"))
        return batch

    step.make_batch = nan


def nan_on_rank_1(rank: int, world: int, folder: Path) -> list:
    return ended(fork_ranks(argv(folder), folder, 2, before=nan_hook))


def test_a_nan_names_the_rank_that_has_it(folder):
    (code, text), quiet = run_ranks(1, nan_on_rank_1, folder)[0]
    assert code == 1 and text.startswith("error: iteration 1: ")
    assert "[loss-not-finite]" in text and "rank 1" in text
    assert text.count("\n") == 1 and quiet == (1, "")
