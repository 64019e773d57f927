"""bench/bench.py: every registered benchmark in its smallest size, and what its words
mean."""

from __future__ import annotations

import json
import os
import sys

import pytest

from tests.forkrun import ROOT
from tests.load_tool import load_tool

QUICK = ("step",)
# these start processes that import torch
HEAVY = (
    *("layouts", "tokenize", "startup", "generate", "absorbed", "speculative"),
    *("parts", "windows"),
)


@pytest.fixture
def bench(monkeypatch):
    """The program as a module."""
    for folder in ("bench/step", "bench"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    return load_tool("bench/bench")


def figures(bench, tmp_path, *words):
    """The cases of a run, whose figures are all positive."""
    file = tmp_path / "figures.json"
    assert bench.main([*words, "--json", str(file)]) == 0
    results = json.loads(file.read_text())["results"]
    for case in results:
        for side in case["sides"].values():
            assert min(side["seconds"]) > 0 and side["rate"] > 0
            assert 0 not in side.values()
        assert all(ratio["median"] > 0 for ratio in case["ratios"].values())
    return results


@pytest.mark.campaign
@pytest.mark.parametrize(
    "name",
    [
        *QUICK,
        *(pytest.param(name, marks=pytest.mark.sweep) for name in HEAVY),
    ],
)
def test_every_benchmark_runs_in_its_smallest_size(bench, name, tmp_path):
    words = [name, "--small", "--rounds", "1", "--peer", "bare"]
    if name == "parts":
        words += ["what=open", "what=read", "what=merge", "what=plan"]
    results = figures(bench, tmp_path, *words)
    assert {case["benchmark"] for case in results} == {name}


@pytest.mark.peers
@pytest.mark.campaign
def test_a_peer_trains_the_same_model(bench, tmp_path):
    pytest.importorskip("transformers")
    words = ["step", "dtype=fp32", "dtype=bf16", "--small", "--rounds", "1"]
    results = figures(bench, tmp_path, *words, "--peer", "transformers")
    assert [list(case["ratios"]) for case in results] == [["transformers"]] * 2


@pytest.mark.peers
@pytest.mark.sweep
def test_a_peer_with_latent_attention_trains_the_same_model(bench, tmp_path):
    pytest.importorskip("transformers")
    size = "tiny:layers=1,hidden=32,heads=2,seq=16,micro_batch=2,vocab=64,family=deepseek"
    words = ["step", f"size={size}", "dtype=fp32", "threads=1", "--rounds", "1"]
    (case,) = figures(bench, tmp_path, *words, "--peer", "transformers")
    assert list(case["ratios"]) == ["transformers"]


def test_the_registry_is_what_is_tested_here(bench):
    assert sorted(bench.REGISTRY) == sorted([*QUICK, *HEAVY])


def test_the_list_fits_100_columns(bench, capsys):
    assert bench.main([]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100


@pytest.mark.parametrize(
    "words",
    [
        ["stop"],
        ["size=nano"],
        ["step", "width=2"],
        ["step", "size=x"],
        ["startup", "what=x"],
        ["parts", "what=x"],
        ["windows", "kernel=x"],
    ],
)
def test_a_wrong_word_is_named(bench, words, capsys):
    assert bench.main([*words, "--rounds", "1"]) == 2
    assert words[-1].partition("=")[0] in capsys.readouterr().err


FIXED = """
from subject import Subject

class Fixed(Subject):
    def __init__(self, name, agrees, seconds, turns):
        self.name, self.agrees, self.seconds, self.turns = name, agrees, iter(seconds), turns

    def warm_up(self):
        return self.agrees

    def turn(self):
        with open(self.turns, "a") as turns:
            turns.write(self.name)
        return next(self.seconds)

    def facts(self):
        return {"cpu s": 1.5, "peak GB": 1.0}
"""


@pytest.fixture
def fixed(bench, monkeypatch, tmp_path):
    """Run a case with these sides, name -> (what it agrees on, seconds of each turn); the figures,
    and the names in the order of their turns."""
    harness = sys.modules["harness"]
    (tmp_path / "fixed.py").write_text(FIXED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    turns = tmp_path / "turns"

    def run(rounds=3, tolerance=1e-5, together=True, **sides):
        turns.write_text("")
        made = []
        for name, (agrees, seconds) in sides.items():
            arguments = {"name": name, "agrees": agrees, "seconds": seconds, "turns": str(turns)}
            made.append(harness.Side(name, "fixed:Fixed", arguments))
        case = harness.Case("x", made, 6.0, "MB", tolerance, together)
        return harness.run_case(case, rounds), turns.read_text()

    return run


def test_a_ratio_is_the_median_over_rounds_and_the_order_moves_on(fixed):
    found, turns = fixed(a=(None, [1.0, 2.0, 8.0]), b=(None, [3.0, 4.0, 8.0]))
    assert found["ratios"] == {"b": {"median": 2.0, "range": [1.0, 3.0]}}
    assert found["sides"]["a"]["rate"] == 3.0 and found["sides"]["b"]["cpu s"] == 1.5
    assert turns == "abbaab"
    found, turns = fixed(together=False, a=(None, [1.0] * 3), b=(None, [1.0] * 3))
    assert turns == "aaabbb" and found["ratios"]["b"]["median"] == 1.0


@pytest.mark.parametrize(
    ("ours", "other"),
    [([2.0], [2.1]), ("a", "b"), ([1.0, 2.0], [1.0]), ([1.0], [float("nan")])],
)
def test_sides_that_do_not_agree_are_not_timed(bench, fixed, tmp_path, ours, other):
    """Numbers must be within the tolerance, texts equal."""
    with pytest.raises(bench.Failed):
        fixed(a=(ours, [1.0] * 3), b=(other, [1.0] * 3))
    assert not (tmp_path / "turns").read_text()
    near = [value * (1 + 1e-7) for value in ours] if isinstance(ours, list) else ours
    found, _ = fixed(a=(ours, [1.0] * 3), b=(near, [1.0] * 3))
    assert found["ratios"]


@pytest.mark.parametrize("seconds", [[], [1.0]])
def test_a_side_that_fails_is_named(bench, fixed, seconds):
    """In its first turn or a later one."""
    with pytest.raises(bench.Failed, match="(?s)^b: .*StopIteration"):
        fixed(a=(None, [1.0] * 3), b=(None, seconds))
