"""Whole runs of models with experts: killed and resumed, in bf16 and fp16, and evaluated."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.core.parity.layouts import A2A, EP, EP_MOE, OVERLAP, argv
from tests.runs import same_tensors, train, with_flags, write_text

EXACT = ("iteration", "lm_loss", "grad_norm", "loss_scale", "skipped", "max_expert_load")
STEPS = 12
RATE = 0.01  # of the expert bias of EP_MOE
LAYOUT = (EP, "2", *A2A, *OVERLAP)
OVERFLOWS = ("--initial-loss-scale", str(2.0**24), "--hysteresis", "1", "--loss-scale-window", "3")
# by name: flags, and the largest relative difference of the losses from those of one process in
# fp32; None where steps are skipped, so that later losses are others
PRECISIONS = {
    "fp32": ((), 1e-6),
    "bf16": (("--bf16",), 2e-4),
    "fp16": (("--fp16", "--initial-loss-scale", "4096"), 2e-4),
    "fp16, overflows": (("--fp16", *OVERFLOWS), None),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    return write_text(tmp_path_factory.mktemp("text") / "text", 200)


def saving(folder: Path) -> list[str]:
    return ["--save", str(folder / "save"), "--load", str(folder / "save"), "--save-interval", "5"]


@pytest.fixture(scope="module")
def fp32(data, tmp_path_factory) -> list[float]:
    """The losses of one process in fp32."""
    run = train(tmp_path_factory.mktemp("fp32"), argv(data, EP_MOE, STEPS))
    return [loss for (loss,) in run.series("lm_loss")]


@pytest.mark.campaign
@pytest.mark.parametrize("name", PRECISIONS)
def test_a_killed_run_with_experts_resumes_bit_for_bit(name, data, fp32, tmp_path):
    """In each precision. Skipped steps do not change the expert bias."""
    precision, limit = PRECISIONS[name]
    flags = argv(data, EP_MOE, STEPS, *precision, *LAYOUT)
    straight = train(tmp_path / "a", [*flags, *saving(tmp_path / "a")], 2)
    train(tmp_path / "b", [*flags, *saving(tmp_path / "b")], 2, kill_at=8)
    resumed = train(tmp_path / "b", [*flags, *saving(tmp_path / "b")], 2)
    assert resumed.resumes[-1] == 5
    assert resumed.series(*EXACT) == straight.series(*EXACT)
    same_tensors(resumed.tensors(), straight.tensors())
    skipped = sum(row["skipped"] for row in straight.rows)
    assert (limit is None) == (skipped > 1) and skipped < 8
    biases = [t for n, t in straight.tensors().items() if n.endswith("router.expert_bias")]
    assert 0 < max(t.abs().max() for t in biases) <= (STEPS - skipped) * RATE * 1.001
    if limit:
        assert [loss for (loss,) in straight.series("lm_loss")] == pytest.approx(fp32, rel=limit)


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
