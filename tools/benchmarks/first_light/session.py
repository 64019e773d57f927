"""Processes of the steps of first_light.sh: run until a deadline, ended then, and logged."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[2]
LOG_TAIL_BYTES = 24_000  # bytes at the end of what one process printed


class Failed(Exception):
    """What a step found wrong; `facts`: its results all the same."""

    def __init__(self, problems: Sequence[str], facts: Any):
        super().__init__("; ".join(problems))
        self.problems = list(problems)
        self.facts = facts


@dataclass
class Process:
    """One that ran: `code` is None where the time was over, `text` the end of what it printed."""

    code: int | None
    text: str

    @property
    def ending(self) -> str:
        """How it ended."""
        return "out of time" if self.code is None else f"exit code {self.code}"


@dataclass
class Session:
    """What the steps share. `deadline`: of the step that runs, by time.monotonic(); `results` by
    step."""

    device: str
    folder: Path  # of temporary files
    log: Path
    deadline: float
    results: dict[str, Any] = field(default_factory=dict)

    @property
    def small(self) -> bool:
        """On a CPU: the smallest sizes, and nothing is compiled."""
        return self.device == "cpu"

    def environment(self) -> dict[str, str]:
        """Of every process."""
        variables = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "OMP_"))}
        variables |= {
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT, FOLDER, FOLDER.parent / "step"))),
            "PYTHONUNBUFFERED": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "OMP_NUM_THREADS": str(max(1, min(4, (os.cpu_count() or 1) // 8))),
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "inductor"),
            "TRITON_CACHE_DIR": str(self.folder / "triton"),
        }
        variables.setdefault("CUDA_VISIBLE_DEVICES", "0")  # of several, one
        if self.small:  # compiling C++ takes minutes
            variables["TORCHDYNAMO_DISABLE"] = "1"
        return variables

    def run(self, **commands: Sequence[object]) -> dict[str, Process]:
        """Run these command lines of Python at the same time."""
        started = {}
        for name, words in commands.items():
            with open(self.folder / f"{name}.txt", "wb") as out:
                started[name] = subprocess.Popen(
                    [sys.executable, *map(str, words)],
                    cwd=ROOT,
                    env=self.environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        return {name: self._wait(name, process) for name, process in started.items()}

    def _wait(self, name: str, process: subprocess.Popen) -> Process:
        try:
            code = process.wait(max(0.1, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            code = None
        try:  # also what it started itself
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
        except (ProcessLookupError, PermissionError, subprocess.TimeoutExpired):
            pass
        data = (self.folder / f"{name}.txt").read_bytes()
        done = Process(code, data[-LOG_TAIL_BYTES:].decode("utf-8", "replace"))
        with open(self.log, "a", encoding="utf-8") as log:
            print(f"== {name}: {done.ending}, {len(data)} bytes", done.text, sep="\n", file=log)
        return done


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["nothing printed"])[-1]


def problems_of(processes: Mapping[str, Process]) -> list[str]:
    """A line for each that did not end with 0, with the last one that it printed."""
    return [
        f"{name}: {process.ending}: {_last_line(process.text)[:160]}"
        for name, process in processes.items()
        if process.code != 0
    ]
