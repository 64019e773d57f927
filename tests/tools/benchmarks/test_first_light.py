"""tools/benchmarks/first_light.sh: all of it in small on a CPU; what fails, hangs or dies is a result
and stops nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.forkrun import ROOT
from tests.load_tool import load_tool

FOLDER = ROOT / "tools" / "benchmarks"


@pytest.fixture
def first_light(monkeypatch):
    """Its runner as a module."""
    for folder in (FOLDER / "step", FOLDER / "first_light"):
        monkeypatch.syspath_prepend(str(folder))
    return load_tool("benchmarks/first_light/run")


@pytest.mark.sweep
def test_every_step_runs_on_a_cpu(tmp_path):
    done = subprocess.run(
        ["bash", FOLDER / "first_light.sh", "cpu"],
        env={**os.environ, "PYTHON": sys.executable, "OUT": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=480,
    )
    log = (tmp_path / "log.txt").read_text()
    assert done.returncode == 0, done.stdout + log
    steps = json.loads((tmp_path / "results.json").read_text())["steps"]
    assert list(steps) == ["probe", "kernels", "program", "bench", "resume", "compiled"]
    assert {(one["state"], *one["problems"]) for one in steps.values()} == {("ok",)}
    found = {name: one["results"] for name, one in steps.items()}
    for width in ("attention d 64", "attention d 128"):
        assert found["probe"][width]["default"]["both"] > 0
    assert found["probe"]["copy TB/s"] > 0 and found["probe"]["FP8 TFLOP/s"]["precise"] > 0
    assert found["kernels"]["passed"] > 25 and found["compiled"]["passed"] == 3
    for family in ("gpt", "llama"):
        assert found["program"][family] == {"iterations": 4, "largest difference": 0.0}
    assert found["resume"] == {"iterations": 4, "different": []}
    rows = found["bench"]["rows"]
    assert len(rows) == 6 and "== bench1" in log and "== bench2" not in log
    assert all(row["tokens/s"] > 0 and row["TFLOP/s"] > 0 and row["kernels"] for row in rows)
    summary = (tmp_path / "summary.txt").read_text()
    assert summary in done.stdout and summary.count(": ok, ") == 6 and len(summary) < 4000
    for row in rows:
        assert f"{row['ms']:.1f}" in summary
    files = list(tmp_path.iterdir())
    assert len(files) <= 5 and sum(file.stat().st_size for file in files) < 2 << 20


def test_a_step_that_fails_or_hangs_is_shown_and_the_next_one_runs(
    first_light, monkeypatch, tmp_path, capsys
):
    def fails(session):
        done = session.run(bad=["-c", "print('why'); raise SystemExit(3)"])
        raise first_light.Failed(first_light.steps.problems_of(done), {"a": 1})

    def hangs(session):
        words = "import subprocess, time; subprocess.Popen(['sleep', '99']); time.sleep(99)"
        done = session.run(slow=["-c", words])
        return {"code": done["slow"].code}

    def breaks(session):
        raise KeyError("x")

    steps = (("probe", 9, fails), ("other", -8.5, hangs), ("third", 9, breaks))
    last = ("fourth", 9, lambda session: {"code": session.run(good=["-c", ""])["good"].code})
    monkeypatch.setattr(first_light, "STEPS", (*steps, last))
    assert first_light.main(["cpu", str(tmp_path)]) == 1
    found = json.loads((tmp_path / "results.json").read_text())["steps"]
    assert [one["state"] for one in found.values()] == ["failed", "ok", "failed", "ok"]
    assert found["probe"]["problems"] == ["bad: exit code 3: why"]
    assert found["probe"]["results"] == {"a": 1} and found["fourth"]["results"] == {"code": 0}
    assert found["other"]["results"] == {"code": None} and found["other"]["seconds"] < 60
    assert "FAILED bad: exit code 3: why" in capsys.readouterr().out
    assert first_light.main(["tpu", str(tmp_path)]) == 2


def row(cell: str, loss: float = 4.0) -> dict:
    """A contestant's line."""
    return {"cell": cell, "ms": 1.0, "losses": [loss]}


def test_a_contestant_that_ends_its_process_is_a_row_and_the_others_follow(first_light, tmp_path):
    """Of six the second kills the process, the third learns another model and leaves memory behind,
    and in the last one the time is over."""
    steps = first_light.steps
    cells = [f"{who}@{size}" for who in steps.CONTESTANTS for size in steps.SIZES["cpu"]]
    answers = iter(
        [([row(cells[0])], -9), ([row(cells[2], 5.0)], steps.NEXT_PROCESS)]
        + [([row(cells[3]), row(cells[4])], None)]
    )
    asked, rows = [], []

    def run(**commands):
        ((name, words),) = commands.items()
        asked.append(words[4:])
        new, code = next(answers)
        rows.extend(new)
        (tmp_path / "cells.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
        return {name: SimpleNamespace(code=code, ending=f"exit code {code}")}

    session = SimpleNamespace(device="cpu", small=True, folder=tmp_path, run=run)
    with pytest.raises(first_light.Failed) as failed:
        steps.bench(session)
    assert asked == [cells, cells[2:], cells[3:]]
    found = failed.value.facts["rows"]
    assert [one["cell"] for one in found] == cells and len(failed.value.problems) == 3
    assert ["error" in one for one in found] == [False, True, True, False, False, True]
