"""kill -9 in a save: at every step of it, and at random moments; what the tracker names always
loads, bit for bit."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from megatron.checkpoint import retention, store
from megatron.config import run_directory
from tests.core.checkpoint.saves import NoExchange, Unsynced, assert_good, save
from tests.forkrun import run_ranks

# iterations there before the save of 20
START = {"empty": [], "older": [10], "same": [20], "newer": [20, 40]}


class Deadly(Unsynced):
    """Kills its own process at step `at`; writes are cut in half there. A kill loses no pages,
    synced or not."""

    def __init__(self, at: int) -> None:
        self.left = at

    def step(self, action: str, path: Path) -> None:
        self.left -= 1
        if self.left == -1:
            os.kill(os.getpid(), signal.SIGKILL)

    def write(self, descriptor: int, path: Path, data: memoryview | bytes, offset: int) -> None:
        if self.left == 0:
            os.pwrite(descriptor, memoryview(data)[: len(data) // 2], offset)
        super().write(descriptor, path, data, offset)


class DeadlyNoExchange(Deadly, NoExchange):
    """The same on a file system that cannot exchange names."""


def fork_and(action) -> int:
    """Run `action` in a child; its exit status as os.waitpid gives it."""
    child = os.fork()
    if child == 0:
        try:
            action()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1]


def kill_at_every_step(
    rank: int, world: int, folder: str, kind: type[Deadly], start: list[int]
) -> tuple[int, set]:
    """Kill one save of iteration 20 per step, in a child; returns how many and what was found
    afterwards."""
    template = Path(folder) / "template"
    root = Path(folder) / "run"
    template.mkdir()
    for iteration in start:
        save(template, iteration, Unsynced())
    found = set()
    for at in range(1000):
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(template, root)
        status = fork_and(lambda at=at: save(root, 20, kind(at), version=1))
        latest = store.latest(root)
        assert latest in ([None, 20] if not start else [start[-1], 20]), (at, latest)
        found.add((latest, assert_good(root, latest) if latest is not None else None))
        for iteration in {*start} - {20}:
            assert_good(root, iteration, step=iteration)
        if 20 in start:
            assert_good(root, 20, step=20)  # whatever the tracker says, 20 was there and is there
        save(root, 50, Unsynced())
        assert_good(root, 50)
        assert not [path.name for path in root.iterdir() if path.name.startswith(".")], at
        if status == 0:
            return at, found
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status
    raise AssertionError("the save never ended")


@pytest.mark.parametrize(
    ("kind", "start"),
    [
        pytest.param(Deadly, "empty", marks=pytest.mark.campaign),
        (Deadly, "older"),
        pytest.param(Deadly, "same", marks=pytest.mark.campaign),
        pytest.param(DeadlyNoExchange, "same", marks=pytest.mark.campaign),
        pytest.param(DeadlyNoExchange, "newer", marks=pytest.mark.campaign),
    ],
)
def test_killed_at_every_step(memory_path, kind, start):
    before = START[start]
    kills, found = run_ranks(1, kill_at_every_step, str(memory_path), kind, before)[0]
    assert kills > 20
    assert found >= {(before[-1], 0) if before else (None, None), (20, 1)}, (
        "both the old and the new were seen"
    )


def save_for_ever(root: Path, first: int) -> None:
    """Save new iterations, and each a second time, until killed."""
    iteration = first
    while True:
        save(root, iteration)
        save(root, iteration, version=1)
        retention.prune(root, 2)
        iteration += 1


def kill_at_random(rank: int, world: int, folder: str, kills: int) -> int:
    """Real kill -9 at random moments of endless saves into one directory; the number of the last
    iteration.

    After a saver that committed nothing the next one may live longer, however slow the machine is.
    """
    root = Path(folder)
    rng = random.Random(1)
    last = 0
    longest = 0.15
    for _ in range(kills):
        child = os.fork()
        if child == 0:
            save_for_ever(root, last + 1)
        time.sleep(rng.uniform(0.002, longest))
        os.kill(child, signal.SIGKILL)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        now = store.latest(root) or 0
        assert now >= last
        for iteration in run_directory.iterations(root)[-3:]:
            assert_good(root, iteration, step=iteration)
        if now:
            assert_good(root, now)
        longest *= 1.2 if now == last else 1.0
        last = now
    return last


@pytest.mark.parametrize(
    ("kills", "saves"),
    [
        (6, 0),
        pytest.param(25, 3, marks=pytest.mark.campaign),
        pytest.param(1000, 50, marks=pytest.mark.sweep),
    ],
)
def test_killed_at_random_moments(memory_path, kills, saves):
    assert run_ranks(1, kill_at_random, str(memory_path), kills, seconds=1200)[0] > saves
