"""tools/benchmarks/monitor_attacks.py: a run whose monitor is attacked trains the same losses."""

from __future__ import annotations

import pytest

from tests.load_tool import load_tool

TOOL = "benchmarks/monitor_attacks"


@pytest.mark.sweep
def test_attacks_change_no_loss_and_add_at_most_a_line_each(capsys):
    assert load_tool(TOOL).main(["--iterations", "20", "--rounds", "1"]) == 0
    printed = capsys.readouterr().out
    assert "losses of 20 iterations: equal" in printed
    assert printed.count("lines in the log") >= 20


@pytest.mark.parametrize(
    "losses, lines, accepted", [([1.0, 2.5], {}, 0), ([1.0, 2.0], {"x": 2}, 0), ([1.0, 2.0], {}, 1)]
)
def test_a_run_that_is_changed_is_noticed(monkeypatch, losses, lines, accepted):
    tool = load_tool(TOOL)
    results = {False: tool.Result([1.0, 2.0], 1.0, {}, 0)}
    results[True] = tool.Result(losses, 1.0, {"garbage": 1, **lines}, accepted)
    monkeypatch.setattr(tool, "train", lambda iterations, attacked: results[attacked])
    assert tool.main(["--rounds", "1"]) == 1
