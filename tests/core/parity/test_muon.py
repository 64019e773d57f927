"""A run with Muon, or NorMuon, that is killed resumes to the bit in its layout, and with the same numbers in another
one."""

from pathlib import Path

import pytest

from tests.core.parity.layouts import (
    A2A,
    CP,
    DISTRIBUTED,
    EP,
    EP_MOE,
    ETP,
    EXACT,
    INSTANCES,
    LAST,
    LLAMA,
    MUON,
    OVERLAP,
    PP,
    SP,
    STOP,
    TP,
    argv,
    saved,
)
from tests.runs import Finished, same_tensors, train, write_text

KILLED = STOP + 2  # in this step; step STOP was saved
DENSE = {
    "one": (1, ()),
    "tp2 sp": (2, (TP, "2", SP)),
    "dp2, distributed optimizer": (2, DISTRIBUTED),
    "pp2": (2, (PP, "2")),
    "cp2": (2, (CP, "2")),
    "dp4, distributed optimizer in 2 instances, overlap": (4, (*OVERLAP, *INSTANCES)),
    "tp2 sp dp2, distributed optimizer, overlap": (4, (TP, "2", SP, *OVERLAP)),
}
EXPERTS = {
    "ep2, distributed optimizer": (2, (EP, "2", *A2A, *DISTRIBUTED)),
    "dp4, distributed optimizer": (4, DISTRIBUTED),
    "etp1 ep2 tp2 sp, distributed optimizer": (
        2,
        (ETP, "1", EP, "2", *A2A, TP, "2", SP, *DISTRIBUTED),
    ),
}
TWICE = "dp4, distributed optimizer in 2 instances, overlap"
QUICK = "one"  # and to the numbers of "tp2 sp"
NEURONS = ("--muon-neuron-beta2", "0.95")


def cases(layouts: dict, often: tuple[str, ...]) -> list:
    """The layouts; all but the quick one only in CI's slow part, or in the sweep."""
    marks = {name: pytest.mark.campaign if name in often else pytest.mark.sweep for name in layouts}
    return [pytest.param(name, marks=() if name == QUICK else marks[name]) for name in marks]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    return write_text(tmp_path_factory.mktemp("data") / "text", 400)


def killed_and_resumed(
    model: tuple[str, ...], layouts: dict, name: str, data: str, folder: Path
) -> None:
    """In the same layout bit by bit, weights and state; then in the next one of `layouts` to
    1e-10."""
    flags = argv(data, (*model, *MUON), LAST, "--fp64")

    def run(where: str, into: str, *more: str, kill_at: int | None = None) -> Finished:
        world, layout = layouts[where]
        save = saved(folder / into)
        return train(folder / into, [*flags, *layout, *save, *more], world, kill_at)

    straight = run(name, "straight")
    run(name, "killed", kill_at=KILLED)
    checkpoint = ("--load", str(folder / "killed/save"))
    names = list(layouts)
    other = run(names[(names.index(name) + 1) % len(names)], "other", *checkpoint)
    resumed = run(name, "killed", *checkpoint)
    assert resumed.resumes[-1] == STOP
    assert resumed.series(*EXACT)[STOP:] == straight.series(*EXACT)[STOP:]
    tensors = straight.tensors()
    kinds = {"momentum_buffer", "neuron_exp_avg_sq"} if NEURONS[0] in model else {"momentum_buffer"}
    assert kinds <= {name.split(".")[1] for name in tensors}
    same_tensors(resumed.tensors(), tensors)
    for row, expected in zip(other.rows, straight.rows[STOP:], strict=True):
        for key in ("lm_loss", "grad_norm"):
            assert row[key] == pytest.approx(expected[key], rel=1e-10)
    elsewhere = other.tensors()
    assert elsewhere.keys() == tensors.keys()
    for tensor_name, tensor in tensors.items():
        change = (elsewhere[tensor_name][:211] - tensor[:211]).abs().max()
        assert change <= 1e-10 * tensor.abs().max(), tensor_name


@pytest.mark.parametrize("name", cases(DENSE, ("pp2", TWICE)))
def test_a_killed_run_resumes_as_if_it_had_not_been(name, data, tmp_path):
    killed_and_resumed(LLAMA, DENSE, name, data, tmp_path)


@pytest.mark.parametrize("name", cases(EXPERTS, ("ep2, distributed optimizer",)))
def test_a_killed_run_of_experts_resumes_as_if_it_had_not_been(name, data, tmp_path):
    killed_and_resumed(EP_MOE, EXPERTS, name, data, tmp_path)


@pytest.mark.parametrize("name", ["tp2 sp"])
@pytest.mark.campaign
def test_a_killed_run_with_normuon_resumes_as_if_it_had_not_been(name, data, tmp_path):
    killed_and_resumed((*LLAMA, *NEURONS), DENSE, name, data, tmp_path)


@pytest.mark.parametrize("name", ["etp1 ep2 tp2 sp, distributed optimizer"])
@pytest.mark.campaign
def test_a_killed_run_of_experts_with_normuon_resumes_as_if_it_had_not_been(name, data, tmp_path):
    killed_and_resumed((*EP_MOE, *NEURONS), EXPERTS, name, data, tmp_path)
