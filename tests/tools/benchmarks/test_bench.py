"""tools/benchmarks/bench.py: every registered benchmark in its smallest size, and what its words
mean."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

from tests.forkrun import ROOT, run_ranks
from tests.load_tool import load_tool

QUICK = ("step",)
# these start processes that import torch
HEAVY = ("layouts", "tokenize", "startup", "generate", "parts")


@pytest.fixture
def bench(monkeypatch):
    """The program as a module."""
    for folder in ("tools/benchmarks/step", "tools/benchmarks"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    return load_tool("benchmarks/bench")


def run_here(rank, world, words, file, in_process):
    """The figures of a run of the program in this process."""
    code = load_tool("benchmarks/bench").main([*words, "--json", file], in_process=in_process)
    assert code == 0
    with open(file, encoding="utf-8") as figures:
        return json.load(figures)["results"]


def figures(tmp_path, *words, in_process=True):
    """The cases of a run, whose figures are all positive."""
    file = str(tmp_path / "figures.json")
    results = run_ranks(1, run_here, words, file, in_process, seconds=400)[0]
    for case in results:
        for side in case["sides"].values():
            assert min(side["seconds"]) > 0 and side["rate"] > 0
            assert {key for key, value in side.items() if value in (0, 0.0)} <= {"peak GB"}
        assert all(ratio["median"] > 0 for ratio in case["ratios"].values())
    return results


@pytest.mark.parametrize(
    "name",
    [
        *QUICK,
        *(pytest.param(name, marks=pytest.mark.sweep) for name in HEAVY),
    ],
)
def test_every_benchmark_runs_in_its_smallest_size(name, tmp_path):
    words = [name, "--small", "--rounds", "1", "--peer", "bare"]
    if name == "parts":
        words += ["what=open", "what=read", "what=merge", "what=plan"]
    results = figures(tmp_path, *words, in_process=name != "layouts")
    assert {case["benchmark"] for case in results} == {name}


@pytest.mark.peers
@pytest.mark.campaign
def test_a_peer_trains_the_same_model(tmp_path):
    pytest.importorskip("transformers")
    words = ["step", "dtype=fp32", "dtype=bf16", "--small", "--rounds", "1"]
    results = figures(tmp_path, *words, "--peer", "transformers")
    assert [list(case["ratios"]) for case in results] == [["transformers"]] * 2


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
    ],
)
def test_a_wrong_word_is_named(bench, words, capsys):
    assert bench.main([*words, "--rounds", "1"]) == 2
    assert words[-1].partition("=")[0] in capsys.readouterr().err


class Fixed:
    """A subject whose turns take the seconds given; `turns` notes whose turn it was."""

    turns: list[str] = []

    def __init__(self, name, agrees, seconds):
        self.name = name
        self.agrees = agrees
        self.seconds = iter(seconds)

    def warm_up(self):
        return self.agrees

    def turn(self):
        self.turns.append(self.name)
        return next(self.seconds)

    def facts(self):
        return {"cpu s": 1.5}


@pytest.fixture
def fixed(bench, monkeypatch):
    """Run a case with these sides: name -> (what it agrees on, seconds of each turn)."""
    monkeypatch.setitem(sys.modules, "fixed", SimpleNamespace(Fixed=Fixed))
    monkeypatch.setattr(Fixed, "turns", [])
    harness = sys.modules["harness"]

    def run(rounds=3, tolerance=1e-5, together=True, **sides):
        made = [
            harness.Side(name, "fixed:Fixed", {"name": name, "agrees": agrees, "seconds": seconds})
            for name, (agrees, seconds) in sides.items()
        ]
        case = harness.Case("x", made, 6.0, "MB", tolerance, together)
        return bench.run_case(case, rounds, in_process=True)

    return run


def test_a_ratio_is_the_median_over_rounds_and_the_order_moves_on(fixed):
    found = fixed(a=(None, [1.0, 2.0, 8.0]), b=(None, [3.0, 4.0, 8.0]))
    assert found["ratios"] == {"b": {"median": 2.0, "range": [1.0, 3.0]}}
    assert found["sides"]["a"]["rate"] == 3.0 and found["sides"]["b"]["cpu s"] == 1.5
    assert Fixed.turns == ["a", "b", "b", "a", "a", "b"]
    Fixed.turns.clear()
    fixed(together=False, a=(None, [1.0] * 3), b=(None, [1.0] * 3))
    assert Fixed.turns == ["a"] * 3 + ["b"] * 3


@pytest.mark.parametrize(
    ("ours", "other"),
    [([2.0], [2.1]), ("a", "b"), ([1.0, 2.0], [1.0]), ([1.0], [float("nan")])],
)
def test_sides_that_do_not_agree_are_not_timed(bench, fixed, ours, other):
    """Numbers must be within the tolerance, texts equal."""
    with pytest.raises(bench.Disagreement):
        fixed(a=(ours, [1.0] * 3), b=(other, [1.0] * 3))
    assert not Fixed.turns
    near = [value * (1 + 1e-7) for value in ours] if isinstance(ours, list) else ours
    assert fixed(a=(ours, [1.0] * 3), b=(near, [1.0] * 3))["ratios"]
