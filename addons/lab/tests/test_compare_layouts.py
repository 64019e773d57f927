"""tools/compare_layouts.py: what it says of the same model, of another one, and of a failed run."""

from __future__ import annotations

import re
import sys

import pytest

from tests.load_tool import exit_code, load_tool


@pytest.fixture
def compare(capfd, monkeypatch, warm_python):
    """Call the tool with flags of a layout; returns (exit code, stdout, stderr)."""
    monkeypatch.setattr(sys, "executable", warm_python)
    main = load_tool("compare_layouts").main

    def call(*words: object) -> tuple[int, str, str]:
        code = exit_code(main, *words)
        return code, *capfd.readouterr()

    return call


@pytest.mark.campaign
def test_make_parity_is_the_same_model_in_eight_layouts(compare):
    code, out, err = compare()
    assert code == 0 and not err and "DIFFERENT" not in out
    rows = [line.split() for line in out.splitlines() if re.search(r"e-\d+ +\d+\.\d$", line)]
    assert len(rows) == 8
    assert max(float(number) for row in rows for number in row[-4:-1]) < 1e-12


@pytest.mark.campaign
def test_another_model_is_named_and_exits_with_1(compare):
    code, out, err = compare("--nproc-per-node", 1, "--", "--moe-z-loss-coeff", 0.01)
    assert code == 1 and "DIFFERENT" in out and "FLAGS" in err and "[layouts-differ]" in err


def test_a_number_of_processes_needs_a_layout(compare):
    code, _, err = compare("--nproc-per-node", 4)
    assert code == 2 and "[flag-needs-other-flag]" in err


@pytest.mark.campaign
def test_a_layout_that_does_not_train_shows_why(compare):
    code, _, err = compare("--nproc-per-node", 1, "--", "--no-such-flag", 1)
    assert code == 1 and "[flag-unknown]" in err
