"""--keep-last and --keep-every, --snapshot-interval and --snapshot-dir, --control-file in whole
runs."""

import functools
import re
import shutil
from pathlib import Path

import pytest

from megatron.checkpoint import reading, retention, store
from megatron.config import run_directory
from megatron.training import loop
from megatron.training.launch.control_file import ControlFileRequests
from megatron.training.result import Requests
from tests.core.training.checkpointing.refusing_disk import FULL, refuse
from tests.problems import assert_reported, numbers
from tests.runs import EXACT, SMALL, Finished, same_tensors, train, with_flags

BASE = [*SMALL, "--train-iters", "12", "--split", "100,0,0", "--eval-iters", "0"]


@pytest.fixture(scope="module")
def straight(data, tmp_path_factory) -> Finished:
    return run(data, tmp_path_factory.mktemp("straight"), "--save-interval", "12")


def run(data: str, folder: Path, *extra: str, world: int = 1, hook=None) -> Finished:
    save = str(folder / "save")
    return train(
        folder,
        with_flags([*BASE, "--data-path", data, "--save", save, "--load", save], *extra),
        world,
        hook=hook,
    )


def slots(folder: Path) -> list[int | None]:
    return [retention.newest_in(slot) for slot in run_directory.slots(folder)]


def removed(done: Finished) -> list[list[str]]:
    """The iterations of each line that says which checkpoints were removed."""
    lines = [line for line in done.first_rank_log.splitlines() if line.startswith("  removed ")]
    return [re.findall(r"\d+", line) for line in lines]


def test_keep_last_and_keep_every(data, straight, tmp_path):
    done = run(data, tmp_path, "--save-interval", "1", "--keep-last", "2", "--keep-every", "5")
    assert run_directory.iterations(done.save) == [5, 10, 11, 12]
    assert ["9"] in removed(done)
    same_tensors(done.tensors(), straight.tensors())


@pytest.mark.campaign
def test_an_older_one_goes_only_when_a_newer_one_is_on_the_disk(data, tmp_path):
    """Saves from iteration 3 on fail: what was there before stays."""
    hook = functools.partial(refuse, "fsync", ".iter_0000003.tmp-", 0, FULL)
    done = run(
        data, tmp_path, "--save-interval", "1", "--keep-last", "1", "--train-iters", "4", hook=hook
    )
    before = done.first_rank_log.partition(" iterations 2\n")[0]
    assert removed(done) == [["1"], ["2"]] and "WARNING: " in before
    assert done.saved == [1, 2, 4] and " iteration 4 saved" in before
    assert run_directory.iterations(done.save) == [4]


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.campaign)])
def test_a_resume_takes_the_newest_of_snapshots_and_checkpoints(data, straight, tmp_path, world):
    """Killed in iteration 8: the snapshot of 6, in its slot, is newer than the checkpoint of 4."""
    flags = ("--save-interval", "4", "--snapshot-interval", "2", "--global-batch-size", "8")
    save = str(tmp_path / "save")
    argv = with_flags([*BASE, "--data-path", data, "--save", save, "--load", save], *flags)
    train(tmp_path, argv, world, kill_at=8)
    assert run_directory.iterations(tmp_path / "save") == [4] and sorted(
        slots(tmp_path / "save/snapshots")
    ) == [2, 6]
    done = train(tmp_path, argv, world)
    assert done.resumes == [6] and f"({tmp_path}/save/snapshots/" in done.first_rank_log
    assert run_directory.iterations(done.save) == [4, 8, 12]
    assert sorted(slots(tmp_path / "save/snapshots")) == [6, 10]
    if world == 1:
        assert done.series(*EXACT) == straight.series(*EXACT)
        same_tensors(done.tensors(), straight.tensors())


@pytest.mark.campaign
def test_a_snapshot_elsewhere_that_is_damaged_or_cannot_be_written(data, straight, tmp_path):
    elsewhere = tmp_path / "fast"
    flags = ("--save-interval", "5", "--snapshot-interval", "3", "--snapshot-dir", str(elsewhere))
    hook = functools.partial(refuse, "write", ".iter_0000006.tmp-", 0, FULL)
    first = run(data, tmp_path, *flags, "--exit-interval", "8", hook=hook)
    [warning] = [line for line in first.first_rank_log.splitlines() if "WARNING" in line]
    assert_reported(warning, "file-operation-failed", "snapshot", "iteration 6:", elsewhere)
    assert run_directory.iterations(first.save) == [5, 8] and slots(elsewhere) == [3, None]
    (tmp_path / "save" / store.TRACKER).write_text("5")
    second = run(data, tmp_path, *flags, "--exit-interval", "11")
    assert run_directory.iterations(second.save) == [5, 8, 10, 11] and sorted(slots(elsewhere)) == [
        6,
        9,
    ]
    for number in (10, 11):
        shutil.rmtree(tmp_path / f"save/iter_{number:07d}")
    (tmp_path / "save" / store.TRACKER).write_text("5")
    slot = run_directory.slots(elsewhere)[slots(elsewhere).index(9)]
    weights = slot / "iter_0000009/weights_00000.safetensors"
    weights.write_bytes(weights.read_bytes()[:-7])
    done = run(data, tmp_path, *flags)
    assert_reported(done.first_rank_log, "checkpoint-damaged", "iteration 9:", weights)
    assert done.resumes[-1] == 6  # 8 is of the branch that was left
    assert done.series(*EXACT) == straight.series(*EXACT)
    same_tensors(done.tensors(), straight.tensors())


def ask(requests: dict[int, str], path: str) -> None:
    """Write a request into the control file within these iterations."""
    step = loop.train_step

    def asked(run, forward_step, samples, iteration, own):
        if iteration in requests and run.runtime.rank == run.runtime.world_size - 1:
            Path(path).write_text(requests[iteration])
        return step(run, forward_step, samples, iteration, own)

    loop.train_step = asked


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.campaign), 2])
def test_a_control_file_saves_and_stops(data, straight, tmp_path, world):
    """InternLM's stop_file_path: -N saves, N saves and stops; and both now, by their names."""
    file = tmp_path / "control"
    hook = functools.partial(ask, {2: "save", 4: "-6\n", 8: " +9"}, str(file))
    flags = ("--save-interval", "100", "--control-file", str(file))
    # rank 1 writes: rank 0 may have read before in that iteration, not in the next one
    if world == 2:
        hook = functools.partial(ask, {4: "-6\n", 8: " +9"}, str(file))
    first = run(data, tmp_path, *flags, world=world, hook=hook)
    assert run_directory.iterations(first.save) == ([2] if world == 1 else []) + [6, 9]
    assert numbers(first.ending) == [9] and "--control-file" in first.ending
    assert file.read_text() == "0\n" and [row["iteration"] for row in first.rows] == list(
        range(1, 10)
    )
    second = run(
        data, tmp_path, *flags, world=world, hook=functools.partial(ask, {10: "halt"}, str(file))
    )
    assert f"WARNING: --control-file {file} holds 'halt'" in second.first_rank_log
    assert [row["iteration"] for row in second.rows] == list(range(1, 13))
    if world == 1:
        assert second.series(*EXACT) == straight.series(*EXACT)
        file.write_text("stop")
        third = run(data, tmp_path, *flags, "--train-iters", "20", "--override-opt_param-scheduler")
        assert reading.latest(third.save) == 13 and file.read_text() == "0\n"


def test_requests_of_a_control_file(tmp_path, capsys):
    path = tmp_path / "control"
    control = ControlFileRequests(str(path))
    assert path.read_text() == "0\n" and control.request(5) is None
    for text, before, after in [
        ("save", "save", "save"),
        ("stop\n", "stop", "stop"),
        ("7", None, "stop"),
        ("+7", None, "stop"),
        ("-7", None, "save"),
        ("", None, None),
        ("0", None, None),
        ("-0", None, None),
    ]:
        path.write_text(text)
        assert (control.request(6), control.request(7)) == (before, after), text
        assert control.request(90) == after, "passed by skipped iterations"
    for text in ("7.0", "stop now", "\x00", "9" * 30, "__import__('os')"):
        path.write_text(text)
        assert control.request(7) is None
    assert capsys.readouterr().out.count(f"WARNING: --control-file {path} holds") == 5
    path.write_text("save")
    assert control.request(7) == "save"
    path.write_text("9")
    control.after_iteration(9, Requests(save_now=1))
    assert path.read_text() == "9", "a request made meanwhile"
    assert control.request(9) == "stop"
    control.after_iteration(9, Requests(save_now=1))
    assert path.read_text() == "0\n"
    path.unlink()
    assert control.request(7) is None
