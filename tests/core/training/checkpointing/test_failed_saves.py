"""Saves that the disk refuses: a periodic one costs a warning, the last one of a run its success;
nothing else changes."""

import functools
import os
import signal
import time

import pytest

from megatron.checkpoint import filesystem, manifest, reading, store
from megatron.training import loop
from megatron.training.run import Services
from tests.core.training.checkpointing.refusing_disk import BROKEN, FULL, LOCKED, refuse
from tests.core.training.checkpointing.saving_runs import BASE, run
from tests.forkrun import RanksFailed
from tests.problems import numbers
from tests.runs import EXACT, late_from, same_tensors, train


@pytest.fixture(scope="module")
def plain(tmp_path_factory, data):
    """The run of so many ranks whose saves succeed."""
    return functools.cache(lambda world: run(tmp_path_factory.mktemp("plain"), data, world))


def names(folder) -> list[str]:
    """What lies in a save directory, hidden names too, but for the events of the run and the lock
    of a rank that was killed while it left."""
    names = (path.name for path in (folder / "save").iterdir())
    return sorted(name for name in names if not name.startswith(".lock."))


ALL = ["iter_0000002", "iter_0000004", "iter_0000006", "iter_0000007", store.TRACKER]


@pytest.mark.parametrize(
    ("world", "action", "number"),
    [
        pytest.param(1, "write", FULL, marks=pytest.mark.campaign),
        (2, "write", FULL),
        pytest.param(1, "mkdir", LOCKED, marks=pytest.mark.campaign),
        pytest.param(2, "mkdir", LOCKED, marks=pytest.mark.campaign),
        (1, "rename", BROKEN),
        pytest.param(2, "rename", BROKEN, marks=pytest.mark.campaign),
    ],
)
def test_a_periodic_save_that_fails_is_one_warning(plain, data, tmp_path, world, action, number):
    """The run goes on as if nothing had been; it has its other checkpoints, and no remains of the
    one that failed."""
    good, part = plain(world), ".iter_0000004.tmp-"
    rank = world - 1 if action == "write" else 0
    done = run(tmp_path, data, world, hook=functools.partial(refuse, action, part, rank, number))
    assert names(tmp_path) == [name for name in ALL if name != "iter_0000004"]
    lines = [line for line in done.first_rank_log.splitlines() if "WARNING" in line]
    assert len(lines) == 1 and "iteration 4: " + "rank 1: " * rank in lines[0]
    assert f"{tmp_path}/save/{part}" in lines[0] and f": {os.strerror(number)}; " in lines[0]
    good_one = lines[0].partition("[file-operation-failed]")[2]
    assert f"{tmp_path}/save " in good_one and numbers(good_one) == [2, 6]
    assert done.saved == [2, 6, 7]
    assert done.series(*EXACT) == good.series(*EXACT)
    for iteration in (2, 6, 7):
        same_tensors(done.tensors(iteration), good.tensors(iteration))


def test_the_tracker_that_cannot_be_written_names_what_it_named(data, tmp_path):
    """The new checkpoint is whole, but it does not count: a resume takes the last one that does."""
    hook = functools.partial(refuse, "write", store.TRACKER, 0, FULL, 10)
    with pytest.raises(RanksFailed, match=r"exit codes|CheckpointError"):
        run(tmp_path, data, 1, "--load", str(tmp_path / "save"), hook=hook)
    text = (tmp_path / "log.0").read_text()
    assert reading.latest(tmp_path / "save") is None
    assert [line.rpartition(" ")[2] for line in text.splitlines() if "WARNING: no" in line] == [
        "4",
        "6",
        "7",
    ]
    done = run(tmp_path, data, 1, "--load", str(tmp_path / "save"))
    assert reading.latest(tmp_path / "save") == 7 and names(tmp_path) == ALL
    assert [row["iteration"] for row in done.rows] == [1, 2, 3, 4, 5, 6, 7]


def terminate_at_5() -> None:
    """The last rank is asked to leave in iteration 5."""
    step = loop.train_step

    def asked(run, forward_step, samples, iteration, own):
        if iteration == 5 and run.runtime.rank == run.runtime.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
            while not run.services.signals.received:  # a thread hears of it
                time.sleep(0.001)
        return step(run, forward_step, samples, iteration, own)

    loop.train_step = asked


def and_refuse(before, *where) -> Services | None:
    refuse(*where)
    return before() if before else None


@pytest.mark.parametrize(
    ("world", "flags", "before", "last"),
    [
        pytest.param(1, [], None, 7, marks=pytest.mark.campaign),
        pytest.param(2, [], None, 7, marks=pytest.mark.campaign),
        pytest.param(1, ["--train-iters", "6"], None, 6, marks=pytest.mark.campaign),
        pytest.param(1, ["--exit-interval", "5"], None, 5, marks=pytest.mark.campaign),
        pytest.param(1, ["--exit-interval", "4"], None, 4, marks=pytest.mark.campaign),
        (2, ["--exit-signal-handler"], terminate_at_5, 5),
        (1, ["--exit-duration-in-mins", "9"], functools.partial(late_from, 4), 4),
    ],
)
def test_the_last_save_that_fails_is_an_error(data, tmp_path, world, flags, before, last):
    """Whatever ends the run, and also where the last save is a periodic one; it is not tried
    twice."""
    hook = functools.partial(and_refuse, before, "write", f".iter_{last:07d}.tmp-", world - 1, FULL)
    words = [
        word for word in BASE if "--train-iters" not in flags or word not in ("--train-iters", "7")
    ]
    with pytest.raises(RanksFailed, match="CheckpointError.*No space left"):
        train(
            tmp_path,
            [*words, *flags, "--data-path", data, "--save", str(tmp_path / "save")],
            world,
            hook=hook,
        )
    assert "WARNING" not in (tmp_path / "log.0").read_text()
    assert names(tmp_path) == [*(name for name in ALL[:3] if int(name[-1]) < last), store.TRACKER]
    assert reading.latest(tmp_path / "save") == (last - 1) // 2 * 2


def write_nonsense() -> None:
    """A fault of the program: what the ranks have written does not fit together."""

    def merge(*args, **kwargs):
        raise filesystem.CheckpointError("planted")

    manifest.merge = merge


def test_a_fault_of_the_program_ends_the_run_at_once(data, tmp_path):
    with pytest.raises(RanksFailed, match="CheckpointError: planted"):
        run(tmp_path, data, 1, hook=write_nonsense)
    assert "WARNING" not in (tmp_path / "log.0").read_text()
