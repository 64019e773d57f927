"""tools/benchmarks/effective_time.py: one kill in each period."""

from __future__ import annotations

import itertools
from pathlib import Path

from tests.load_tool import load_tool

TOOL = "benchmarks/effective_time"


def test_local_copies_are_saved_where_snapshots_would_be():
    tool = load_tool(TOOL)
    args = tool.parse(["--every", "300"])
    assert args.saves == ("local", "snapshots", "checkpoints")
    flags = {saves: tool.flags_of(saves, args, Path("/dev/shm/x")) for saves in args.saves}
    assert flags["local"][2:4] == flags["snapshots"][2:4] == ("--snapshot-interval", "8")
    assert flags["local"][-2:] == ("--non-persistent-local-ckpt-dir", "/dev/shm/x")
    assert "--replication" in flags["local"] and len(flags["checkpoints"]) == 2


def test_a_seed_draws_one_kill_in_each_period():
    tool = load_tool(TOOL)
    kills = list(itertools.islice(tool.kill_times(3, 60.0), 100))
    assert kills == list(itertools.islice(tool.kill_times(3, 60.0), 100))
    assert [int(second // 60.0) for second, _ in kills] == list(range(100))
    assert {rank for _, rank in kills} == set(range(tool.RANKS))
