"""What a run does about spikes (facts/spikes.md 4.4): the detector on made-up runs, updates left out, going back."""
from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from megatron.checkpoint import store
from tests.runs import SMALL, Finished, same_tensors, train, write_text
from tests.spikes.injected import inject

BASE = [*SMALL, "--split", "100,0,0", "--eval-iters", "0", "--save-interval", "20"]
EXACT = ("iteration", "lm_loss", "grad_norm", "learning_rate", "consumed_samples", "loss_scale", "spike", "spike_sigma")
SPIKES = {41: 2.0, 42: 1.7}         # of which the rest follows: 43 is the first to be back, 40 to 43 are skipped


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    return write_text(tmp_path_factory.mktemp("data") / "text", 800)


def run(folder: Path, data: str, *extra: str, bad: Mapping[int, float] | None = None, world: int = 1,
        iterations: int = 60, **more) -> Finished:
    argv = [*BASE, "--data-path", data, "--train-iters", str(iterations), "--save", str(folder / "save"), *extra]
    return train(folder, argv, world, hook=functools.partial(inject, bad or {}), **more)


def states_agree(one: Path, other: Path, iteration: int) -> None:
    """All that two checkpoints have beside tensors, but who asked for the skips and what they went back for."""
    mine, its = (json.loads((store.iteration_directory(root, iteration) / "state.json").read_text())
                 for root in (one, other))
    for state in (mine, its):
        del state["skips"], state["spikes"]["rewinds"]
    assert mine == its


def rewound_is_restarted(tmp_path: Path, data: str, back: int, *extra: str, source: str, world: int = 1,
                         later: tuple[int, ...] = (40, 60), aside: tuple[str, ...] = ("iter_0000040.left-1",)) -> Finished:
    """A run that goes back by itself, against one that is started again from a checkpoint of iteration `back`."""
    mine = run(tmp_path / "mine", data, "--spike-action", "rewind", *extra, bad=SPIKES, world=world)
    assert f"rewind from iteration 43 to {back} ({source}), attempt 1 for the spike at 41" in mine.first_rank_log, mine.log
    assert [json.loads(line)["id"] for line in (mine.save / "skips.jsonl").read_text().splitlines()] == ["40-43"]
    its = tmp_path / "its"
    run(its, data, "--exit-interval", str(back), *extra, "--spike-action", "log", world=world)
    other = run(its, data, "--load", str(its / "save"), "--train-range-to-skip", "40", "43", *extra, "--spike-action", "log",
                bad=SPIKES, world=world)
    assert mine.series(*EXACT) == other.series(*EXACT)
    for iteration in later:
        same_tensors(mine.tensors(iteration), other.tensors(iteration))
        states_agree(mine.save, other.save, iteration)
    left = sorted(path.name for path in mine.save.iterdir() if ".left-" in path.name)
    assert left == list(aside), left
    return mine


@pytest.mark.campaign
@pytest.mark.parametrize("extra", [(), ("--async-save", "--num-workers", "1")], ids=["plain", "async save, a worker"])
def test_t15_rewind_from_memory_is_the_run_started_again(tmp_path, data, extra):
    rewound_is_restarted(tmp_path, data, 30, "--spike-snapshot-interval", "10", *extra, source="a copy in memory")


@pytest.mark.campaign
def test_t15_rewind_to_a_checkpoint_is_the_run_started_again(tmp_path, data):
    """Also of Adam's moments in another format, fp16 with its scale, and a ledger."""
    ledger = tmp_path / "ledger"
    mine = rewound_is_restarted(tmp_path, data, 20, "--spike-snapshot-interval", "0", "--fp16", "--initial-loss-scale",
                                "65536", "--data-ledger", str(ledger), source="a checkpoint")
    assert len(mine.rows) == 60


LAYOUTS = {
    "dp2, distributed optimizer, both overlaps, bf16": (
        "--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather", "--bf16"),
    "tp2, sequence parallel": ("--tensor-model-parallel-size", "2", "--sequence-parallel"),
    "pp2": ("--pipeline-model-parallel-size", "2"),
}


@pytest.mark.campaign
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("memory", [True, False], ids=["from memory", "from a checkpoint"])
def test_t15_rewind_in_parallel_layouts(tmp_path, data, layout, memory):
    every, back, source = ("10", 30, "a copy in memory") if memory else ("0", 20, "a checkpoint")
    rewound_is_restarted(tmp_path, data, back, "--spike-snapshot-interval", every, *LAYOUTS[layout], source=source, world=2)
