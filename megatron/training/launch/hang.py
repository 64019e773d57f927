"""A rank that makes no progress: of which phase of a run its stack is, and how a process of this
machine that does not respond is asked for its stack and ended."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import re
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.training.launch.process import HUNG, Failure, ProcessId

STACK_WITHIN = 3.0  # seconds
STACKS = "megatron-stacks"  # name of the memory file that a stack is written to
# of the innermost frame that has one: (part of the file's path or name of the function, phase)
PHASES = (
    ("/torch/distributed/", "collective"),
    ("megatron/parallel/collectives.py", "collective"),
    ("megatron/training/evaluation.py", "evaluation"),
    ("megatron/training/checkpointing/", "save"),
    ("megatron/checkpoint/", "save"),
    ("megatron/optimizer/", "optimizer"),
    ("/torch/utils/data/", "data"),
    ("megatron/data/", "data"),
    ("next_samples", "data"),
    ("make_batch", "data"),
    ("backward", "backward"),
    ("forward_step", "forward"),
    ("megatron/model/", "forward"),
    ("train_step", "training step"),
)
SILENT = {"at": "does not respond", "phase": "unknown", "stack": ""}
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


def stack_signal() -> int | None:
    """The signal at which a prepared process writes its stack; None where the system has none to
    spare."""
    last = getattr(signal, "SIGRTMAX", None)
    return None if last is None or not hasattr(os, "memfd_create") else int(last) - 3


def prepare() -> None:
    """From now on this process writes its stack into a memory file at `stack_signal()`, also while
    C code holds the interpreter's lock."""
    number = stack_signal()
    if number is not None:
        faulthandler.register(number, file=os.memfd_create(STACKS), all_threads=True)


def phase(frames: Sequence[tuple[str, str]]) -> str:
    """What a stack is doing; `frames` are (file, function), outermost first."""
    for file, name in reversed(frames):
        for mark, found in PHASES:
            if mark == name or "/" in mark and mark in file:
                return found
    return "start-up"


def failure(process: ProcessId, seconds: float, answer: Mapping[str, Any]) -> Failure:
    """The failure of a run in which `process` hangs; `answer`: what it does."""
    text = (
        f"made no progress for {seconds:.0f} seconds (--hang-timeout-seconds); phase: "
        f"{answer['phase']}; {answer['at']}"
    )
    return Failure(process, text, HUNG, silent=True)


def report(hang: Failure, answer: Mapping[str, Any]) -> str:
    """The failure and the Python stack of the process, innermost call last."""
    return f"hang: {hang.process} {hang.text}\n{answer['stack'].rstrip()}"


def inspect(process: ProcessId) -> dict[str, Any]:
    """What a process does that does not respond; its stack where it is on this machine and
    prepared. One that is stopped runs on for a moment."""
    if process.host != socket.gethostname():
        return dict(SILENT)
    try:
        state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2][0]
    except (OSError, IndexError):
        return dict(SILENT)
    at = "stopped by a signal (SIGSTOP)" if state in "Tt" else "holds the interpreter's lock"
    number = stack_signal()
    file = _memory_file(process.pid)
    text = ""
    if file is not None and number is not None:
        with contextlib.suppress(OSError):
            _signal_main_thread(process.pid, number)
            if state in "Tt":
                os.kill(process.pid, signal.SIGCONT)
            deadline = time.monotonic() + STACK_WITHIN
            while time.monotonic() < deadline and not _is_whole(text):
                time.sleep(0.05)
                text = file.read_text(errors="replace")
    frames = _main_thread(text)
    stack = "".join(f'  File "{path}", line {line}, in {name}\n' for path, line, name in frames)
    doing = phase([(path, name) for path, _, name in frames]) if frames else "unknown"
    return {"at": at, "phase": doing, "stack": stack}


def kill(process: ProcessId) -> None:
    """End a process of this machine that is prepared, also one that is stopped."""
    if process.host == socket.gethostname() and _memory_file(process.pid):
        with contextlib.suppress(OSError):
            os.kill(process.pid, signal.SIGKILL)


def _signal_main_thread(pid: int, number: int) -> None:
    """To that thread, so that a process that was stopped writes its stack before it runs on."""
    tgkill = getattr(ctypes.CDLL(None), "tgkill", None)  # of glibc 2.30 and later
    if tgkill is None or tgkill(pid, pid, number):
        os.kill(pid, number)


def _memory_file(pid: int) -> Path | None:
    with contextlib.suppress(OSError):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            if os.readlink(file).startswith(f"/memfd:{STACKS}"):
                return file
    return None


def _is_whole(text: str) -> bool:
    """Has the main thread, which is the last, been written to its end, the program's own file?"""
    return text.endswith(("in <module>\n", "in _run_code\n", "in _run_module_as_main\n"))


def _main_thread(text: str) -> list[tuple[str, str, str]]:
    """(file, line, function) of the main thread's stack, outermost first."""
    block = re.split(r"^(?:Current thread|Thread) .*$", text, flags=re.MULTILINE)[-1]
    return [match.groups() for match in reversed(list(_FRAME.finditer(block)))]
