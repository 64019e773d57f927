"""tools/benchmarks/bench.py: every registered benchmark in its smallest size, and what its words
mean."""

from __future__ import annotations

import json

import pytest

from tests.forkrun import ROOT, run_ranks
from tests.load_tool import load_tool

QUICK = ("step", "moe", "masks", "cpu_kernels", "checkpoint", "read_samples")
# these start processes that import torch
HEAVY = ("layouts", "tokenize", "open_data", "convert", "startup", "generate", "serve")


@pytest.fixture
def bench(monkeypatch):
    """The program as a module."""
    for folder in ("tools/benchmarks/step", "tools/benchmarks"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    return load_tool("benchmarks/bench")


def run_here(rank, world, words, file, here):
    """The figures of a run of the program in this process."""
    code = load_tool("benchmarks/bench").main([*words, "--json", file], here=here)
    assert code == 0
    with open(file, encoding="utf-8") as figures:
        return json.load(figures)["results"]


def figures(tmp_path, *words, here=True):
    """The cases of a run, whose figures are all positive."""
    results = run_ranks(1, run_here, words, str(tmp_path / "figures.json"), here)[0]
    for case in results:
        for side in case["sides"].values():
            assert min(side["seconds"]) > 0 and side["rate"] > 0
            assert {key for key, value in side.items() if value in (0, 0.0)} <= {"peak GB"}
        assert all(ratio["median"] > 0 for ratio in case["ratios"].values())
    return results


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.campaign) for name in HEAVY)]
)
def test_every_benchmark_runs_in_its_smallest_size(name, tmp_path):
    if name == "serve":
        pytest.importorskip("fastapi")
    words = [name, "--small", "--rounds", "1", "--peer", "bare"]
    results = figures(tmp_path, *words, here=name != "layouts")
    assert {case["benchmark"] for case in results} == {name}


@pytest.mark.peers
@pytest.mark.campaign
@pytest.mark.parametrize(("name", "peer"), [("step", "transformers"), ("moe", "transformers")])
def test_a_peer_trains_the_same_model(name, peer, tmp_path):
    pytest.importorskip(peer)
    dtypes = ["dtype=fp32", "dtype=bf16"]
    results = figures(tmp_path, name, *dtypes, "--small", "--rounds", "1", "--peer", peer)
    assert [list(case["ratios"]) for case in results] == [[peer]] * 2


def test_the_registry_is_what_is_tested_here(bench):
    assert sorted(bench.REGISTRY) == sorted([*QUICK, *HEAVY])


@pytest.mark.parametrize(
    "words", [["stop"], ["size=nano"], ["step", "width=2"], ["step", "size=x"]]
)
def test_a_wrong_word_is_named(bench, words, capsys):
    assert bench.main([*words, "--rounds", "1"]) == 2
    assert words[-1].partition("=")[0] in capsys.readouterr().err


def test_sides_that_do_not_agree_are_not_timed(bench):
    """Numbers within the tolerance, texts equal, another number of numbers never."""
    harness = bench.run_case.__globals__
    harness["agree"]("other", [2.0, 1.0], [2.0 + 1e-6, 1.0], 1e-5)
    for value, expected in (
        ([2.0], [2.1]),
        ("a", "b"),
        ([1.0], [1.0, 2.0]),
        ([float("nan")], [1.0]),
    ):
        with pytest.raises(bench.Disagreement):
            harness["agree"]("other", value, expected, 1e-3)
