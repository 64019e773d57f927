"""--async-save: the same bytes as without it, one save at a time, and what happens when a part of
it dies or is refused."""

import errno
import functools
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.checkpoint import filesystem, reading, state_reader, store
from megatron.checkpoint.async_writer import Writer
from megatron.config import run_directory
from megatron.training.checkpointing import save
from tests.core.training.checkpointing.saving_runs import run
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
    state = state_reader.parse(files["state.json"], "")
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


CI = pytest.mark.campaign
FAULTS = [
    # rank, the save, the fault, the checkpoints then, synchronous saves
    pytest.param(0, 4, "full", [2, 6, 7], [], marks=CI),
    pytest.param(1, 4, "full", [2, 6, 7], [], marks=CI),
    (0, 4, "kill", [2, 6, 7], [6, 7]),
    pytest.param(1, 4, "kill", [2, 6, 7], [6, 7], marks=CI),
    # the last save is made again, without the writer that died in it
    pytest.param(1, 7, "kill", [2, 4, 6, 7], [7], marks=CI),
]


@pytest.mark.parametrize(("rank", "at", "fault", "saved", "synchronous"), FAULTS)
def test_a_fault_in_a_writer_costs_its_save_at_most(
    data, tmp_path, rank, at, fault, saved, synchronous
):
    """A full disk is one warning; a writer that dies is said, and the run saves without it."""
    hook = functools.partial(hold_the_writer, rank, "write", f".iter_{at:07d}", fault)
    done = run(tmp_path, data, 2, "--async-save", hook=hook)
    assert run_directory.iterations(done.save) == saved and reading.latest(done.save) == 7
    assert done.saved == saved
    assert not list(done.save.glob(".*.tmp-*"))
    text = done.first_rank_log + (tmp_path / "log.1").read_text()
    pauses = [numbers(line) for line in text.splitlines() if "--async-save: saving synch" in line]
    assert pauses == [[rank, iteration] for iteration in synchronous], text
    assert text.count("(exit code -9)") == (fault == "kill"), text
    if fault == "full":
        [warning] = [line for line in done.first_rank_log.splitlines() if "WARNING" in line]
        assert os.strerror(errno.ENOSPC) in warning
        assert "iteration 4: " in warning and "iteration 2; " in warning
    elif at == 7:
        assert text.count("iteration 7: rank 1: ") == 1, text


@pytest.mark.campaign
@pytest.mark.parametrize(
    "flags",
    [
        "--snapshot-interval 1",
        "--eval-iters 1 --eval-interval 3 --split 80,20,0 --train-range-to-skip 3 5",
    ],
)
def test_a_run_beside_its_saves_is_the_run_that_stands_still(data, tmp_path, flags):
    """Whatever an iteration is, the ranks agree when a save counts; snapshots too."""
    done = run(tmp_path, data, 2, "--async-save", *flags.split())
    still = run(tmp_path / "still", data, 2, *flags.split())
    assert done.series(*EXACT) == still.series(*EXACT)
    assert run_directory.iterations(done.save) == [2, 4, 6, 7]
    same_tensors(done.tensors(), still.tensors())
    for slot in run_directory.slots(done.save / "snapshots") if "snapshot" in flags else ():
        found = [reading.load(root) for root in (slot, still.save / "snapshots" / slot.name)]
        assert found[0].iteration == found[1].iteration
        with found[0].reader() as ours, found[1].reader() as theirs:
            same_tensors(*({n: r.read(n) for n in r.names()} for r in (ours, theirs)))


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
    assert run_directory.iterations(killed.save) == [2] and reading.latest(killed.save) == 2
    hook = functools.partial(remember_the_writer, False)
    again = run(tmp_path, data, 1, "--async-save", "--load", str(tmp_path / "save"), hook=hook)
    assert reading.latest(again.save) == 7
    assert not is_running(int((tmp_path / "pid").read_text())), "the writer ends with the run"
    assert sorted(path.name for path in again.save.iterdir() if path.name.startswith(".")) == []
