"""bench/first_light.sh: all of it in small on a CPU; what fails, hangs or dies is a result
and stops nothing else."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import resource
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.forkrun import ROOT
from tests.load_tool import load_tool

FOLDER = ROOT / "bench"


@pytest.fixture
def first_light(monkeypatch):
    """Its runner as a module."""
    for folder in (FOLDER, FOLDER / "step", FOLDER / "first_light"):
        monkeypatch.syspath_prepend(str(folder))
    return load_tool("bench/first_light/run")


PROCESSOR_SECONDS = 480  # of two cores for four minutes; 105 to 341 on a busy host


@pytest.mark.sweep
def test_every_step_runs_on_a_cpu(first_light, tmp_path):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        ["bash", FOLDER / "first_light.sh", "cpu", "--seconds", "1800", "--out", tmp_path],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=1860,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    log = (tmp_path / "log.txt").read_text()
    assert done.returncode == 0, log + done.stdout
    text = (tmp_path / "results.json").read_text()
    report = json.loads(text)
    assert {"date", "commit", "card", "torch", "cudnn"} <= report.keys()
    assert not any(name in text for name in (str(Path.home()), str(ROOT), socket.gethostname()))
    steps = report["steps"]
    assert list(steps) == ["probe", "numbers", "cells"]
    assert {(one["state"], *one["problems"]) for one in steps.values()} == {("ok",)}
    probe, numbers, cells = (one["results"] for one in steps.values())
    for name in ("GEMM", "copy", "attention d 64 both", "attention d 128 both", "FP8 precise"):
        assert probe[name]["value"] > 0
    assert numbers["tests"]["passed"] > 25 and numbers["resume"]["different"] == []
    tables = first_light.steps
    assert numbers["runs"].keys() == tables.RUNS.keys()
    for row in numbers["runs"].values():
        assert row["loss"] is not None and row["norm"] is not None
    assert len(cells["rows"]) == len(tables.CELLS) and "== cells1" in log and "== cells2" not in log
    summary = (tmp_path / "summary.txt").read_text()
    for row in cells["rows"]:
        assert "late" not in row
        if "absent" in row:
            assert row["kind"] in ("liger", "olmoe", "transformers", "decode-transformers")
            continue
        assert row["tokens/s"] > 0 and row["kernels"] and f"{row['ms']:.1f}" in summary
    assert summary in done.stdout and summary.count(": ok, ") == 3
    files = list(tmp_path.iterdir())
    assert len(files) <= 5 and sum(file.stat().st_size for file in files) < 2 << 20
    assert spent < PROCESSOR_SECONDS


def test_a_peer_follows_ours_of_its_size(first_light):
    """It has its first weights, samples and FLOPs; and models that are compared learn the same."""
    ours = set()
    for cell in first_light.steps.CELLS:
        if cell.kind.startswith("ours"):
            ours.add(cell.size)
        elif not cell.kind.startswith("decode"):
            assert cell.size in ours and not cell.flags, cell
    labels = [(cell.name, cell.kind) for cell in first_light.steps.CELLS]
    assert len(set(labels)) == len(labels)


def test_the_page_has_the_figures_of_the_table(first_light):
    """docs/gpu.md and README.md say what the H200 needed, and what is expected of what changed."""
    page = (ROOT / "docs/gpu.md").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]*) \|[^|]*\| ([\d.]+) \| ([\d,]+) \|", page, re.M)
    said = {name.replace("*", "").partition(":")[0].partition(" (")[0]: ms for name, ms, _ in rows}
    cells = {f"{cell.name}, {cell.kind}": cell for cell in first_light.steps.CELLS}
    assert len(said) == len(rows) and said.keys() <= cells.keys()
    trained = {name for name, cell in cells.items() if cell.h200 and "decode" not in cell.kind}
    assert said.keys() == trained
    for name, milliseconds, tokens in rows:
        cell = cells[name.replace("*", "").partition(":")[0].partition(" (")[0]]
        assert float(milliseconds) == cell.h200
        step = importlib.import_module("cells").size_of(cell.size, small=False).tokens
        assert float(tokens.replace(",", "")) == pytest.approx(1e3 * step / cell.h200, rel=1e-3)
    for cell in first_light.steps.CELLS:
        if cell.at_most:
            assert re.search(rf"^\|.* at most {cell.at_most:.4g} ms.*`{cell.name}`", page, re.M)
    hours = 1e10 / 3.6e6 * cells["124M, ours-compiled"].h200 / (32 * 4 * 1024)
    assert f"{hours:.1f} h for 10 billion tokens" in readme


def test_a_step_that_fails_or_hangs_is_shown_and_the_next_one_runs(
    first_light, monkeypatch, tmp_path, capsys
):
    def fails(session):
        done = session.run({"bad": ["-c", "print('why'); raise SystemExit(3)"]})
        return {"a": 1}, first_light.steps.problems_of(done)

    def hangs(session):
        session.width = 1
        words = "import subprocess, time; subprocess.Popen(['sleep', '99']); time.sleep(99)"
        session.deadline -= 9.5  # it has half a second
        done = session.run({"slow": ["-c", words], "later": ["-c", words]})
        session.deadline += 9.5
        return {name: process.code for name, process in done.items()}, []

    def breaks(session):
        raise KeyError("x")

    def works(session):
        return {"code": session.run({"good": ["-c", ""]})["good"].code}, []

    steps = {"probe": fails, "other": hangs, "third": breaks, "fourth": works}
    monkeypatch.setattr(first_light, "STEPS", steps)
    monkeypatch.setattr(first_light, "SHARES", {"cpu": (0.25,) * 4})
    assert first_light.main(["cpu", "--out", str(tmp_path), "--seconds", "43"]) == 1
    ran = json.loads((tmp_path / "results.json").read_text())["steps"]
    assert [one["state"] for one in ran.values()] == ["failed", "ok", "failed", "ok"]
    assert ran["probe"]["problems"] == ["bad: exit code 3: why"]
    assert ran["probe"]["results"] == {"a": 1} and ran["fourth"]["results"] == {"code": 0}
    assert ran["other"]["results"] == {"slow": None, "later": None}
    assert ran["other"]["seconds"] < 60
    assert "FAILED bad: exit code 3: why" in capsys.readouterr().out
    with pytest.raises(SystemExit) as wrong:
        first_light.main(["tpu", "--out", str(tmp_path)])
    assert wrong.value.code == 2


def test_nothing_starts_after_the_time_is_over(first_light, tmp_path):
    session = first_light.steps.Session("cpu", tmp_path, tmp_path / "log.txt", deadline=0.0)
    done = session.run({"late": ["-c", f"open({str(tmp_path / 'ran')!r}, 'w').write('x' * 99)"]})
    assert done["late"].code is None and first_light.steps.problems_of(done)


@pytest.mark.parametrize(
    "ours, apart",
    [
        ({1: (4.0, 2.0), 2: (3.3, 1.0)}, (0.1, 0.0)),
        ({1: (4.0, 2.0), 2: (3.0, 1.5)}, (0.0, 0.5)),
        ({1: (4.0, 2.0)}, (None, None)),
        ({}, (None, None)),
        ({1: (4.0, 2.0), 2: (math.nan, 1.0)}, (None, 0.0)),
        ({1: (4.0, math.inf), 2: (3.0, 1.0)}, (0.0, None)),
    ],
)
def test_losses_that_are_not_those_of_the_cpu(first_light, ours, apart):
    """An iteration that lacks, or a number that is none, is no agreement."""
    found = first_light.steps.compare(ours, {1: (4.0, 2.0), 2: (3.0, 1.0)})
    assert tuple(found.values()) == pytest.approx(apart)


HOSTILE = {
    f"/home/alice/x/{ROOT.name}/pretrain_gpt.py": "pretrain_gpt.py",
    "File '/opt/a b/c.py' and ~/secret/d.bin": "File 'c.py' and d.bin",
    "connect to 10.1.2.3:29500": "connect to ADDRESS:29500",
    "on node-7.hpc.example.edu by alice.": "on HOST by USER.",
    "node-7: alice's": "HOST: USER's",
    "a/b ratio 3/4, 12 TB/s": "a/b ratio 3/4, 12 TB/s",
}


@pytest.mark.parametrize("text, clean", HOSTILE.items())
def test_results_name_no_folder_host_or_user(first_light, monkeypatch, text, clean):
    monkeypatch.setattr(socket, "gethostname", lambda: "node-7.hpc.example.edu")
    monkeypatch.setenv("USER", "alice")
    report = {"steps": {"cells": {"problems": [text], "results": {"rows": [{"error": text}]}}}}
    cells = first_light.without_names(report)["steps"]["cells"]
    assert cells["problems"] == [clean] and cells["results"]["rows"][0]["error"] == clean


def test_a_cell_that_ends_its_process_is_a_row_and_the_others_follow(
    first_light, monkeypatch, tmp_path
):
    """Of six the second kills the process, the third learns another model and leaves memory behind,
    and in the last one the time is over."""
    steps = first_light.steps
    kinds = ("ours", "ours-compiled", "bare-compiled")
    table = [type(steps.CELLS[0])(size, kind, size) for kind in kinds for size in ("124m", "1b")]
    monkeypatch.setattr(steps, "CELLS", table)
    row = {"ms": 1.0, "losses": [4.0]}
    answers = iter(
        [([row], -9), ([{**row, "losses": [5.0]}], steps.NEXT_PROCESS), ([row, row], None)]
    )
    asked = []

    def run(commands):
        ((name, words),) = commands.items()
        asked.append(words[-1])
        rows, code = next(answers)
        with open(tmp_path / "cells.jsonl", "a", encoding="utf-8") as file:
            file.writelines(json.dumps(one) + "\n" for one in rows)
        problem = "out of time" if code is None else f"exit code {code}"
        return {name: SimpleNamespace(code=code, problem=problem)}

    session = SimpleNamespace(device="cpu", small=True, folder=tmp_path, run=run)
    facts, problems = steps.cells(session)
    assert asked == [0, 2, 3]
    rows = facts["rows"]
    assert [(one["size"], one["kind"]) for one in rows] == [(c.size, c.kind) for c in table]
    assert ["error" in one for one in rows] == [False, True, True, False, False, False]
    assert "late" in rows[-1] and len(problems) == 2
