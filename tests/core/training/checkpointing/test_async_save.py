"""--async-save: the same bytes as without it, one save at a time, and what happens when a part of
it dies or is refused."""

from __future__ import annotations

import errno
import functools
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.checkpoint import filesystem, store
from megatron.checkpoint.async_writer import Writer
from megatron.checkpoint.state import RunState
from megatron.config import run_directory
from megatron.training import loop
from megatron.training.checkpointing import save
from tests.core.training.checkpointing.saving_runs import run
from tests.forkrun import RanksFailed
from tests.problems import numbers
from tests.runs import EXACT, same_tensors


@pytest.fixture(
    scope="module", params=[pytest.param(1, marks=pytest.mark.campaign), 2], ids=["dp 1", "dp 2"]
)
def plain(request, tmp_path_factory, data):
    """(number of ranks, run that stands still while it saves)."""
    return request.param, run(
        tmp_path_factory.mktemp("plain"), data, request.param, "--use-distributed-optimizer"
    )


def hold_the_writer(rank: int, what: str, of: str, then: str = "") -> None:
    """A hook: in the writer process of a rank, a step of the disk on a path that holds `of` waits
    for a file `go`, or kills it, or is refused. In the rank itself, nothing."""
    step = filesystem.Disk.step
    trainer = os.getpid()

    def waiting(self, action, path) -> None:
        if (
            os.getpid() != trainer
            and os.environ.get("RANK") == str(rank)
            and action == what
            and of in str(path)
        ):
            if then == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if then == "full":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            while not (path.parent.parent / "go").exists():
                time.sleep(0.01)
        step(self, action, path)

    filesystem.Disk.step = waiting


def settle_only_when_due(rank: int) -> None:
    """A hook: the first save is held until another is due, so that training goes on beside it."""
    hold_the_writer(rank, "write", ".iter_0000002.tmp-")
    finish_save = save.finish_save

    def noting(run, pending):
        if pending.iteration == 2:
            print(f"settled at {run.progress.iteration}", flush=True)
            Path(run.config.checkpoint.save, "go").touch()
        finish_save(run, pending)

    save.finish_save = noting


def files_of(folder: Path, iteration: int) -> dict[str, bytes]:
    """The bytes of a checkpoint's files by name, without the ids of the run."""
    checkpoint = store.iteration_directory(folder / "save", iteration)
    files = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    state = RunState.parse(files["state.json"], "")
    return {**files, "state.json": replace(state, history={}).dump()}


def test_the_bytes_of_a_save_that_stands_still(plain, data, tmp_path):
    """Training goes on between 2 and 4 while the save of 2 is held; what it writes is the state of
    iteration 2."""
    world, still = plain
    beside = run(
        tmp_path,
        data,
        world,
        "--use-distributed-optimizer",
        "--async-save",
        hook=functools.partial(settle_only_when_due, world - 1),
    )
    assert "settled at 4" in beside.first_rank_log, beside.first_rank_log
    assert beside.series(*EXACT) == still.series(*EXACT)
    assert (
        run_directory.iterations(beside.save)
        == run_directory.iterations(still.save)
        == [2, 4, 6, 7]
    )
    for iteration in (2, 4, 6, 7):
        mine = files_of(tmp_path, iteration)
        other = files_of(still.folder, iteration)
        assert mine.keys() == other.keys()
        assert [
            name
            for name in mine
            if mine[name] != other[name] and name not in ("args", "manifest.json")
        ] == []
        same_tensors(beside.tensors(iteration), still.tensors(iteration))
    assert sorted(path.name for path in beside.save.iterdir() if path.name.startswith(".")) == []
    assert beside.saved == [2, 4, 6, 7]


@pytest.mark.campaign
@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_in_the_writer_is_one_warning(data, tmp_path, rank):
    hook = functools.partial(hold_the_writer, rank, "write", ".iter_0000004", "full")
    done = run(tmp_path, data, 2, "--async-save", hook=hook)
    assert run_directory.iterations(done.save) == [2, 6, 7] and store.latest(done.save) == 7
    warnings = [line for line in done.first_rank_log.splitlines() if "WARNING" in line]
    assert len(warnings) == 1 and os.strerror(errno.ENOSPC) in warnings[0], done.first_rank_log
    assert "iteration 4: " in warnings[0] and "iteration 2; " in warnings[0]
    assert sorted(path.name for path in done.save.iterdir() if path.name.startswith(".")) == []


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.campaign)])
def test_a_writer_that_dies_is_said_and_the_run_saves_without_it(data, tmp_path, rank):
    hook = functools.partial(hold_the_writer, rank, "write", ".iter_0000004", "kill")
    done = run(tmp_path, data, 2, "--async-save", hook=hook)
    assert run_directory.iterations(done.save) == [2, 6, 7] and store.latest(done.save) == 7
    text = done.first_rank_log + (tmp_path / "log.1").read_text()
    assert text.count("(exit code -9)") == 1, text
    pauses = [numbers(line) for line in text.splitlines() if "--async-save: saving synch" in line]
    assert pauses == [[rank, 6], [rank, 7]], text


@pytest.mark.campaign
def test_the_last_save_is_made_without_a_writer_that_died_in_it(data, tmp_path):
    hook = functools.partial(hold_the_writer, 1, "write", ".iter_0000007", "kill")
    done = run(tmp_path, data, 2, "--async-save", hook=hook)
    assert run_directory.iterations(done.save) == [2, 4, 6, 7] and store.latest(done.save) == 7
    text = done.first_rank_log
    assert text.count("iteration 7: rank 1: ") == 1, text
    assert done.saved == [2, 4, 6, 7], text


@pytest.mark.campaign
def test_the_last_save_that_a_writer_cannot_make_is_an_error(data, tmp_path):
    with pytest.raises(RanksFailed, match="exit codes|CheckpointError"):
        run(
            tmp_path,
            data,
            1,
            "--async-save",
            hook=functools.partial(hold_the_writer, 0, "write", ".iter_0000007", "full"),
        )
    assert store.latest(tmp_path / "save") == 6 and run_directory.iterations(tmp_path / "save") == [
        2,
        4,
        6,
    ]


def not_a_number_in_3() -> None:
    """A hook: the save of 2 is held until it is waited for, and the loss of iteration 3 is no
    number."""
    settle_only_when_due(0)
    step = loop.train_step

    def bad(run, forward_step, samples, iteration, own):
        def forward(batch, model):
            total, count, _ = forward_step(batch, model)
            return (total * float("nan"), count) if iteration == 3 else (total, count)

        return step(run, forward, samples, iteration, own)

    loop.train_step = bad


@pytest.mark.campaign
def test_a_loss_that_is_no_number_costs_no_save(data, tmp_path):
    with pytest.raises(RanksFailed, match="loss-not-finite"):
        run(tmp_path, data, 2, "--async-save", hook=not_a_number_in_3)
    assert (
        store.latest(tmp_path / "save") == 2 and "settled at 2" in (tmp_path / "log.0").read_text()
    )


@pytest.mark.campaign
def test_snapshots_are_written_beside_training_too(data, tmp_path):
    done = run(
        tmp_path,
        data,
        2,
        "--async-save",
        "--snapshot-interval",
        "1",
        "--load",
        str(tmp_path / "save"),
    )
    again = run(tmp_path / "still", data, 2, "--snapshot-interval", "1")
    assert done.series(*EXACT) == again.series(*EXACT)
    for slot in ("0", "1"):
        one, other = (store.load(folder / "snapshots" / slot) for folder in (done.save, again.save))
        assert one.iteration == other.iteration
        with one.reader() as mine, other.reader() as theirs:
            same_tensors(
                {name: mine.read(name) for name in mine.names()},
                {name: theirs.read(name) for name in theirs.names()},
            )


@pytest.mark.campaign
def test_an_evaluation_and_skipped_iterations_beside_a_save(data, tmp_path):
    """Whatever an iteration is: the ranks agree when the save counts, and the run ends with all its
    checkpoints."""
    more = [
        "--eval-iters",
        "1",
        "--eval-interval",
        "3",
        "--split",
        "80,20,0",
        "--train-range-to-skip",
        "3",
        "5",
    ]
    done = run(tmp_path, data, 2, "--async-save", *more)
    still = run(tmp_path / "still", data, 2, *more)
    assert done.series(*EXACT) == still.series(*EXACT) and run_directory.iterations(done.save) == [
        2,
        4,
        6,
        7,
    ]
    same_tensors(done.tensors(), still.tensors())


def remember_the_writer(held: bool) -> None:
    """A hook: the pid of the writer lies in a file; with `held` it never ends the save of iteration
    4."""
    if held:
        hold_the_writer(0, "write", ".iter_0000004.tmp-")
    start = Writer.start

    def noting(self, slices, temporary, *rest):
        (temporary.parent.parent / "pid").write_text(str(self.process.pid))
        start(self, slices, temporary, *rest)

    Writer.start = noting


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.campaign
def test_a_run_that_is_killed_leaves_no_half_checkpoint_and_no_writer(data, tmp_path):
    killed = run(
        tmp_path,
        data,
        1,
        "--async-save",
        hook=functools.partial(remember_the_writer, True),
        kill_at=5,
    )
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 60
    while is_running(pid):
        assert time.monotonic() < deadline, f"the writer {pid} is still there"
        time.sleep(0.02)
    assert run_directory.iterations(killed.save) == [2] and store.latest(killed.save) == 2
    again = run(tmp_path, data, 1, "--async-save", "--load", str(tmp_path / "save"))
    assert store.latest(again.save) == 7
    assert sorted(path.name for path in again.save.iterdir() if path.name.startswith(".")) == []


def test_the_writer_ends_with_the_run(data, tmp_path):
    run(tmp_path, data, 1, "--async-save", hook=functools.partial(remember_the_writer, False))
    assert not is_running(int((tmp_path / "pid").read_text()))
