"""The program of one side's process: builds the job's subject, then calls its methods as commands
arrive over a pipe.

processes.py starts it with the number of the pipe and of the parent process; the first message is
the job: `subject` (MODULE:CLASS), `arguments`, `tree` (the checkout of this repository that is
measured), `launcher` (torchrun's variables) and `waiting` (whether CPU threads wait as
pretrain_gpt.py sets it). This file imports nothing of its tree, and torch comes with the subject.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import io
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

DIE_WITH_PARENT = 1  # Linux: prctl's PR_SET_PDEATHSIG
BENCHMARKS = Path(__file__).resolve().parents[1]


def build(job: dict[str, Any]) -> Any:
    """The subject. A run is built by the contestants.py of the job's tree."""
    os.environ.update(job["launcher"])
    if job["waiting"]:
        importlib.import_module("megatron.threads").set_waiting()
    module, _, name = job["subject"].partition(":")
    if module == "training" and job["tree"] != str(BENCHMARKS.parents[1]):
        sys.path.insert(0, f"{job['tree']}/tools/benchmarks/step")
        importlib.import_module("contestants")
        del sys.path[0]
    return getattr(importlib.import_module(module), name)(**job["arguments"])


def serve(pipe: Connection) -> None:
    """Answer the job and each command after it with (kind of answer, value), until the parent
    closes the pipe."""
    job = pipe.recv()
    sys.path[:1] = [job["tree"], str(BENCHMARKS), f"{BENCHMARKS}/step"]
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            subject = build(job)
        pipe.send(("ok", None))
        while True:
            command, *arguments = pipe.recv()
            pipe.send(("ok", getattr(subject, command)(*arguments)))
    except EOFError:
        return
    except SystemExit:
        pipe.send(("refused", printed.getvalue().strip().removeprefix("error: ")))
    except BaseException as error:
        kind = "out of memory" if type(error).__name__ == "OutOfMemoryError" else "failed"
        pipe.send((kind, f"{printed.getvalue()}{traceback.format_exc()}"))
    pipe.poll(None)  # another rank may still communicate with this one


def main(argv: Sequence[str]) -> None:
    """Serve the pipe of that number until the parent process ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    pipe, parent = map(int, argv)
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl:  # a stopped process does not notice that the pipe is closed
        prctl(DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() == parent:
        serve(Connection(pipe))


if __name__ == "__main__":
    main(sys.argv[1:])
