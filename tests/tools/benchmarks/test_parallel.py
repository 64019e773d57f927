"""tools/benchmarks/parallel.py and overhead.py on models of two layers: their tables, and what they
refuse to compare."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path

import pytest

from tests.tools.benchmarks.other_checkouts import make_checkout

FOLDER = Path(__file__).resolve().parents[3] / "tools" / "benchmarks"
TINY = "tiny:layers=2,hidden=32,heads=2,seq=16,micro_batch=1,micro_batches=2,vocab=64"
NAMES = tuple(path.stem for path in FOLDER.rglob("*.py"))
TP = "--tensor-model-parallel-size"


@pytest.fixture
def tool(monkeypatch):
    """A function that imports a benchmark anew."""
    monkeypatch.syspath_prepend(str(FOLDER / "step"))
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "1")

    def load(name: str):
        for other in NAMES:
            sys.modules.pop(other, None)
        return importlib.import_module(name)

    yield load
    for name in NAMES:
        sys.modules.pop(name, None)


@pytest.mark.campaign
def test_layouts_take_turns(tool, tmp_path, capsys):
    """Three layouts and one that the product refuses: a row each, equal losses, ratios of the same
    rounds."""
    parallel = tool("parallel")
    file = tmp_path / "figures.json"
    layouts = [
        "--layout",
        f"tp2=2 {TP} 2",
        "--layout",
        "dp2=2",
        "--layout",
        "pp2=2 --pipeline-model-parallel-size 2",
        "--layout",
        f"tp3=3 {TP} 3",
    ]
    assert (
        parallel.main(
            ["--size", TINY, "--rounds", "2", "--warmup", "1", *layouts, "--json", str(file)]
        )
        == 0
    )
    out = capsys.readouterr().out
    found = json.loads(file.read_text())
    names = ["one rank", "two apart", "tp2", "dp2", "pp2"]
    assert list(found["seconds"]) == names and all(
        len(values) == 2 for values in found["seconds"].values()
    )
    for name in names:
        assert found["losses"][name] == pytest.approx(found["losses"]["one rank"], rel=1e-5)
        ratios = sorted(
            a / b for a, b in zip(found["seconds"]["one rank"], found["seconds"][name], strict=True)
        )
        assert found["speed_up"][name] == pytest.approx(sum(ratios) / 2)
        row = next(line for line in out.splitlines() if line.startswith(f"  {name} "))
        assert (
            f"{sum(ratios) / 2:.2f}  " in row
            and f"{ratios[0]:.2f}" in row
            and f"{ratios[1]:.2f}" in row
        )
    assert (
        found["parameters"]["tp2"] < found["parameters"]["one rank"] == found["parameters"]["dp2"]
    )
    assert re.search(
        r"^tp3 is refused: --tensor-model-parallel-size 3: --num-attention-heads 2 is not",
        out,
        re.MULTILINE,
    )
    assert "goal" in out and re.search(r"^  dp2 .* 1\.80 (reached|missed)$", out, re.MULTILINE)


@pytest.mark.sweep
def test_another_checkout_takes_part(tool, tmp_path, capsys):
    """A row for each layout in either checkout; its speed-up is against its own rank, the ratio
    within the round."""
    parallel = tool("parallel")
    file = tmp_path / "figures.json"
    tree = make_checkout(tmp_path / "before")
    words = [
        "--size",
        TINY,
        "--rounds",
        "1",
        "--warmup",
        "1",
        "--layout",
        "dp2=2",
        "--compare-with",
        str(tree),
    ]
    assert parallel.main([*words, "--json", str(file)]) == 0
    seconds = json.loads(file.read_text())["seconds"]
    names = ["one rank", "two apart", "dp2"]
    assert list(seconds) == [*names, *(f"{name}, ours in before" for name in names)]
    lines = capsys.readouterr().out.splitlines()
    mine, theirs = (
        [line for line in lines if line.startswith(f"  {name}  ")]
        for name in ("dp2", "dp2, ours in before")
    )
    assert f"{seconds['dp2, ours in before'][0] / seconds['dp2'][0]:.2f}" in mine[0]
    assert (
        f"{seconds['one rank, ours in before'][0] / seconds['dp2, ours in before'][0]:.2f}"
        in theirs[0]
    )


@pytest.mark.sweep
def test_a_checkout_that_trains_another_model_does_not_race(tool, tmp_path, capsys):
    tree = make_checkout(
        tmp_path / "before",
        "step/sizes.py",
        "LEARNING_RATE = 3e-4",
        "LEARNING_RATE = 6e-4",
    )
    words = [
        "--size",
        TINY,
        "--rounds",
        "1",
        "--warmup",
        "2",
        "--layout",
        "dp2=2",
        "--compare-with",
        str(tree),
    ]
    assert tool("parallel").main(words) == 1
    assert "one rank, ours in before: the loss of step 2 is" in capsys.readouterr().err


@pytest.mark.peers
@pytest.mark.sweep
def test_megatron_core_takes_part(tool, tmp_path, capsys):
    """Of the same shape, against its own one rank."""
    pytest.importorskip("megatron.core")
    parallel = tool("parallel")
    file = tmp_path / "figures.json"
    size = TINY + ",ffn=48,family=llama"
    words = [
        "--size",
        size,
        "--rounds",
        "1",
        "--warmup",
        "1",
        "--layout",
        f"tp2=2 {TP} 2",
        "--peer",
        "--json",
        str(file),
    ]
    assert parallel.main(words) == 0
    found = json.loads(file.read_text())
    for peer, ours in (("megatron-core", "one rank"), ("megatron-core tp2", "tp2")):
        assert found["parameters"][peer] == found["parameters"][ours]
        # other weights and samples
        assert found["losses"][peer][0] == pytest.approx(found["losses"][ours][0], rel=0.05)
    seconds = found["seconds"]
    assert (
        found["speed_up"]["megatron-core tp2"]
        == seconds["megatron-core"][0] / seconds["megatron-core tp2"][0]
    )
    assert parallel.main(["--size", TINY, "--peer"]) == 2
    assert (
        "--peer: megatron-core takes part with family=llama and fp32 only"
        in capsys.readouterr().err
    )


@pytest.mark.sweep
def test_layouts_that_train_another_model_do_not_race(tool, capsys):
    parallel = tool("parallel")
    words = ["--size", TINY, "--rounds", "1", "--warmup", "2", "--layout", "other=1 --seed 7"]
    assert parallel.main(words) == 1
    out, err = capsys.readouterr()
    assert re.match(
        r"error: other: the loss of step 1 is [\d.]+, that of one rank [\d.]+: they do not", err
    )
    assert "speed-up" not in out


@pytest.mark.sweep
def test_a_rank_that_fails_ends_the_race(tool, capsys):
    parallel = tool("parallel")
    assert (
        parallel.main(
            ["--size", TINY, "--layout", "worse=2 --distributed-timeout-minutes 99999999999999"]
        )
        == 1
    )
    assert "worse: rank" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--layout", "tp2"], "'tp2' is not NAME=RANKS FLAGS..."),
        (["--layout", "a=0"], "'a=0' is not NAME=RANKS"),
        (["--rounds", "0"], "'0' is not a number of steps"),
        (["--compare-with", "/"], "/: not a checkout of this repository"),
        (["--size", "x"], "'x' is none of"),
    ],
)
def test_what_cannot_be_raced_is_one_message(tool, capsys, words, says):
    with pytest.raises(SystemExit) as leave:
        tool("parallel").main(words)
    assert leave.value.code == 2 and says in capsys.readouterr().err


def test_microseconds_of_the_parallel_code(tool, tmp_path, capsys):
    """Both steps have the same loss; the share is the sum over the pieces."""
    overhead = tool("overhead")
    file = tmp_path / "figures.json"
    code = overhead.main(["--size", TINY, "--no-callgrind", "--repeats", "3", "--json", str(file)])
    found = json.loads(file.read_text())
    out = capsys.readouterr().out
    assert (
        code == int(found["share"] > 0.02) and "microseconds:" in out and "instructions" not in out
    )
    assert found["share"] == pytest.approx(
        sum(row["us_per_step"] for row in found["pieces"]) / found["step_us"]
    )
    assert (
        found["calls"]["with"] > found["calls"]["without"] > 1000
        and f"{found['calls']['with']} a step with" in out
    )
    calls = {row["piece"]: row["calls"] for row in found["pieces"]}
    assert (
        calls["column-parallel linear"] == 2 * (2 * 2 + 1)
        and calls["row-parallel linear"] == 2 * 2 * 2
    )
    for row in found["pieces"]:
        assert row["us_per_step"] == pytest.approx((row["us"] - row["direct_us"]) * row["calls"])


def test_a_step_that_is_not_the_same_is_not_compared(tool, monkeypatch, capsys):
    overhead = tool("overhead")
    monkeypatch.setattr(overhead.Step, "without", lambda self: 1.0)
    assert overhead.main(["--size", TINY, "--no-callgrind"]) == 1
    assert "not the same step" in capsys.readouterr().err


@pytest.mark.campaign
def test_instructions_are_read_from_three_dumps(tool, monkeypatch, capsys):
    """callgrind's files stand in for a run of minutes: a total for the steps with, one for the
    steps without, one for what watches 100 iterations."""
    overhead = tool("overhead")

    monkeypatch.setattr(overhead, "HEADER", __file__)  # any file that is there

    def valgrind(words, **options):
        if words[0] == "cc":
            return None
        out = next(
            word.partition("=")[2] for word in words if word.startswith("--callgrind-out-file=")
        )
        for number, total in ((1, 3090), (2, 3000), (3, 200)):
            Path(f"{out}.{number}").write_text(f"events: Ir\nfn=x\n1 5\ntotals: {total}\n")
        return overhead.subprocess.CompletedProcess(words, 0, "", "")

    monkeypatch.setattr(overhead.shutil, "which", lambda name: "/usr/bin/valgrind")
    monkeypatch.setattr(overhead.subprocess, "run", valgrind)
    assert overhead.main(["--size", TINY, "--steps", "3", "--repeats", "2"]) == 1
    printed = capsys.readouterr().out
    assert "instructions: 1,030 a step with the parallel code, 1,000 without: +3.00 %" in printed
    assert "2 instructions an iteration, 0.194 % of the step" in printed
    monkeypatch.setattr(overhead.shutil, "which", lambda name: None)
    overhead.main(["--size", TINY, "--repeats", "2"])
    assert "instructions are not counted" in capsys.readouterr().out
