"""tools/benchmarks/kills.py: killed runs end as one that was not, and what is wrong is seen."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.forkrun import ROOT
from tests.load_tool import load_tool

TOOL = "benchmarks/kills"


@pytest.mark.sweep
def test_a_few_kills():
    """In a process of its own: it forks its ranks."""
    words = [ROOT / "tools/benchmarks/kills.py", "--kills", "12", "--per-run", "6", "--seed", "3"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of 2 runs as they must be, 12 kills" in done.stdout


def test_the_same_seed_draws_the_same_kills():
    tool = load_tool(TOOL)
    cases = [tool.drawn(seed, 20) for seed in range(200)]
    assert cases == [tool.drawn(seed, 20) for seed in range(200)]
    assert {case.launcher for case in cases} == set(tool.LAUNCHERS)
    assert {case.layout for case in cases} == set(tool.LAYOUTS)
    assert {case.checkpoints for case in cases} == set(tool.CHECKPOINTS)
    assert {one.phase for case in cases for one in case.kills} == set(tool.PHASES)
    assert all(one.rank < case.world for case in cases for one in case.kills)
    assert not any(case.world == 1 and "nodes" in case.launcher for case in cases)


def _case(tool):
    return tool.Case(1, "1 rank", "env", "plain", (tool.Kill(0, "data", 1),))


@pytest.mark.parametrize(
    ("codes", "problem"), [([0], ""), ([1], "without a kill"), (None, "did not end")]
)
def test_how_attempts_end(tmp_path, monkeypatch, codes, problem):
    tool = load_tool(TOOL)

    def attempt(case, folder):
        (folder / "log").touch()
        (folder / "err").touch()
        return codes

    monkeypatch.setattr(tool, "attempt", attempt)
    problems, kills = tool.run(_case(tool), tmp_path / "run")
    assert problem in "".join(problems) and bool(problems) == bool(problem) and kills == 0


def test_an_older_checkpoint_than_the_newest_is_seen(tmp_path, monkeypatch):
    """Iteration 6 was saved, and the next attempt loads 3."""
    tool = load_tool(TOOL)
    loaded = []

    def attempt(case, folder):
        (folder / "saved").mkdir(exist_ok=True)
        (folder / "log").touch()
        (folder / "err").write_text("a checkpoint: cannot load it" if loaded else "")
        (folder / f"killed.{len(loaded)}").touch()
        loaded.append(3)
        return [-9] if len(loaded) == 1 else [0]

    monkeypatch.setattr(tool, "attempt", attempt)
    monkeypatch.setattr(tool, "starts", lambda folder: list(loaded))
    monkeypatch.setattr(tool.store, "latest", lambda folder: 6)
    problems, kills = tool.run(_case(tool), tmp_path / "run")
    assert kills == 2 and len(problems) == 2
    assert "6 was saved, 3 was loaded" in problems[0] and "refused" in problems[1]
