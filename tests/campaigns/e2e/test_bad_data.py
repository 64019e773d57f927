"""Data files that are cut short, or whose disk fails, while a run reads them: one line that names
the file, exit code 1, no process left. Files that are damaged before are in `tests.campaigns.hostile`."""

import errno
import functools
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron.training import loop
from tests.campaigns.e2e.programs import fork_program
from tests.forkrun import run_ranks
from tests.pairs import PairWriter
from tests.problems import assert_problem
from tests.runs import SMALL, with_flags

FLAGS = [*SMALL, "--train-iters", "40", "--eval-iters", "0"]


@pytest.fixture
def prefix(tmp_path) -> str:
    """400 documents of 1000 ids."""
    random = np.random.default_rng(0)
    with PairWriter(tmp_path / "text", np.uint16) as builder:
        for _ in range(400):
            builder.add_document(random.integers(0, 200, 1000), [1000])
    return str(tmp_path / "text")


def program(
    rank: int, world: int, folder: Path, words: list[str], before: Callable[[], None] | None
) -> tuple[int, list[int], str, str]:
    running = fork_program(words, folder, before=before)
    return running.end(), running.left_behind(), running.out, running.err


def trained(
    folder: Path, prefix: str, before: Callable[[], None] | None, *more: str
) -> tuple[int, str]:
    """Exit code and stderr of a run over the data, which has begun; no process is left."""
    words = with_flags([*FLAGS, "--data-path", prefix], *more)
    code, left, out, err = run_ranks(1, program, folder, words, before)[0]
    assert left == [] and " iter  1/40 " in out
    return code, err


def cut_in_iteration_3(path: str) -> None:
    """Cut a file while the run reads it: a .bin to 1000 bytes, an index, which is mapped, to
    none."""
    train_one = loop.Trainer.train_one

    def cutting(self, iteration, samples):
        if iteration == 3:
            os.truncate(path, 1000 if path.endswith(".bin") else 0)
        return train_one(self, iteration, samples)

    loop.Trainer.train_one = cutting


def fail_disk(path: str) -> None:
    """The disk of a .bin fails after 30 reads of this process."""
    read = os.pread
    count = 0

    def failing(file, size, start):
        nonlocal count
        if os.readlink(f"/proc/self/fd/{file}") == path:
            count += 1
            if count > 30:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(file, size, start)

    os.pread = failing


@pytest.mark.parametrize(("workers", "order"), [("0", "megatron"), ("2", "epoch")])
@pytest.mark.parametrize(
    ("hook", "code"),
    [(cut_in_iteration_3, "file-changed-while-read"), (fail_disk, "file-not-readable")],
)
def test_a_bin_that_fails_while_it_is_read(tmp_path, prefix, workers, order, hook, code):
    """In this process and in a data worker: the same line. Memory that is mapped would end either
    with SIGBUS."""
    before = functools.partial(hook, prefix + ".bin")
    more = ("--num-workers", workers, "--data-order", order)
    status, err = trained(tmp_path / "run", prefix, before, *more)
    assert status == 1
    assert_problem(err.removesuffix("\n"), code, prefix + ".bin")


@pytest.mark.parametrize(
    ("what", "workers"),
    [
        ("the index", "0"),
        ("the index", "2"),
        ("a cached index array", "0"),
        pytest.param("a cached index array", "2", marks=pytest.mark.campaign),
    ],
)
def test_an_index_cut_short_while_it_is_mapped(tmp_path, prefix, what, workers):
    """Touching what a mapped file has lost is SIGBUS: its size is looked at before."""
    cut = prefix + ".idx"
    if what != "the index":
        assert trained(tmp_path / "first", prefix, None)[0] == 0
        cut = max(map(str, Path(prefix, "cache").rglob("*document_index.npy")), key=os.path.getsize)
    before = functools.partial(cut_in_iteration_3, cut)
    status, err = trained(tmp_path / "run", prefix, before, "--num-workers", workers)
    assert status == 1 and err.count("\n") == 1
    # a worker may be between its look at the size and its reading just when the file is cut
    if workers == "0" or "a data worker died" not in err:
        assert_problem(err.removesuffix("\n"), "file-changed-while-read", cut)
