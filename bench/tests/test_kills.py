"""kill -9 again and again: any rank, inside saves and between them; the run that was killed ends as
the one that was not."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.faults import inject
from bench.faults.inject import Fault
from megatron.checkpoint import reading
from tests.core.parity.layouts import DISTRIBUTED, PP, SP, TP
from tests.forkrun import RanksFailed
from tests.runs import EXACT, SMALL, Finished, same_tensors, train, write_text

BASE = [
    *SMALL,
    "--train-iters",
    "15",
    "--split",
    "100,0,0",
    "--eval-iters",
    "0",
    "--save-interval",
    "3",
    "--snapshot-interval",
    "2",
    "--keep-last",
    "2",
]
PLACES = ("step", "data", "forward", "backward", "reduction", "optimizer")
LAYOUTS = [(1, ()), (2, DISTRIBUTED), (2, (TP, "2", SP)), (2, (PP, "2"))]


def kill(fault: Fault, folder: Path) -> None:
    """A hook: the fault comes to its rank."""
    inject.install([fault], int(os.environ["RANK"]), folder)


class Campaign:
    """Runs that are killed until they are done, each compared with one that was not."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.data = write_text(folder / "text", 300)
        self.straight: dict[int, Finished] = {}

    def argv(self, folder: Path, layout: tuple[str, ...], *more: str) -> list[str]:
        save = str(folder / "save")
        return [*BASE, *layout, "--data-path", self.data, "--save", save, "--load", save, *more]

    def killed_run(self, seed: int) -> tuple[int, int]:
        """One run; (how often it was killed, how often of these in a save). Every other one with
        --async-save, where a kill in a save may be one of the process that writes."""
        rng = random.Random(seed)
        number = seed % len(LAYOUTS)
        world, layout = LAYOUTS[number]
        if number not in self.straight:
            whole = self.folder / f"straight-{number}"
            self.straight[number] = train(whole, self.argv(whole, layout), world)
        folder = self.folder / f"killed-{seed}"
        kills = 0
        in_saves = 0
        argv = self.argv(
            folder, layout, *(["--async-save"] if (seed + seed // len(LAYOUTS)) % 2 else [])
        )
        while True:
            rank = rng.randrange(world)
            in_save = 2 * in_saves <= kills
            place = "write" if in_save else rng.choice(PLACES)
            most = 12 if not in_save else 120 if rank == 0 else 60
            fault = Fault("SIGKILL", place, rank, rng.randint(1, most))
            hook = functools.partial(kill, fault, self.folder)
            try:
                done = train(folder, argv, world, hook=hook)
                break
            except RanksFailed:
                if not inject.injected(self.folder):
                    raise
                (self.folder / "injected.0").unlink()
                kills = kills + 1
                in_saves = in_saves + in_save
        (self.folder / "injected.0").unlink(missing_ok=True)
        assert "cannot load" not in done.first_rank_log, "a damaged checkpoint was met"
        whole = self.straight[number]
        assert done.series(*EXACT) == whole.series(*EXACT), f"seed {seed}"
        same_tensors(done.tensors(), whole.tensors())
        assert reading.latest(done.save) == 15
        return kills, in_saves


def run_campaign(
    campaign: Campaign,
    kills: int,
    state: tuple[int, int, int],
    note: Callable[[tuple[int, int, int]], None],
) -> None:
    """Go on from `state` = (next seed, kills, kills in saves) until there were so many kills."""
    seed, done, in_saves = state
    while done < kills:
        more, inside = campaign.killed_run(seed)
        seed = seed + 1
        done = done + more
        in_saves = in_saves + inside
        note((seed, done, in_saves))
        print(f"{seed} runs, {done} kills, {in_saves} of them in saves", flush=True)
    assert in_saves >= 0.4 * done and done - in_saves >= 0.3 * done


@pytest.mark.campaign
def test_a_few_kills(tmp_path):
    run_campaign(Campaign(tmp_path), 4, (2, 0, 0), lambda state: None)


@pytest.mark.sweep
def test_a_thousand_kills(tmp_path, request):
    """Resumable: run again after an interruption, it goes on where it was (pytest's cache)."""
    cache = request.config.cache
    key = "kills/state"
    run_campaign(
        Campaign(tmp_path),
        1000,
        tuple(cache.get(key, (100, 0, 0))),
        lambda state: cache.set(key, list(state)),
    )
    cache.set(key, [100, 0, 0])
