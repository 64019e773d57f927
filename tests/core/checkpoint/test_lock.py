"""The lock of a run directory: one job at a time, the dead replaced, the paused fenced off."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.checkpoint import lock, reading, store
from megatron.checkpoint.filesystem import CheckpointError
from tests import problems
from tests.core.checkpoint.saves import ARGS, assert_good, tensors
from tests.core.checkpoint.saves import save as plain_save
from tests.forkrun import ROOT, run_ranks
from tests.runs import SMALL


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def rewrite(path: Path, age: float = 0.0, **changes) -> None:
    """Change what a lock file says, and how old its heartbeat is."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    then = time.time() - age
    os.utime(path, (then, then))


def test_held_then_free(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "LEAVING_SECONDS", 0.1)
    with lock.held(str(tmp_path / "new/run")) as held:
        assert names(tmp_path / "new/run") == [".lock.000001"]
        held.check()
        with problems.raises(CheckpointError, "save-directory-in-use", os.getpid(), "--save"):
            lock.acquire(tmp_path / "new/run")
    assert names(tmp_path / "new/run") == []
    with problems.raises(CheckpointError, "save-directory-taken-over"):
        held.check()
    lock.acquire(tmp_path / "new/run").release()


def test_a_job_of_a_dead_process_is_replaced(tmp_path, capsys):
    """Gone; a zombie; another process with the same number."""
    child = multiprocessing.get_context("forkserver").Process(target=os.getpid)
    child.start()
    child.join()
    gone = lock.acquire(tmp_path)
    for changes in ({"pid": child.pid}, {"started": "1"}):
        rewrite(gone.path, **changes)
        mine = lock.acquire(tmp_path)
        assert names(tmp_path) == [mine.path.name]
        assert f"process {changes.get('pid', os.getpid())} on" in capsys.readouterr().out
        with problems.raises(CheckpointError, "save-directory-taken-over"):
            gone.check()
        gone.release()  # does not give up what is not its own
        mine.check()
        gone = mine
    zombie = subprocess.Popen([sys.executable, "-c", ""])
    while Path(f"/proc/{zombie.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    assert lock._started(zombie.pid) is None and lock._started(os.getpid()) == mine.owner.started
    zombie.wait()


@pytest.mark.parametrize(
    ("age", "alive"), [(0.0, True), (20.0, True), (70.0, False), (-86400.0, True)]
)
def test_another_machine_is_judged_by_its_heartbeat(tmp_path, age, alive):
    """Also one whose process number is taken here; a clock that was set back makes nobody dead."""
    other = lock.acquire(tmp_path)
    rewrite(other.path, age, host="node7", machine="another boot")
    if alive:
        with problems.raises(CheckpointError, "save-directory-in-use", other.path):
            lock.acquire(tmp_path)
    else:
        lock.acquire(tmp_path).release()


def test_the_heart_beats(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.01)
    mine = lock.acquire(tmp_path)
    os.utime(mine.path, (0, 0))
    deadline = time.monotonic() + 30
    while mine.path.stat().st_mtime == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert mine.path.stat().st_mtime > 0
    mine.release()


@pytest.mark.parametrize("name", [".lock.000001", ".lock.000007"])
def test_two_that_see_each_other_do_not_both_hold(tmp_path, monkeypatch, name):
    """A lock that appears between the look and the own one, with the same number or a higher
    one."""
    look = lock._locks
    seen = []

    def late(root: Path) -> list[Path]:
        found = look(root)
        if not seen:
            seen.append(1)
            (root / name).write_text("{}")
        return found

    monkeypatch.setattr(lock, "_locks", late)
    with problems.raises(CheckpointError, "save-directory-in-use"):
        lock.acquire(tmp_path)
    assert names(tmp_path) == [name] and (tmp_path / name).read_text() == "{}"


class Pause(store.Disk):
    """Stops its own process (SIGSTOP) before step `at` of a save, once."""

    def __init__(self, at: int) -> None:
        self.left = at

    def step(self, action: str, path: Path) -> None:
        self.left -= 1
        if self.left == -1:
            os.kill(os.getpid(), signal.SIGSTOP)


def fenced_save(root: Path, iteration: int, disk: store.Disk, held: lock.Lock) -> None:
    slices = [store.TensorSlice.whole(name, tensor) for name, tensor in tensors(iteration).items()]
    state = store.RunState(
        iteration=iteration, consumed_train_samples=16 * iteration, optimizer={"version": 0}
    )
    store.save(root, iteration, slices, state, ARGS, disk=disk, fence=held.check)


def paused_saver(root: Path, at: int) -> None:
    held = lock.acquire(root)
    try:
        fenced_save(root, 30, Pause(at), held)
    except CheckpointError:
        os._exit(3)
    os._exit(0)


def pause_at_every_step(rank: int, world: int, folder: str) -> list[str]:
    """A saver is stopped before each step in turn, its directory taken over, a newer checkpoint
    saved, the saver woken."""
    ends = []
    for at in range(100):
        root = Path(folder) / str(at)
        plain_save(root, 10)
        child = os.fork()
        if child == 0:
            paused_saver(root, at)
        _, status = os.waitpid(child, os.WUNTRACED)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0 and reading.latest(root) == 30
            return ends
        before = reading.latest(root)
        [old] = [path for path in root.iterdir() if path.name.startswith(".lock.")]
        # as a job on another machine sees it
        rewrite(old, 100.0, machine="another boot")
        mine = lock.acquire(root)
        store.clear_leftovers(root)
        assert_good(root, before)
        fenced_save(root, 20, store.Disk(), mine)
        os.kill(child, signal.SIGCONT)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert reading.latest(root) == 20, (at, code, "the one that woke up has committed")
        assert_good(root, 20)
        mine.check()
        ends.append(f"{before} {code}")
    raise AssertionError("the save never ended")


def test_a_holder_that_was_replaced_cannot_commit(tmp_path):
    plain_save(tmp_path, 10)
    held = lock.acquire(tmp_path)
    rewrite(held.path, started="1")
    mine = lock.acquire(tmp_path)
    with problems.raises(CheckpointError, "save-directory-taken-over"):
        fenced_save(tmp_path, 30, store.Disk(), held)
    assert names(tmp_path) == [mine.path.name, "iter_0000010", store.TRACKER]
    fenced_save(tmp_path, 20, store.Disk(), mine)
    assert_good(tmp_path, 20)


@pytest.mark.campaign
def test_a_paused_holder_that_wakes_up_cannot_commit(memory_path):
    """Whatever step it stood before: what the tracker names stays the new owner's."""
    ends = run_ranks(1, pause_at_every_step, str(memory_path))[0]
    assert len(ends) > 20 and ends[0] == ends[-3] == "10 3", ends
    assert set(ends) <= {"10 3", "30 0"}, (
        "stopped before the commit it fails; after it, it was done before the take-over"
    )


def test_who_leaves_does_not_take_himself_for_replaced(tmp_path, monkeypatch):
    """A thread that ends the process gives the lock up; another that is about to commit stands
    still until then."""
    monkeypatch.setattr(lock, "LEAVING_SECONDS", 0.3)
    held = lock.acquire(tmp_path)
    held.release()
    before = time.monotonic()
    with pytest.raises(CheckpointError):
        held.check()
    assert time.monotonic() - before >= 0.3


def test_a_second_job_is_refused_within_a_second(tmp_path):
    """The whole program, from the start of the interpreter: before torch is loaded."""
    command = [
        sys.executable,
        "pretrain_gpt.py",
        *SMALL,
        "--mock-data",
        "--train-iters",
        "9",
        "--save-interval",
        "2",
        "--save",
        str(tmp_path / "run"),
    ]
    held = lock.acquire(tmp_path / "run")
    began = time.monotonic()
    before = os.times()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    took = time.monotonic() - began
    after = os.times()
    worked = (
        after.children_user + after.children_system - before.children_user - before.children_system
    )
    print(f"refused after {took:.2f} s, {worked:.2f} s of them at work")
    assert worked < 1.0, "time on the clock depends on what else this machine does"
    assert done.returncode == 1 and done.stderr.count("\n") == 1, (
        done.returncode,
        done.stdout,
        done.stderr,
    )
    assert f"error: {tmp_path}/run " in done.stderr and f"process {os.getpid()} on" in done.stderr
    assert "torch" not in done.stdout
    assert names(tmp_path / "run") == [held.path.name]
    held.release()
