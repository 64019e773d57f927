"""The three steps of first_light.sh: each returns its results, and what is wrong with them."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import xml.etree.ElementTree as ElementTree
from typing import Any

from cells import CELLS, PROBED, RUNS
from session import FOLDER, ROOT, Session, problems_of
from sizes import TOLERANCE

Report = tuple[dict[str, Any], list[str]]
NEXT_PROCESS = 3  # exit code of one_process.py that leaves the next cells to another one


def probe(session: Session) -> Report:
    """Step 1: what the device and its libraries do."""
    file = session.folder / "probe.json"
    problems = problems_of(session.run({"probe": [FOLDER / "probe.py", session.device, file]}))
    facts = json.loads(file.read_text()) if file.exists() else {}
    facts = {
        name: {"value": value, "h200": PROBED.get(name)} if isinstance(value, float) else value
        for name, value in facts.items()
    }
    return facts, problems


def numbers(session: Session) -> Report:
    """Step 2: the GPU tests, tiny runs on the CPU and on the device, and a resume: as many at once
    as there are cores, since nothing is timed."""
    resume = "--bf16 --deterministic-mode"  # with the default dropouts
    half = 2 if session.small else 5
    saved = f"{resume} --save {session.folder / 'saved'} --load {session.folder / 'saved'}"
    saved += f" --save-interval {half}"
    commands = {
        "tests": pytest_words(session),
        "straight": pretrain(session, "straight", resume),
        "first": pretrain(session, "first", f"{saved} --exit-interval {half}"),
    }
    for name, run in RUNS.items():
        flags = f"{run.flags} --attention-dropout 0 --hidden-dropout 0"
        commands[f"{name} {session.device}"] = pretrain(session, f"{name} {session.device}", flags)
        if not run.reference:
            commands[f"{name} cpu"] = pretrain(session, f"{name} cpu", flags, "cpu")
    done = session.run(commands)
    done |= session.run({"second": pretrain(session, "second", saved)})
    problems = problems_of(done)
    facts = {"tests": tests(session), "resume": resumed(session, half), "runs": {}}
    problems += facts["tests"]["failed"] + facts["resume"].pop("problems")
    if not facts["tests"]["passed"]:
        problems.append("no GPU test passed")
    for name, run in RUNS.items():
        facts["runs"][name] = row = compare(
            losses(session, f"{name} {session.device}"),
            losses(session, f"{run.reference or name} cpu"),
        )
        row["h200"] = run.h200
        if row["loss"] is None or row["loss"] > run.tolerance:
            problems.append(f"{name}: the losses of CPU and device differ by {row['loss']}")
    return facts, problems


def pytest_words(session: Session) -> list[object]:
    """The command of the GPU tests; on a CPU their bodies run there."""
    pattern = "test_own_on_gpu*.py" if session.small else "test_*on_gpu*.py"
    command: list[object] = ["-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    command += ["-k", "not (test_a_model and True and dtype1)"]  # compiled in bf16 alone
    command += [f"--junitxml={session.folder}/tests.xml", *sorted((ROOT / "tests").rglob(pattern))]
    processes = min(4, (os.cpu_count() or 1) // 4)
    if session.small:
        command += ["-p", "gpu_tests_on_cpu"]
    elif processes > 1 and importlib.util.find_spec("xdist"):
        command += ["-p", "xdist.plugin", "-n", processes]
    return command


def tests(session: Session) -> dict[str, Any]:
    """How many passed and were skipped, and which failed."""
    facts: dict[str, Any] = {"passed": 0, "skipped": 0, "failed": []}
    file = session.folder / "tests.xml"
    for case in ElementTree.parse(file).iter("testcase") if file.exists() else ():
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            facts["failed"].append(case.get("name"))
        else:
            facts["skipped" if "skipped" in kinds else "passed"] += 1
    return facts


def pretrain(session: Session, name: str, flags: str, device: str = "") -> list[object]:
    """The command of a tiny run, which writes its losses to NAME.jsonl."""
    width, length, iterations = (64, 32, 4) if session.small else (256, 256, 10)
    words = (
        f"--num-layers 4 --hidden-size {width} --num-attention-heads 4 --seq-length {length} "
        f"--max-position-embeddings {length} --mock-data --tokenizer-type NullTokenizer "
        f"--vocab-size 1000 --micro-batch-size 2 --global-batch-size 4 --train-iters {iterations} "
        f"--eval-iters 0 --lr 1e-3 --log-interval 1 {flags} --device {device or session.device}"
    )
    return ["pretrain_gpt.py", *words.split(), "--metrics-file", session.folder / f"{name}.jsonl"]


def losses(session: Session, name: str) -> dict[int, tuple[float, float]]:
    """(loss, gradient norm) by iteration of a tiny run."""
    file = session.folder / f"{name}.jsonl"
    rows = map(json.loads, file.read_text().splitlines() if file.exists() else ())
    return {row["iteration"]: (row["lm_loss"], row["grad_norm"]) for row in rows}


def compare(ours: dict[int, Any], expected: dict[int, Any]) -> dict[str, float | None]:
    """The largest relative difference of a loss and of a gradient norm; None without the same
    iterations, all of them finite."""
    apart: dict[str, float | None] = {"loss": None, "norm": None}
    for k, name in enumerate(apart):
        parts = [abs(ours[i][k] / expected[i][k] - 1) for i in ours.keys() & expected.keys()]
        if parts and ours.keys() == expected.keys() and all(map(math.isfinite, parts)):
            apart[name] = max(parts)
    return apart


def resumed(session: Session, half: int) -> dict[str, Any]:
    """Iterations of the run that was stopped and resumed which are not those of the other, bit for
    bit."""
    straight, first, second = (losses(session, name) for name in ("straight", "first", "second"))
    different = [i for i, value in straight.items() if (first | second).get(i) != value]
    problems = [f"resume: other results from iteration {i} on" for i in different[:1]]
    if min(second, default=0) != half + 1 or not straight:
        problems.append(f"resume: the second run did not begin at iteration {half + 1}")
    return {"iterations": len(straight), "different": different, "problems": problems}


def cells(session: Session) -> Report:
    """Step 3: training steps and decoding, in one process while that goes well."""
    file = session.folder / "cells.jsonl"
    rows: list[dict[str, Any]] = []
    attempt = 0
    while len(rows) < len(CELLS):
        attempt += 1
        name = f"cells{attempt}"
        before = len(rows)
        words = [FOLDER / "one_process.py", session.device, session.folder, before]
        process = session.run({name: words})[name]
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        rows += map(json.loads, lines[before:])
        if process.code is None:
            rows += [{"late": "not measured: out of time"} for _ in CELLS[len(rows) :]]
        elif len(rows) < len(CELLS) and (process.code != NEXT_PROCESS or len(rows) == before):
            rows.append({"error": f"its process died: {process.problem}"})
            with open(file, "a", encoding="utf-8") as out:
                print(json.dumps(rows[-1]), file=out)
    rows = [{**vars(cell), **row} for cell, row in zip(CELLS, rows, strict=True)]
    compare_losses(rows)
    problems = [f"{row['name']} {row['kind']}: {row['error']}" for row in rows if "error" in row]
    return {"rows": rows}, problems


def compare_losses(rows: list[dict[str, Any]]) -> None:
    """An error for each row whose losses are not those of ours, of the same size and flags."""
    expected: dict[Any, list[float]] = {}
    for row in rows:
        right = expected.setdefault((row["size"], row["flags"]), row.get("losses") or [])
        for loss, ours in zip(row.get("losses") or [], right, strict=False):
            if not abs(loss - ours) <= TOLERANCE["bf16"] * abs(ours):
                row["error"] = f"loss {loss:.4f} where that of ours is {ours:.4f}"
