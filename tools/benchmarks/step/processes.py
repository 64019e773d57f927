"""The processes of contestants as their parent sees them: each a fresh Python that runs worker.py,
and asked over a pipe.

Depends on worker.py's commands; does not import torch.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sizes import Size

WORKER = Path(__file__).resolve().with_name("worker.py")
ROOT = Path(__file__).resolve().parents[3]


class Refused(ValueError):
    """The command line of a contestant is not accepted; the text says why."""


class OutOfMemory(RuntimeError):
    """The device has too little memory for a contestant."""


class WorkerFailed(RuntimeError):
    """A process raised an exception, died or hung; the text says how."""


def make_job(  # noqa: PLR0913
    kind: str,
    size: Size | None = None,
    *,
    dtype: str = "fp32",
    device: str = "cpu",
    tree: Path = ROOT,
    compiled: bool = False,
    flags: Sequence[str] = (),
    launcher: Mapping[str, str] | None = None,
    clock: str = "wall",
    start: str = "",
    dtypes: Sequence[str] = (),
) -> dict[str, Any]:
    """A process's first message: what it is to build, and from the modules of which checkout of the
    repository."""
    return {
        "kind": kind,
        "size": asdict(size) if size else None,
        "dtype": dtype,
        "device": device,
        "tree": str(tree),
        "compiled": compiled,
        "flags": list(flags),
        "launcher": dict(launcher or {}),
        "clock": clock,
        "start": start,
        "dtypes": list(dtypes),
    }


class Worker:
    """One process. It starts at once; the first answer (`receive`) is that it has built its
    contestant.

    `name` is what errors call it.
    """

    def __init__(self, name: str, job: dict[str, Any], environment: Mapping[str, str]):
        self.name = name
        self.pipe, theirs = multiprocessing.Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(WORKER), str(theirs.fileno()), str(os.getpid())],
                env=dict(environment),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        self._send(job)

    def send(self, command: str, *arguments: Any) -> None:
        """Give it a command; `receive` has the answer."""
        self._send((command, *arguments))

    def _send(self, message: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # `receive` says that the process died
            self.pipe.send(message)

    def receive(self) -> Any:
        """Its next answer. Raises Refused, OutOfMemory or WorkerFailed."""
        try:
            kind, value = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            raise WorkerFailed(
                f"{self.name}: its process died (exit code {self._process.wait()})"
            ) from None
        if kind == "refused":
            raise Refused(value.strip().removeprefix("error: "))
        if kind == "out of memory":
            raise OutOfMemory(f"{self.name}: out of memory")
        if kind == "failed":
            raise WorkerFailed(f"{self.name} failed:\n{value}")
        return value

    def ask(self, command: str, *arguments: Any) -> Any:
        """The answer to a command. Raises what `receive` raises."""
        self.send(command, *arguments)
        return self.receive()

    def pause(self) -> None:
        """Stop all its threads, also those that OpenMP keeps spinning; returns once they stand
        still."""
        self._process.send_signal(signal.SIGSTOP)
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        """Let it run again after `pause`."""
        self._process.send_signal(signal.SIGCONT)

    def resident_bytes(self) -> int:
        """Bytes of memory that it has now; 0 where the system does not say."""
        return self._status_bytes("VmRSS:")

    def peak_resident_bytes(self) -> int:
        """The most bytes of memory that it has had; 0 where the system does not say."""
        return self._status_bytes("VmHWM:")

    def _status_bytes(self, key: str) -> int:
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{self._process.pid}/status").read_text(encoding="utf-8")
            for line in status.splitlines():
                if line.startswith(key):
                    return 1024 * int(line.split()[1])
        return 0

    def end(self) -> None:
        """Kill it and wait until its memory is free."""
        self._process.kill()
        self._process.wait()
        self.pipe.close()
