"""Power lost at every point of a save, with every combination of what was not yet synced: old or
new, never neither."""

import random
from collections.abc import Iterator
from itertools import chain, combinations
from pathlib import Path

import pytest

from megatron.checkpoint import reading, retention, store
from megatron.checkpoint.filesystem import CheckpointError, Disk
from megatron.checkpoint.sharded import TensorSlice
from megatron.checkpoint.state import RunState
from megatron.config import run_directory
from tests.core.checkpoint.crash_model import Recorder, Tree, lay_out
from tests.core.checkpoint.saves import ARGS, Unsynced, assert_good, save, tensors

ALL_OF = 12  # of up to so many operations every subset, of more RANDOM ones


class NoExchange(Recorder):
    """A file system that cannot exchange two names."""

    def exchange(self, first: Path, second: Path) -> bool:
        return False


def save_in_two_parts(root: Path, disk: Disk) -> None:
    """A save as two ranks make it, of which this process plays both, step after step."""
    state = RunState(iteration=20, consumed_train_samples=320, optimizer={"version": 1})
    token = "0123abcd"
    temporary = root / f".iter_0000020.tmp-{token}"
    slices = [TensorSlice.whole(name, tensor) for name, tensor in tensors(1020).items()]
    store.prepare(root, temporary, disk)
    for rank in (0, 1):
        store.write_rank_files(temporary, rank, slices[rank::2], 20, disk)
    store.finish(temporary, 2, state, ARGS, disk)
    store.publish(root, temporary, 20, disk)


def with_leftovers(root: Path) -> None:
    save(root, 10, Unsynced())
    save(root, 20, Unsynced())
    (root / "iter_0000020").rename(root / ".iter_0000020.old-0123abcd")
    (root / ".iter_0000015.tmp-0123abcd").mkdir()
    (root / ".iter_0000015.tmp-0123abcd/args").write_text("x")


def save_and_prune(root: Path, disk: Disk) -> None:
    save(root, 20, disk, version=1)
    retention.prune(root, 1, disk=disk)


def many(*iterations: int):
    return lambda root: [save(root, one, Unsynced()) for one in iterations]


def snapshot(root: Path, disk: Disk) -> None:
    """The slots are the two directories in `root`."""
    save(retention.free_slot(run_directory.slots(root), 20, disk), 20, disk, version=1)


CASES = {  # what is there before, the save of iteration 20 version 1, the file system
    "first": (lambda root: None, lambda root, disk: save(root, 20, disk, version=1), Recorder),
    "after another": (many(10), lambda root, disk: save(root, 20, disk, version=1), Recorder),
    "two ranks": (many(10), save_in_two_parts, Recorder),
    "replacing the same": (
        many(10, 20),
        lambda root, disk: save(root, 20, disk, version=1),
        Recorder,
    ),
    "replacing without exchange": (
        many(10, 20),
        lambda root, disk: save(root, 20, disk, version=1),
        NoExchange,
    ),
    "before a newer one": (
        many(20, 40),
        lambda root, disk: save(root, 20, disk, version=1),
        NoExchange,
    ),
    "with leftovers of a killed one": (
        with_leftovers,
        lambda root, disk: save(root, 20, disk, version=1),
        Recorder,
    ),
    "and removal of an older one": (many(10), save_and_prune, Recorder),
    "and removal of three older ones": (many(5, 8, 10), save_and_prune, Recorder),
}


def subsets(numbers: list[int], rng: random.Random, most: int) -> Iterator[frozenset[int]]:
    """Every subset, or `most` random ones besides none and all."""
    if len(numbers) <= ALL_OF and 1 << len(numbers) <= most:
        yield from map(
            frozenset,
            chain.from_iterable(combinations(numbers, n) for n in range(len(numbers) + 1)),
        )
        return
    yield from (frozenset(), frozenset(numbers))
    for _ in range(most):
        chance = rng.random()
        yield frozenset(number for number in numbers if rng.random() < chance)


def states_after_crashes(disk: Recorder, rng: random.Random, most: int) -> tuple[set[Tree], int]:
    """The different states of the disk, and how many crashes lead to them."""
    found = set()
    crashes = 0
    for done in range(len(disk.operations) + 1):
        for lost in subsets(disk.unsynced(done), rng, most):
            found.add(disk.after_a_crash(done, lost))
            crashes += 1
    return found, crashes


def check_case(case: str, folder: Path, most: int) -> tuple[int, int, set]:
    """(crashes, different states, what was found in them) of one case."""
    before, act, kind = CASES[case]
    root = folder / "run"
    root.mkdir()
    before(root)
    old = reading.latest(root)
    disk = kind(root)
    act(root, disk)
    assert assert_good(root, 20) == 1
    states, crashes = states_after_crashes(disk, random.Random(1), most)
    found = set()
    crashed = folder / "crashed"
    for tree in states:
        lay_out(tree, crashed)
        latest = reading.latest(crashed)
        assert latest in (old, 20), f"the tracker names {latest}"
        found.add((latest, assert_good(crashed, latest) if latest is not None else None))
        for iteration in run_directory.iterations(crashed):
            # what looks like a checkpoint is one
            assert_good(crashed, iteration, step=iteration)
        save(crashed, 30, Unsynced())  # and a save works there
        assert_good(crashed, 30)
        assert not [path.name for path in crashed.iterdir() if path.name.startswith(".")]
    return crashes, len(states), found


QUICK = ("two ranks",)


def marked(case: str):
    rare = ("three", "leftovers", "before a newer", "without exchange")
    mark = pytest.mark.sweep if any(word in case for word in rare) else pytest.mark.campaign
    return case if case in QUICK else pytest.param(case, marks=mark)


@pytest.mark.parametrize("case", [marked(case) for case in CASES])
def test_every_crash_leaves_the_old_or_the_new_one(case, memory_path):
    crashes, states, found = check_case(case, memory_path, 64 if case in QUICK else 512)
    print(
        f"{case}: {crashes} crashes, {states} different states, all good: {sorted(map(str, found))}"
    )
    assert states > 30 and (20, 1) in found and len(found) > 1


@pytest.mark.sweep
@pytest.mark.parametrize("case", CASES)
def test_every_crash_of_the_longer_ones(case, memory_path):
    crashes, states, _ = check_case(case, memory_path, 1 << ALL_OF)
    print(f"{case}: {crashes} crashes, {states} different states, all good")


@pytest.mark.campaign
def test_a_crash_while_a_snapshot_is_written_leaves_the_other_one(memory_path):
    slots = run_directory.slots(memory_path / "run")
    for slot, iteration in zip(slots, (10, 15), strict=True):
        slot.parent.mkdir(exist_ok=True)
        save(slot, iteration, Unsynced())
    disk = Recorder(memory_path / "run")
    snapshot(memory_path / "run", disk)
    states, _ = states_after_crashes(disk, random.Random(1), 64)
    newest = set()
    for tree in states:
        lay_out(tree, memory_path / "crashed")
        here = {}
        for slot in run_directory.slots(memory_path / "crashed"):
            with_what = reading.latest(slot)
            if with_what is not None:
                here[with_what] = assert_good(slot, with_what)
        assert here.keys() <= {10, 15, 20} and 15 in here
        newest.add(max(here))
    assert newest == {15, 20}


# (a bug, what must then be seen): each step that is left out makes a crash that loses everything
class NoFileSync(Recorder):
    """Forgets to sync files."""

    def fsync(self, descriptor: int, path: Path) -> None:
        pass


class NoDirectorySync(Recorder):
    """Forgets to sync directories."""

    def fsync_directory(self, path: Path) -> None:
        pass


@pytest.mark.parametrize("kind", [NoFileSync, NoDirectorySync])
def test_a_forgotten_sync_is_caught(kind, memory_path, monkeypatch):
    monkeypatch.setitem(
        CASES, "planted", (many(10), lambda root, disk: save(root, 20, disk, version=1), kind)
    )
    with pytest.raises((AssertionError, CheckpointError)):
        check_case("planted", memory_path, 200)
