"""Peak memory of conversions: a few tensors, never the model. The 2 GB model and how it is measured
are those of tools/benchmarks/convert.py."""

from __future__ import annotations

import importlib

import pytest

benchmark = importlib.import_module("tools.benchmarks.convert")


@pytest.mark.parametrize(
    ("size", "shape"),
    [
        pytest.param(4e8, {"width": 512, "vocab": 4096}, id="0.4GB", marks=pytest.mark.campaign),
        pytest.param(2e9, {}, id="2GB", marks=pytest.mark.sweep),
    ],
)
def test_three_of_the_largest_tensor_and_500_mb(size, shape, tmp_path):
    """What torch alone takes and the whole of the smaller model would be more."""
    largest = benchmark.make_model(tmp_path / "hf", size, **shape)
    limit = 3 * largest + benchmark.ALLOWED
    peaks = {step.name: step.peak for step in benchmark.conversions(tmp_path)}
    assert len(peaks) == 4
    assert {name: peak for name, peak in peaks.items() if peak > limit} == {}
    assert min(peaks.values()) + size > limit + 1e8, "the limit does not show a whole model"
