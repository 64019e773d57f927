"""The run directory: what save leaves behind, what load believes, what every failure says."""

import errno
import os
import resource
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.checkpoint import reading, retention, store
from megatron.checkpoint.filesystem import (
    CheckpointError,
    Disk,
)
from megatron.checkpoint.sharded import TensorSlice
from megatron.checkpoint.state import RunState
from megatron.config import run_directory
from megatron.config.run_directory import (
    ForeignCheckpoint,
)
from tests import problems
from tests.core.checkpoint.saves import (
    ARGS,
    Unsynced,
    UnsyncedNoExchange,
    assert_good,
    save,
)
from tests.forkrun import run_ranks
from tests.problems import assert_problem


class Recording(Disk):
    """Remembers every step as (action, name below the temporary directory or root)."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, str]] = []

    def step(self, action: str, path: Path) -> None:
        self.steps.append((action, ".tmp" if ".tmp-" in path.name else path.name))


class Failing(Disk):
    """Raises OSError `error`, or KeyboardInterrupt for 0, at step `at` (counted from 0), and only
    there."""

    def __init__(self, at: int, error: int) -> None:
        self.left = at
        self.error = error

    def step(self, action: str, path: Path) -> None:
        self.left -= 1
        if self.left == -1:
            raise OSError(self.error, os.strerror(self.error)) if self.error else KeyboardInterrupt


def test_what_a_save_leaves(tmp_path):
    assert reading.latest(tmp_path / "run") is None and reading.load(tmp_path / "run") is None
    assert (
        save(tmp_path / "run", 20)
        == tmp_path / "run" / "iter_0000020"
        == store.iteration_directory(tmp_path / "run", 20)
    )
    save(tmp_path / "run", 40)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "iter_0000020",
        "iter_0000040",
        "latest_checkpointed_iteration.txt",
    ]
    assert (tmp_path / "run" / "latest_checkpointed_iteration.txt").read_bytes() == b"40"
    assert sorted(path.name for path in (tmp_path / "run" / "iter_0000040").iterdir()) == [
        "args",
        "manifest.json",
        "state.json",
        "weights_00000.safetensors",
    ]
    assert (tmp_path / "run" / "iter_0000040" / "args").read_text(encoding="utf-8") == ARGS
    assert_good(tmp_path / "run", 40)
    assert_good(tmp_path / "run", 20, step=20)
    assert_good(tmp_path / "run" / "iter_0000020", 20)
    assert (
        run_directory.iterations(tmp_path / "run") == [20, 40]
        and reading.latest(tmp_path / "run") == 40
    )


def count_steps(tmp_path, prepare, disk: type[Disk]) -> int:
    prepare(tmp_path / "count")
    recording = type("Counting", (Recording, disk), {})()
    save(tmp_path / "count", 20, recording, version=1)
    return len(recording.steps)


START = {
    "empty": lambda root: None,
    "older": lambda root: save(root, 10, Unsynced()),
    "same": lambda root: save(root, 20, Unsynced()),
}


@pytest.mark.parametrize(
    ("start", "base", "error"),
    [
        ("empty", Unsynced, errno.ENOSPC),
        ("older", UnsyncedNoExchange, 0),
        ("same", Unsynced, 0),
        ("same", UnsyncedNoExchange, errno.ENOSPC),
    ],
)
def test_an_error_at_any_step_leaves_a_good_checkpoint(memory_path, start, base, error):
    """The disk fails, or Ctrl-C comes, at every single step of a save in turn."""
    steps = count_steps(memory_path, START[start], base)
    assert steps > 20
    for at in range(steps):
        root = memory_path / str(at)
        START[start](root)
        before = reading.latest(root)
        disk = type("FailingDisk", (Failing, base), {})(at, error)
        try:
            save(root, 20, disk, version=1)
        except CheckpointError as caught:
            assert error == caught.errno == errno.ENOSPC and "free space" in str(caught)
            assert str(memory_path) in str(caught)
        except KeyboardInterrupt:
            assert error == 0
        else:
            # only removing what is old may fail in silence
            assert disk.left < 0 and reading.latest(root) == 20
        if reading.latest(root) is None:
            assert before is None
        else:
            assert_good(root, reading.latest(root))
            assert reading.latest(root) in (before, 20)
        save(root, 30, Unsynced())
        assert_good(root, 30)
        assert not [path.name for path in root.iterdir() if path.name.startswith(".")], (
            "leftovers stay"
        )


def save_under_a_size_limit(rank: int, world: int, root: str) -> str:
    save(root, 10)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    try:
        save(root, 20)
    except CheckpointError as error:
        return f"{error.errno} {error}"
    return "saved"


def test_a_refusal_of_the_real_system(tmp_path):
    text = run_ranks(1, save_under_a_size_limit, str(tmp_path))[0]
    assert (
        text.startswith(f"{errno.EFBIG} cannot ")
        and "ulimit -f" in text
        and "previous checkpoint" in text
    )
    assert_good(tmp_path, 10)


def test_only_our_own_leftovers_are_removed(tmp_path):
    mine = [
        ".iter_0000010.tmp-0123abcd",
        ".iter_0000010.old-0123abcd",
        f".{store.TRACKER}.tmp-0123abcd",
    ]
    others = [
        ".iter_0000010.tmp-mine",
        "iter_0000010.tmp-0123abcd",
        ".iter_10.tmp-0123abcd",
        ".tmp",
        "notes",
        "iter_x",
    ]
    save(tmp_path, 10)
    for name in mine[:2] + others:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    (tmp_path / mine[2]).write_text("1")
    save(tmp_path, 20)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {*others, "iter_0000010", "iter_0000020", store.TRACKER}


def test_a_replacement_cut_in_the_middle_is_readable_and_mended(tmp_path):
    save(tmp_path, 20)
    aside = tmp_path / ".iter_0000020.old-0123abcd"
    (tmp_path / "iter_0000020").rename(aside)
    assert reading.resolve(tmp_path) == aside
    assert_good(tmp_path, 20)
    assert_good(tmp_path, 20, step=20)
    save(tmp_path, 40)
    assert not aside.exists() and run_directory.iterations(tmp_path) == [20, 40]
    assert_good(tmp_path, 20, step=20)


def test_a_release_of_megatron_is_another_suites(tmp_path):
    (tmp_path / "release").mkdir()
    (tmp_path / store.TRACKER).write_text("release")
    with problems.raises(ForeignCheckpoint, "checkpoint-of-another-suite"):
        reading.latest(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "release", "-3", "2.0", "iter_0000020", "\x00\xff", "9" * 30, "²", "1 2"]
)
def test_a_strange_tracker_says_what_to_write(tmp_path, text):
    save(tmp_path, 20)
    (tmp_path / store.TRACKER).write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError) as refused:
        reading.load(tmp_path)
    assert_problem(str(refused.value), "checkpoint-tracker-malformed", store.TRACKER, 20)
    assert_good(tmp_path, 20, step=20)


def test_what_cannot_be_resolved_says_what_is_there(tmp_path):
    save(tmp_path, 20)
    save(tmp_path, 40)
    (tmp_path / "iter_0000060").mkdir()
    (tmp_path / "iter_0000080" / "mp_rank_00").mkdir(parents=True)
    (tmp_path / "iter_0000099").mkdir()
    (tmp_path / "iter_0000099" / "metadata.json").write_text("{}")
    for step, words in [
        (50, "does not exist; choose another one with --ckpt-step .complete here: 20, 40"),
        (60, "has no manifest.json, so it is not complete"),
        (80, "mp_rank_00 .*written by Megatron-LM"),
        (99, "metadata.json .*written by Megatron-LM"),
    ]:
        with pytest.raises(CheckpointError, match=words):
            reading.resolve(tmp_path, step)
        with pytest.raises(CheckpointError, match=words):
            reading.resolve(tmp_path / f"iter_{step:07d}")
    (tmp_path / store.TRACKER).write_text("50")
    with problems.raises(
        CheckpointError, "checkpoint-incomplete", "latest_checkpointed_iteration.txt"
    ):
        reading.resolve(tmp_path)
    with problems.raises(CheckpointError, "checkpoint-step-missing", "20", "40"):
        reading.resolve(tmp_path / "iter_0000020", 40)
    assert reading.resolve(tmp_path / "iter_0000020", 20) == tmp_path / "iter_0000020"


def test_paths_that_are_no_run_directory(tmp_path):
    (tmp_path / "file").write_text("x")
    assert reading.load(tmp_path / "nowhere") is None and reading.load(tmp_path / "file") is None
    with problems.raises(CheckpointError, "checkpoint-incomplete"):
        reading.load(tmp_path / "nowhere", 20)
    with problems.raises(CheckpointError, "file-operation-failed"):
        save(tmp_path / "file" / "run", 20)


def test_a_checkpoint_copied_elsewhere_under_any_name(tmp_path):
    save(tmp_path / "run", 20)
    (tmp_path / "run" / "iter_0000020").rename(tmp_path / "best")
    assert_good(tmp_path / "best", 20)
    with problems.raises(CheckpointError, "flags-exclude-each-other"):
        reading.resolve(tmp_path / "best", 20)
    (tmp_path / "best").rename(tmp_path / "iter_0000030")
    with problems.raises(CheckpointError, "checkpoint-renamed", "20", "iter_0000030"):
        reading.load(tmp_path / "iter_0000030")


@pytest.mark.parametrize("name", ["args", "state.json", "weights_00000.safetensors"])
def test_a_missing_or_older_file_is_named(tmp_path, name):
    save(tmp_path, 20)
    other = save(tmp_path, 20, version=1)
    older = save(tmp_path / "other", 20)
    (other / name).unlink()
    with problems.raises(CheckpointError, "file-operation-failed", name, os.strerror(errno.ENOENT)):
        reading.load(tmp_path)
    if name != "args":  # the same length, the bytes of another save
        (other / name).write_bytes((older / name).read_bytes())
        with pytest.raises(CheckpointError, match=name), reading.load(tmp_path).reader() as reader:
            reader.verify()


def test_prune_keeps_the_newest_the_multiples_and_the_trackers(tmp_path):
    for iteration in range(10, 80, 10):
        save(tmp_path, iteration)
    assert retention.prune(tmp_path, 2, keep_every=50) == [10, 20, 30, 40]
    assert (
        run_directory.iterations(tmp_path) == [50, 60, 70]
        and retention.prune(tmp_path, 2, keep_every=50) == []
    )
    # what lies beyond it neither counts nor goes
    (tmp_path / store.TRACKER).write_text("60")
    assert retention.prune(tmp_path, 1) == [50] and run_directory.iterations(tmp_path) == [60, 70]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert_good(tmp_path, 60)
    with pytest.raises(ValueError, match="keep_last 0"):
        retention.prune(tmp_path, 0)


def test_a_prune_cut_short_leaves_nothing_that_looks_like_a_checkpoint(tmp_path, capsys):
    for iteration in (10, 20):
        save(tmp_path, iteration)

    class Half(Disk):
        def remove_tree(self, path: Path) -> None:
            (path / "weights_00000.safetensors").unlink()
            raise CheckpointError(f"cannot remove {path}")

    retention.prune(tmp_path, 1, disk=Half())
    assert run_directory.iterations(tmp_path) == [20] and "left behind" in capsys.readouterr().out
    with problems.raises(CheckpointError, "checkpoint-incomplete"):
        reading.load(tmp_path, 10)
    save(tmp_path, 30)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "iter_0000020",
        "iter_0000030",
        store.TRACKER,
    ]


def gather(value):
    """all_gather_object over the world, as the training loop passes it."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def save_together(rank: int, world: int, root: str, iteration: int, failing: int) -> str:
    """Each rank writes rows of one tensor; rank `failing` cannot."""
    whole = torch.arange(40.0).reshape(10, 4) + iteration
    cuts = [10 * number // world for number in range(world + 1)]
    low = cuts[rank]
    high = cuts[rank + 1]
    slices = [TensorSlice("w", (10, 4), torch.float32, ((low, high), (0, 4)), whole[low:high])]
    if rank == 0:
        slices.append(TensorSlice.whole("b", torch.tensor(iteration)))
    disk = Failing(1, errno.EIO) if rank == failing else Disk()
    try:
        return store.save(
            root,
            iteration,
            slices,
            RunState(iteration=iteration),
            ARGS,
            rank=rank,
            world_size=world,
            gather=gather,
            disk=disk,
        ).name
    except CheckpointError as error:
        return f"{error.errno} {error}"


def test_several_ranks_save_and_fail_together(tmp_path):
    assert run_ranks(3, save_together, str(tmp_path), 20, -1) == ["iter_0000020"] * 3
    names = sorted(path.name for path in (tmp_path / "iter_0000020").iterdir())
    assert names == [
        "args",
        "manifest.json",
        "state.json",
        *(f"weights_{rank:05d}.safetensors" for rank in range(3)),
    ]
    for failing in (2, 0):
        said = run_ranks(3, save_together, str(tmp_path), 40, failing)
        assert all(
            text.startswith(f"{errno.EIO} ") and "Input/output error" in text for text in said
        ), said
        others = [text for rank, text in enumerate(said) if rank != failing]
        assert all(text.startswith(f"{errno.EIO} rank {failing}: ") for text in others)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000020", store.TRACKER]
    found = reading.load(tmp_path)
    with found.reader() as reader:
        assert torch.equal(reader.read("w"), torch.arange(40.0).reshape(10, 4) + 20)
        assert torch.equal(
            reader.read("w", ((2, 5), (1, 3))), (torch.arange(40.0).reshape(10, 4) + 20)[2:5, 1:3]
        )
        assert reader.read("b").item() == 20


def test_ranks_that_do_not_cover_a_tensor_do_not_make_a_checkpoint(tmp_path):
    slices = [TensorSlice("w", (4,), torch.float32, ((0, 3),), torch.ones(3))]
    with problems.raises(CheckpointError, "checkpoint-damaged", "tensor w"):
        store.save(tmp_path, 20, slices, RunState(iteration=20), ARGS)
    assert not list(tmp_path.iterdir())


def test_permissions(tmp_path, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    save(tmp_path, 20)
    monkeypatch.setattr(os, "open", refuse)
    with problems.raises(
        CheckpointError,
        "file-operation-failed",
        "latest_checkpointed_iteration.txt",
        "Permission denied",
    ):
        reading.load(tmp_path)
    with problems.raises(
        CheckpointError, "file-operation-failed", "manifest.json", "Permission denied"
    ):
        reading.load(tmp_path / "iter_0000020")
