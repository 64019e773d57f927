"""The program of one side's process: builds the job's subject, then calls its methods as their
names arrive over a pipe, whose number harness.py gives.

The first message is the job: `subject` (MODULE:CLASS), `arguments`, `tree` (the checkout of this
repository that is measured) and `waiting` (whether CPU threads wait as pretrain_gpt.py sets it).
This file imports nothing of its tree, and torch comes with the subject.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import io
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

DIE_WITH_PARENT = 1  # Linux: prctl's PR_SET_PDEATHSIG
BENCHMARKS = Path(__file__).resolve().parent


def build(job: dict[str, Any]) -> Any:
    """The subject. A run is built by the contestants.py of the job's tree."""
    if job["waiting"]:
        importlib.import_module("megatron.threads").set_waiting()
    module, _, name = job["subject"].partition(":")
    if module == "training" and job["tree"] != str(BENCHMARKS.parent):
        # trees of before December 2026 have benchmarks among the tools
        sys.path[:0] = [f"{job['tree']}/{path}/step" for path in ("bench", "tools/benchmarks")]
        importlib.import_module("contestants")
        del sys.path[:2]
    return getattr(importlib.import_module(module), name)(**job["arguments"])


def serve(pipe: Connection) -> None:
    """Answer the job with what all sides must agree on, and each method after it, with (True, its
    result) until one fails or the parent closes the pipe."""
    job = pipe.recv()
    sys.path[:1] = [job["tree"], str(BENCHMARKS), f"{BENCHMARKS}/step"]
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            subject = build(job)
            pipe.send((True, subject.warm_up()))
        while True:
            pipe.send((True, getattr(subject, pipe.recv())()))
    except EOFError:
        return
    except SystemExit:
        pipe.send((False, printed.getvalue().strip().removeprefix("error: ")))
    except BaseException:
        pipe.send((False, f"{printed.getvalue()}{traceback.format_exc()}"))
    pipe.poll(None)  # another rank may still communicate with this one


if __name__ == "__main__":
    if hasattr(ctypes.CDLL(None), "prctl"):  # a stopped process does not notice a closed pipe
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
    serve(Connection(int(sys.argv[1])))
