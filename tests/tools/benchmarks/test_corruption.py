"""tools/benchmarks/corruption.py: errors of single bits are found, and a report is read."""

from __future__ import annotations

import pytest

from tests.load_tool import load_tool

TOOL = "benchmarks/corruption"


@pytest.mark.campaign
def test_a_few_errors(capsys):
    assert load_tool(TOOL).main(["--flips", "12", "--clean", "6", "--seed", "3"]) == 0
    printed = capsys.readouterr().out
    assert "12 single-bit errors" in printed and ": 0 (" in printed


def test_reports_by_iteration():
    tool = load_tool(TOOL)
    line = "WARNING: iteration {}: two computations of the same gradients differ; {} differs"
    text = "\n".join(
        [line.format(7, "rank 2 (process 5 on a)"), "other", line.format(9, "rank 0 (")]
    )
    assert tool.reported(text) == {7: [2], 9: [0]}


def test_the_same_seed_draws_the_same_errors():
    tool = load_tool(TOOL)
    errors = tool.drawn(1, 100)
    assert errors == tool.drawn(1, 100) != tool.drawn(2, 100)
    assert {one["place"] for one in errors} == set(tool.PLACES)
    assert {one["pass"] for one in errors} == {1, 2}
