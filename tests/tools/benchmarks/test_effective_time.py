"""tools/benchmarks/effective_time.py: one kill in each period."""

from __future__ import annotations

import itertools

from tests.load_tool import load_tool

TOOL = "benchmarks/effective_time"


def test_a_seed_draws_one_kill_in_each_period():
    tool = load_tool(TOOL)
    kills = list(itertools.islice(tool.kill_times(3, 60.0), 100))
    assert kills == list(itertools.islice(tool.kill_times(3, 60.0), 100))
    assert [int(second // 60.0) for second, _ in kills] == list(range(100))
    assert {rank for _, rank in kills} == set(range(tool.RANKS))
