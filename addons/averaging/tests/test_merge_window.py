"""--merge-window: the mean of a run's last checkpoints is what tools/merge_checkpoints.py writes."""

from __future__ import annotations

import functools
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron.addons.averaging import merged
from megatron.checkpoint import reading
from megatron.training.checkpointing import save
from tests.core.parity.layouts import GPT2, OVERLAP, PP, TP, UNTIED, ZERO3, argv
from tests.load_tool import exit_code, load_tool
from tests.runs import Finished, same_tensors, train, with_flags, write_text

WINDOW = ("--merge-window", "2")
LAST = 4


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    return write_text(tmp_path_factory.mktemp("data") / "text", 400)


def run(folder: Path, data: str, *more: str, world: int = 1, model=GPT2, **how) -> Finished:
    words = argv(data, model, LAST, "--save", str(folder / "save"), "--save-interval", "1")
    return train(folder, with_flags(words, *more), world, **how)


def merge(target: Path, *words: object) -> None:
    assert exit_code(load_tool("merge_checkpoints").main, *words, "--save", target) == 0


def test_the_validation_is_that_of_the_merged_checkpoint(data, tmp_path):
    """Of the two before each validation; none while there are fewer."""
    words = ("--fp64", "--full-validation", "--eval-interval", "2")
    done = run(tmp_path / "run", data, *words, *WINDOW, "--merge-weights", "1-sqrt")
    own = [(iteration, loss) for split, iteration, loss in done.evaluations if "merged" in split]
    assert [iteration for iteration, _ in own] == [LAST]
    pair = [done.save / f"iter_000000{n}" for n in (2, 3)]
    merge(tmp_path / "merged", *pair, "--merge-weights", "1-sqrt")
    words = (*words, "--skip-train", "--load", str(tmp_path / "merged"))
    again = run(tmp_path / "again", data, *words)
    [found] = [loss for split, _, loss in again.evaluations if split == "validation"]
    assert found == pytest.approx(own[0][1], rel=1e-12)
    plain = run(tmp_path / "plain", data, "--fp64")
    same_tensors(done.tensors(), plain.tensors())


def keep_merged(folder: str) -> None:
    """A hook: a checkpoint of the model while it has the mean."""
    real = merged.in_the_model

    @contextmanager
    def kept(run, others):
        with real(run, others) as done:
            target = save.SharedDirectory(run, folder)
            save.begin_save(run, save.constants_of(run), target, save.own_slices(run), "")
            yield done

    merged.in_the_model = kept


LAYOUTS = {
    "dp2, ZeRO-3": (2, ZERO3),
    "tp2 dp2, distributed optimizer": (4, (TP, "2", *OVERLAP)),
    "pp2": (2, (PP, "2")),
}


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=pytest.mark.sweep if world == 2 else pytest.mark.campaign)
        for name, (world, _) in LAYOUTS.items()
    ],
)
def test_its_bytes_are_the_tools_in_each_layout(layout, data, tmp_path):
    """bf16: of fp32 main weights that one process saved, rounded once."""
    world, flags = LAYOUTS[layout]
    first = run(tmp_path, data, "--bf16", "--exit-interval", "3", model=UNTIED)
    kept = tmp_path / "kept"
    words = ("--bf16", "--load", str(first.save), "--eval-interval", str(LAST), *WINDOW, *flags)
    hook = functools.partial(keep_merged, str(kept))
    run(tmp_path, data, *words, world=world, model=UNTIED, hook=hook)
    merge(tmp_path / "merged", *(first.save / f"iter_000000{n}" for n in (2, 3)))
    with (
        reading.load(kept).reader() as own,
        reading.load(tmp_path / "merged").reader() as tools,
    ):
        rows = {name: tools.shape(name)[0] for name in tools.names()}
        same_tensors(
            {name: own.read(name)[: rows[name]].contiguous() for name in rows},
            {name: tools.read(name) for name in rows},
        )
