"""Log formats of other programs and a model of a script's own."""

from __future__ import annotations

import re

import pytest

from tests.core.training.own_models import run


@pytest.mark.parametrize("name, form", [("nano", "aurora"), ("changed", "internlm")])
def test_formulas_of_other_programs_count_nothing(tmp_path, name, form):
    run(tmp_path / "own", name, "--log-format", form, "--train-iters", "1")
    log = (tmp_path / "own" / "log.0").read_text()
    assert set(re.findall(r"tflops=([\d.]+)", log.lower())) == {
        "0.0" if form == "internlm" else "0.00"
    }
