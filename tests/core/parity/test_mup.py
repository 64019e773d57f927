"""muP in whole runs: the same numbers in every layout, and after a resume in another one."""

from pathlib import Path

import pytest
import torch

from tests.core.parity.layouts import (
    A2A,
    CP,
    DISTRIBUTED,
    EP,
    EP_MOE,
    LLAMA,
    MUON,
    OVERLAP,
    PP,
    SP,
    TP,
    argv,
    saved,
)
from tests.runs import Finished, train, write_text

STEPS = 6
MUP = (
    *("--use-mup", "--mup-base-hidden-size", "8", "--mup-base-head-dim", "2"),
    *("--mup-embedding-mult", "2", "--adam-eps", "1e-3", "--fp64"),
)
UNIT = ("--muon-scale-mode", "unit_rms_norm")
QUICK = ("tp2 sp",)
LAYOUTS = {
    "tp2 sp": (LLAMA, 2, (TP, "2", SP)),
    "dp2, distributed optimizer, overlap": ((), 2, OVERLAP),
    "pp2": ((), 2, (PP, "2")),
    "cp2": ((), 2, (CP, "2")),
    "tp2 sp, distributed optimizer, Muon": ((*LLAMA, *MUON, *UNIT), 4, (TP, "2", SP, *DISTRIBUTED)),
    "ep2, experts": (EP_MOE, 2, (EP, "2", *A2A)),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    return write_text(tmp_path_factory.mktemp("data") / "text", 400)


def same(run: Finished, one: Finished) -> None:
    """Losses and norms of the steps that `run` has, and the last checkpoints."""
    for row, expected in zip(run.rows[::-1], one.rows[::-1], strict=False):
        for key in ("iteration", "lm_loss", "grad_norm", "learning_rate"):
            assert row[key] == pytest.approx(expected[key], rel=1e-10), key
    tensors = run.tensors()
    for name, tensor in one.tensors().items():
        torch.testing.assert_close(
            tensors[name][:211], tensor[:211], rtol=0, atol=1e-10 * float(tensor.abs().max())
        )


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.campaign) for n in LAYOUTS]
)
def test_a_layout_gives_the_numbers_of_one_process(name, data, tmp_path: Path):
    model, world, layout = LAYOUTS[name]
    flags = argv(data, model, STEPS, *MUP)
    one = train(tmp_path / "one", [*flags, *saved(tmp_path / "one")])
    run = train(tmp_path / "run", [*flags, *layout, *saved(tmp_path / "run")], world)
    assert len(run.rows) == STEPS
    same(run, one)


@pytest.mark.campaign
def test_a_resume_in_another_layout_gives_the_same_numbers(data, tmp_path: Path):
    flags = argv(data, LLAMA, STEPS, *MUP)
    one = train(tmp_path / "one", [*flags, *saved(tmp_path / "one")])
    into = saved(tmp_path / "two")
    train(tmp_path / "two", [*flags, *into, TP, "2", SP, "--exit-interval", "4"], 2)
    load = ("--load", str(tmp_path / "two/save"))
    run = train(tmp_path / "two", [*flags, *saved(tmp_path / "two"), *load, *OVERLAP], 2)
    assert run.resumes[-1] == 4
    same(run, one)
