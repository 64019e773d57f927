"""tools/benchmarks/corruption.py: errors of single bits are found, and a report is read."""

from __future__ import annotations

import pytest

from tests.load_tool import load_tool

TOOL = "benchmarks/corruption"


@pytest.mark.campaign
def test_a_few_errors(capsys):
    assert load_tool(TOOL).main(["--flips", "12", "--clean", "10", "--seed", "3"]) == 0
    printed = capsys.readouterr().out
    assert "12 single-bit errors" in printed
    assert "false alarms in 10 verified iterations: 0" in printed


def test_reports_by_iteration():
    tool = load_tool(TOOL)
    line = "WARNING: iteration {}: two {} of the same gradients differ; {} differs"
    text = "\n".join(
        [line.format(7, "computations", "rank 2 (process 5 on a)"), "other"]
        + [line.format(9, "sums", "rank 0 (")]
    )
    assert tool.reported(text) == {7: [2], 9: [0]}


@pytest.mark.parametrize(
    ("place", "layout", "rank", "named", "outcome"),
    [
        ("sum", "tp 2 dp 3", 1, None, "no effect"),
        ("sum", "tp 2 dp 3", 1, [1], "found"),
        ("sum", "tp 2 dp 3", 1, [0, 1], "wrong rank"),
        ("message", "tp 2 dp 3", 1, [0, 1], "found"),
        ("message", "tp 2 dp 3", 1, [1, 2], "wrong rank"),
        ("message", "pp 2 dp 3", 4, [1, 4], "found"),
        ("output", "pp 2 dp 3", 4, [5], "wrong rank"),
        ("output", "dp 3", 2, [2], "found"),
        ("output", "dp 3", 2, [1], "wrong rank"),
    ],
)
def test_whether_the_right_rank_was_named(place, layout, rank, named, outcome):
    error = {"place": place, "rank": rank}
    assert load_tool(TOOL).outcome(error, named, layout) == outcome


def test_the_same_seed_draws_the_same_errors():
    tool = load_tool(TOOL)
    errors = tool.drawn(1, 100)
    assert errors == tool.drawn(1, 100) != tool.drawn(2, 100)
    assert {one["place"] for one in errors} == set(tool.PLACES) - {"message"}
    assert {one["place"] for one in tool.drawn(1, 100, "tp 2 dp 3")} == set(tool.PLACES)
    assert {one["pass"] for one in errors} == {1, 2}
