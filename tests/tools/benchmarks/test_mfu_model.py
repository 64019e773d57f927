"""tools/benchmarks/step/mfu_model.py: what it takes from a trace, and what follows from it."""

from __future__ import annotations

import pytest
import torch

from tests.forkrun import ROOT
from tests.load_tool import load_tool


@pytest.fixture
def model(monkeypatch):
    """The program as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "benchmarks" / "step"))
    return load_tool("benchmarks/step/mfu_model")


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_a_prediction_is_of_the_traced_step(model, family):
    """All FLOPs of the formula are in GEMMs and attention (whose backward computes its scores once
    more), fusing saves bytes and launches, and micro-batches share the optimizer."""
    sizes = [
        model.Size("", 2, 128, 2, 64, 4, 512, family=family, ffn=256, micro_batches=count)
        for count in (1, 4)
    ]
    one, four = (model.predict(size) for size in sizes)
    flops = model.Launches.last.flops
    again = flops["_scaled_dot_product_flash_attention"] // 2
    assert flops.total() - again == one["eager"].flops
    eager, compiled = one["eager"], one["compiled"]
    assert min(eager.seconds.values()) > 0 and list(eager.seconds) == list(model.KINDS)
    assert compiled.launches < eager.launches and compiled.seconds["GEMM"] == eager.seconds["GEMM"]
    runs = [run for run in model.Launches.last.runs if run.kind == "elementwise"]
    assert 0 < sum(run.fused for run in runs) < sum(sum(run.launches) for run in runs)
    for kind, times in (("GEMM", 4), ("cross entropy", 4), ("optimizer", 1)):
        assert four["eager"].seconds[kind] == pytest.approx(times * eager.seconds[kind])
    assert four["eager"].flops == 4 * eager.flops
    assert eager.step == max(sum(eager.seconds.values()), 11e-6 * eager.launches)


def test_a_product_that_fills_the_device_runs_at_its_rate(model):
    """66 tiles of rows and 4 of columns are two full waves; one tile more makes a third."""

    def rate(rows: int, terms: int) -> float:
        shapes = (rows, terms), (terms, 1024)
        flops = 2 * rows * terms * 1024
        return flops / model.gemm_seconds(flops, *(torch.empty(s, device="meta") for s in shapes))

    assert rate(66 * 128, 350) == pytest.approx(model.GEMM_RATE / 2)
    assert rate(67 * 128, 350) < 0.9 * rate(66 * 128, 350)
    assert rate(66 * 128, 3500) == pytest.approx(model.GEMM_RATE / 1.1)


def test_an_unknown_model_is_named(model, capsys):
    assert model.main(["GPT-9"]) == 2
    assert "'GPT-9'" in capsys.readouterr().err
