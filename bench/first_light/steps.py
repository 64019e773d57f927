"""The three steps of first_light.sh: each returns its results, and what is wrong with them. Their
processes run some at a time until a deadline, are ended then, and logged."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cells import CELLS, GRAPHS, PROBED, RUNS, flags_on
from sizes import TOLERANCE

Report = tuple[dict[str, Any], list[str]]
NEXT_PROCESS = 3  # exit code of one_process.py that leaves the next cells to another one
FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
LOG_TAIL_BYTES = 24_000  # at the end of what one process printed


@dataclass
class Process:
    """One that ended: `code` is None where the time was over, `text` the end of what it printed."""

    code: int | None
    text: str = ""

    @property
    def problem(self) -> str | None:
        """How it ended, unless with 0, and the last line that it printed."""
        if self.code == 0:
            return None
        last = (self.text.strip().splitlines() or ["nothing printed"])[-1]
        return f"{'out of time' if self.code is None else f'exit code {self.code}'}: {last[:160]}"


@dataclass
class Session:
    """What the steps share. `deadline`: of the step that runs, by time.monotonic()."""

    device: str
    folder: Path  # of temporary files
    log: Path
    deadline: float = 0.0
    width: int = max(2, (os.cpu_count() or 1) - 2)

    @property
    def small(self) -> bool:
        """On a CPU: the smallest sizes, and nothing is compiled."""
        return self.device == "cpu"

    def environment(self) -> dict[str, str]:
        """Of every process."""
        variables = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "OMP_"))}
        folders = (ROOT, FOLDER, FOLDER.parent, FOLDER.parent / "step")
        variables.setdefault("CUDA_VISIBLE_DEVICES", "0")  # of several, one
        if self.small:  # compiling C++ takes minutes
            variables["TORCHDYNAMO_DISABLE"] = "1"
        return variables | {
            "PYTHONPATH": os.pathsep.join(map(str, folders)),
            "PYTHONUNBUFFERED": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "OMP_NUM_THREADS": "1",
            "PYTORCH_ALLOC_CONF": "expandable_segments:True",
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "inductor"),
            "TRITON_CACHE_DIR": str(self.folder / "triton"),
        }

    def run(self, commands: Mapping[str, Sequence[object]]) -> dict[str, Process]:
        """Run these command lines of Python, the first ones first, `width` at a time."""
        with ThreadPoolExecutor(self.width) as pool:
            processes = pool.map(self._run, commands, commands.values())
            return dict(zip(commands, processes, strict=True))

    def _run(self, name: str, words: Sequence[object]) -> Process:
        file = self.folder / f"{name}.txt"
        with open(file, "wb") as out:
            process = subprocess.Popen(
                [sys.executable, *map(str, words)],
                cwd=ROOT,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, self.deadline - time.monotonic()))
        code = process.returncode
        with contextlib.suppress(ProcessLookupError, PermissionError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGKILL)  # also what it started itself
            process.wait(10)
        done = Process(code, file.read_bytes()[-LOG_TAIL_BYTES:].decode("utf-8", "replace"))
        with open(self.log, "a", encoding="utf-8") as log:
            log.write(f"== {name}: {done.problem or 'ok'}\n{done.text}\n")
        return done


def problems_of(processes: Mapping[str, Process]) -> list[str]:
    """A line for each that did not end with 0."""
    return [f"{name}: {process.problem}" for name, process in processes.items() if process.problem]


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
        for device in {session.device, "cpu"} if not run.reference else {session.device}:
            flags = f"{run.flags} --attention-dropout 0 --hidden-dropout 0"
            commands[f"{name} {device}"] = pretrain(session, f"{name} {device}", flags, device)
    done = session.run(commands)
    done |= session.run({"second": pretrain(session, "second", saved)})
    facts = {"tests": tests(session), "resume": resumed(session, half), "runs": {}}
    problems = problems_of(done) + facts["tests"]["failed"] + facts["resume"].pop("problems")
    if not facts["tests"]["passed"]:
        problems.append("no GPU test passed")
    for name, run in RUNS.items():
        ours, expected = f"{name} {session.device}", f"{run.reference or name} cpu"
        apart = compare(losses(session, ours), losses(session, expected))
        facts["runs"][name] = {**apart, "h200": run.h200}
        if apart["loss"] is None or apart["loss"] > run.tolerance:
            problems.append(f"{name}: the losses of CPU and device differ by {apart['loss']}")
    eager, graphs = (losses(session, f"{name} {session.device}") for name in ("bf16", "graphs"))
    different = [i for i, value in eager.items() if graphs.get(i) != value]
    facts["replayed"] = {"iterations": len(eager), "different": different}
    problems += [f"graphs: other results from iteration {i} on" for i in different[:1]]
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
        f"--eval-iters 0 --lr 1e-3 --log-interval 1 --device {device or session.device} "
        f"{flags_on(device or session.device, flags)}"
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
    file.touch()
    rows: list[dict[str, Any]] = []
    attempt = 0
    while len(rows) < len(CELLS):
        attempt += 1
        before = len(rows)
        words = [FOLDER / "one_process.py", session.device, session.folder, before]
        (process,) = session.run({f"cells{attempt}": words}).values()
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        if process.code is None:
            rows += [{"late": "not measured: out of time"}] * (len(CELLS) - len(rows))
        elif len(rows) < len(CELLS) and (process.code != NEXT_PROCESS or len(rows) == before):
            rows.append({"error": f"its process died: {process.problem}"})
            file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    rows = [{**vars(cell), **row} for cell, row in zip(CELLS, rows, strict=True)]
    compare_losses(rows)
    problems = [f"{row['name']} {row['kind']}: {row['error']}" for row in rows if "error" in row]
    return {"rows": rows}, problems


def compare_losses(rows: list[dict[str, Any]]) -> None:
    """An error for each row whose losses are not those of ours, of the same size and flags; graphs
    have the losses of their kernels."""
    expected: dict[Any, list[float]] = {}
    for row in rows:
        flags = row["flags"].replace(GRAPHS, "")
        right = expected.setdefault((row["size"], flags), row.get("losses") or [])
        for loss, ours in zip(row.get("losses") or [], right, strict=False):
            if not abs(loss - ours) <= TOLERANCE["bf16"] * abs(ours):
                row["error"] = f"loss {loss:.4f} where that of ours is {ours:.4f}"
