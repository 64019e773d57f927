"""Processes of the steps of first_light.sh: some at a time until a deadline, ended then, and
logged."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[2]
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
        variables |= {
            "PYTHONPATH": os.pathsep.join(map(str, folders)),
            "PYTHONUNBUFFERED": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "OMP_NUM_THREADS": "1",
            "PYTORCH_ALLOC_CONF": "expandable_segments:True",
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "inductor"),
            "TRITON_CACHE_DIR": str(self.folder / "triton"),
        }
        variables.setdefault("CUDA_VISIBLE_DEVICES", "0")  # of several, one
        if self.small:  # compiling C++ takes minutes
            variables["TORCHDYNAMO_DISABLE"] = "1"
        return variables

    def run(self, commands: Mapping[str, Sequence[object]]) -> dict[str, Process]:
        """Run these command lines of Python, the first ones first, `width` at a time."""
        with ThreadPoolExecutor(self.width) as pool:
            running = {name: pool.submit(self._run, name, *commands[name]) for name in commands}
        return {name: process.result() for name, process in running.items()}

    def _run(self, name: str, *words: object) -> Process:
        file = self.folder / f"{name}.txt"
        code = None
        with open(file, "wb") as out, contextlib.suppress(subprocess.TimeoutExpired):
            process = subprocess.Popen(
                [sys.executable, *map(str, words)],
                cwd=ROOT,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            code = process.wait(max(0.0, self.deadline - time.monotonic()))
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
