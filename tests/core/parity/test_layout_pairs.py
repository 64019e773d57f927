"""A checkpoint of any layout goes on in any other: the next 4 losses and gradient norms of the run
that never stopped."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.core.parity.layouts import (
    CHUNKS,
    CP,
    DEEP,
    DISTRIBUTED,
    GATHER,
    INSTANCES,
    OVERLAP,
    PP,
    SP,
    TP,
    argv,
)
from tests.runs import Finished, train, write_text

STOP = 3
STEPS = 4
VPP = (PP, "2", CHUNKS, "2")
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {  # name: (ranks, flags)
    "one": (1, ()),
    "tp2": (2, (TP, "2")),
    "tp2 sp": (2, (TP, "2", SP)),
    "tp4": (4, (TP, "4")),
    "tp4 sp": (4, (TP, "4", SP)),
    "pp2": (2, (PP, "2")),
    "pp4": (4, (PP, "4")),
    "pp2 vpp2": (2, VPP),
    "cp2": (2, (CP, "2")),
    "cp2 all_gather": (2, (CP, "2", *GATHER)),
    "cp4": (4, (CP, "4")),
    "dp2": (2, ()),
    "dp4": (4, ()),
    "dp2, distributed optimizer": (2, DISTRIBUTED),
    "dp4, distributed optimizer": (4, DISTRIBUTED),
    "dp4, 2 instances": (4, (*DISTRIBUTED, *INSTANCES)),
    "dp2, overlap": (2, OVERLAP),
    "tp2 dp2": (4, (TP, "2")),
    "tp2 sp dp2, distributed optimizer": (4, (TP, "2", SP, *DISTRIBUTED)),
    "pp2 dp2": (4, (PP, "2")),
    "pp2 dp2, overlap": (4, (PP, "2", *OVERLAP)),
    "cp2 dp2": (4, (CP, "2")),
    "cp2 dp2, distributed optimizer": (4, (CP, "2", *DISTRIBUTED)),
    "tp2 sp pp2": (4, (TP, "2", SP, PP, "2")),
    "tp2 sp cp2": (4, (TP, "2", SP, CP, "2")),
    "cp2 pp2": (4, (CP, "2", PP, "2")),
    "pp2 vpp2 dp2, distributed optimizer": (4, (*VPP, *DISTRIBUTED)),
}
QUICK = [("tp2 sp", "pp2 vpp2")]
NAMES = list(LAYOUTS)
CAMPAIGN = [(NAMES[n], NAMES[(n + 11) % len(NAMES)]) for n in range(0, len(NAMES), 12)]

Writer = Callable[[str], Finished]


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list[str]:
    data = write_text(tmp_path_factory.mktemp("data") / "text", 400)
    return argv(data, DEEP, STOP + STEPS, "--fp64", "--hidden-size", "16")


@pytest.fixture(scope="module")
def straight(flags, tmp_path_factory) -> Finished:
    """One process that never stopped."""
    return train(tmp_path_factory.mktemp("straight"), flags)


@pytest.fixture(scope="module")
def written(flags, tmp_path_factory) -> Writer:
    """The checkpoint of a layout, made once."""
    found: dict[str, Finished] = {}

    def write(name: str) -> Finished:
        if name not in found:
            folder = tmp_path_factory.mktemp("written")
            world, layout = LAYOUTS[name]
            save = (
                "--save",
                str(folder / "save"),
                "--save-interval",
                "100",
                "--exit-interval",
                str(STOP),
            )
            found[name] = train(folder, [*flags, *layout, *save], world)
        return found[name]

    return write


def go_on(
    before: str, after: str, flags: list[str], straight: Finished, written: Writer, folder: Path
) -> float:
    """Go on in the layout `after` from a checkpoint of `before`; the largest relative
    difference."""
    world, layout = LAYOUTS[after]
    run = train(folder, [*flags, *layout, "--load", str(written(before).save)], world)
    assert [row["iteration"] for row in run.rows] == list(range(STOP + 1, STOP + STEPS + 1))
    worst = 0.0
    for row, other in zip(run.rows, straight.rows[STOP:], strict=True):
        assert (
            row["consumed_samples"] == other["consumed_samples"]
            and row["learning_rate"] == other["learning_rate"]
        )
        for key in ("lm_loss", "grad_norm"):
            worst = max(worst, abs(row[key] - other[key]) / abs(other[key]))
    print(f"{before} -> {after}: {worst:.1e}")
    assert worst <= 1e-10
    return worst


@pytest.mark.parametrize(("before", "after"), QUICK)
def test_a_pair_of_layouts(before, after, flags, straight, written, tmp_path):
    go_on(before, after, flags, straight, written, tmp_path)


@pytest.mark.campaign
@pytest.mark.parametrize(("before", "after"), CAMPAIGN)
def test_some_pairs_of_layouts(before, after, flags, straight, written, tmp_path):
    go_on(before, after, flags, straight, written, tmp_path)
