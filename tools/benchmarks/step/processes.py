"""The processes of a benchmark's sides: each a fresh Python that runs worker.py, asked over a pipe.

Does not import torch.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
WORKER = Path(__file__).resolve().with_name("worker.py")
THREAD_VARIABLES = ("OMP_", "GOMP_", "KMP_", "MKL_NUM_THREADS", "MKL_DYNAMIC", "MKL_DOMAIN")


class WorkerFailed(RuntimeError):
    """A process raised an exception, refused its command line or died; the text says how."""


class OutOfMemory(WorkerFailed):
    """The device has too little memory."""


def environment_of(setting: str, threads: int | None = None) -> dict[str, str]:
    """This environment without its variables for CPU threads, with those of `setting`: NAME=VALUE
    pairs separated by spaces, or nothing."""
    variables = {k: v for k, v in os.environ.items() if not k.startswith(THREAD_VARIABLES)}
    if threads:
        variables["OMP_NUM_THREADS"] = str(threads)
    return variables | dict(pair.split("=", 1) for pair in setting.split())


class Worker:
    """One process, which builds the subject of `job` (see worker.py); `name` is what errors call
    it. `ask` raises WorkerFailed where the process does not answer."""

    def __init__(self, name: str, job: dict[str, Any], environment: Mapping[str, str]):
        self.name = name
        self._pipe, other_end = multiprocessing.Pipe()
        with other_end:
            self._process = subprocess.Popen(
                [sys.executable, str(WORKER), str(other_end.fileno()), str(os.getpid())],
                env=dict(environment),
                pass_fds=[other_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._send(job)

    def send(self, command: str, *arguments: Any) -> None:
        """Call that method of the subject; `receive` has the answer."""
        self._send((command, *arguments))

    def _send(self, message: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # `receive` says that the process died
            self._pipe.send(message)

    def receive(self) -> Any:
        """The next answer: first that the subject is built, then one for each `send`."""
        try:
            kind, value = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            code = self._process.wait()
            raise WorkerFailed(f"{self.name}: its process died (exit code {code})") from None
        if kind == "ok":
            return value
        raise (OutOfMemory if kind == "out of memory" else WorkerFailed)(f"{self.name}: {value}")

    def ask(self, command: str, *arguments: Any) -> Any:
        """The answer to a command."""
        self.send(command, *arguments)
        return self.receive()

    def pause(self) -> None:
        """Stop it and what it started, also threads that OpenMP keeps spinning."""
        os.killpg(self._process.pid, signal.SIGSTOP)
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        """Let it run again after `pause`."""
        os.killpg(self._process.pid, signal.SIGCONT)

    def peak_bytes(self) -> int:
        """The most memory that it has had; 0 where the system does not say."""
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{self._process.pid}/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return 1024 * int(line.split()[1])
        return 0

    def end(self) -> None:
        """Kill it and what it started, and wait until its memory is free."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._pipe.close()


def commit_of(tree: Path) -> str:
    """The commit of a checkout as git describes it, or `unknown`."""
    words = ["git", "-C", str(tree), "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
