"""Whole runs of models with experts: killed and resumed, in bf16 and fp16, and evaluated."""

from pathlib import Path

import pytest

from tests.core.parity.layouts import EP_MOE, argv
from tests.runs import same_tensors, train, with_flags, write_text

EXACT = ("iteration", "lm_loss", "grad_norm", "loss_scale", "skipped", "max_expert_load")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    return write_text(tmp_path_factory.mktemp("text") / "text", 200)


def saving(folder: Path) -> list[str]:
    return ["--save", str(folder / "save"), "--load", str(folder / "save"), "--save-interval", "5"]


@pytest.mark.campaign
def test_evaluation_does_not_change_what_is_trained(data, tmp_path):
    """Not the expert bias either, which follows the tokens that train."""
    flags = with_flags(argv(data, EP_MOE, 4), "--eval-iters", "2")
    runs = []
    for interval in ("1", "1000"):
        folder = tmp_path / interval
        runs.append(
            train(folder, with_flags([*flags, *saving(folder)], "--eval-interval", interval))
        )
    often, once = (len(run.evaluations) for run in runs)
    assert often > once
    assert runs[0].series(*EXACT) == runs[1].series(*EXACT)
    same_tensors(runs[0].tensors(), runs[1].tensors())
