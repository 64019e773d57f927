"""A rank that makes no progress: what its stack is doing, and how a process of this machine that
does not respond is found, asked for its stack and ended."""

import contextlib
import ctypes
import faulthandler
import os
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

from megatron import cluster, log
from megatron.training.launch.process import HUNG, START_UP, Failure, ProcessId, code_location

STACK_WITHIN = 3.0  # seconds
STACKS = "megatron-stacks"  # name of the memory file that a stack is written to
# of the innermost frame that has one: (part of the file's path or name of the function, phase)
PHASES = (
    ("/torch/distributed/", "collective"),
    ("megatron/parallel/collectives.py", "collective"),
    ("megatron/parallel/exchange.py", "collective"),
    ("receive_activation", "pipeline transfer"),
    ("receive_gradient", "pipeline transfer"),
    ("send_activation", "pipeline transfer"),
    ("send_gradient", "pipeline transfer"),
    ("megatron/parallel/ddp.py", "gradient reduction"),
    ("megatron/parallel/reduction.py", "gradient reduction"),
    ("megatron/training/evaluation.py", "evaluation"),
    ("megatron/training/checkpointing/", "save"),
    ("megatron/checkpoint/", "save"),
    ("megatron/optimizer/", "optimizer"),
    ("_update", "optimizer"),
    ("/torch/utils/data/", "data"),
    ("megatron/data/", "data"),
    ("next_samples", "data"),
    ("make_batch", "data"),
    ("backward", "backward"),
    ("forward_step", "forward"),
    ("megatron/model/", "forward"),
    ("train_step", "training step"),
)
FIRST = "first iteration"
LOOP = "megatron/training/loop.py"
# by its begin, the name in --hang-timeout-...-seconds of a phase that is not an iteration
LIMITS = (
    (START_UP, "startup-"),
    (FIRST, "first-iteration-"),
    ("evaluation", "evaluation-"),
    ("save", "save-"),
    ("after iteration", "save-"),
    ("end of training", "save-"),
)
NEVER_JOINED = "never joined"
# files whose code waits for other ranks
WAITING = (
    "/torch/distributed/",
    "megatron/parallel/collectives.py",
    "megatron/parallel/exchange.py",
    "megatron/parallel/pipeline.py",
)
# ... and for the device, which runs the collectives of CUDA
DEVICE_WAIT = "megatron/training/step_sums.py"
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
        for mark, doing in PHASES:
            if mark == name or "/" in mark and mark in file:
                return doing
    return START_UP


def full_phase(known: str, frames: Sequence[tuple[str, str]]) -> str:
    """`evaluation, data`: the phase that a rank reported, and what its stack is doing. Of a rank
    that cannot report its phase `known` is another one's, which may be further."""
    inner = phase(frames) if frames else ""
    if (
        inner == START_UP
        and known.startswith(FIRST)
        and not any(LOOP in file for file, _ in frames)
    ):
        return START_UP
    if known.startswith("iteration"):
        return inner or known
    return known if inner in ("", START_UP, "training step", known) else f"{known}, {inner}"


def stack_text(frames: Sequence[FrameType]) -> str:
    """The stack as a traceback has it, without the text of the lines: no file is read."""
    return "".join(
        f'  File "{frame.f_code.co_filename}", line {frame.f_lineno}, in {frame.f_code.co_name}\n'
        for frame in frames
    )


def waiting_in(frame: FrameType) -> str | None:
    """What the thread with this innermost frame waits for: `all_reduce over dp (ranks 0-3)`; None
    if it does not wait for other ranks."""
    path = frame.f_code.co_filename.replace(os.sep, "/")
    if DEVICE_WAIT in path:
        return "the device"
    if not any(file_name in path for file_name in WAITING):
        return None
    caller: FrameType | None = frame
    while caller is not None and any(
        file_name in caller.f_code.co_filename for file_name in WAITING
    ):
        owner = caller.f_locals.get("self")
        axis = caller.f_locals.get("axis") or getattr(owner, "axis", None)
        if axis is not None and hasattr(axis, "ranks"):
            # of Pending: the function that started it
            result = getattr(owner, "_result", None)
            name = getattr(result, "__qualname__", caller.f_code.co_name).split(".")[0]
            name = name.removeprefix("start_").rstrip("_")
            return f"{name} over {axis.name} (ranks {numbers(axis.ranks)})"
        caller = caller.f_back
    return frame.f_code.co_name


def failure(process: ProcessId, seconds: float, answer: Mapping[str, Any]) -> Failure:
    """The failure of a run in which `process` hangs; `answer`: what it does."""
    known = str(answer.get("known", ""))
    limit = next((flag for begin, flag in LIMITS if known.startswith(begin)), "")
    text = (
        f"made no progress for {seconds:.0f} seconds; phase: {answer['phase']}; {answer['at']}; "
        f"if it is only slow, raise --hang-timeout-{limit}seconds [rank-hangs]"
    )
    return Failure(process, text, HUNG, silent=True)


def report(failure: Failure, answer: Mapping[str, Any]) -> str:
    """The failure and the Python stack of the process, innermost call last."""
    return f"hang: {failure.process} {failure.text}\n{answer['stack'].rstrip()}".rstrip()


def name(process: ProcessId, seconds: float, answer: Mapping[str, Any]) -> Failure:
    """`failure`, and its report on stderr."""
    hang = failure(process, seconds, answer)
    print(report(hang, answer), file=sys.stderr, flush=True)
    return hang


def describe(known: str, frames: Sequence[FrameType]) -> dict[str, Any]:
    """The answer of this process in the phase `known`; `frames`: those of its main thread."""
    calls = [(frame.f_code.co_filename, frame.f_code.co_name) for frame in frames]
    return {
        "at": code_location(
            [
                traceback.FrameSummary(
                    frame.f_code.co_filename,
                    frame.f_lineno,
                    frame.f_code.co_name,
                    lookup_line=False,  # a process without a core, or without its disk, answers too
                )
                for frame in frames
            ]
        ),
        "phase": full_phase(known, calls),
        "known": known,
        "stack": stack_text(frames),
    }


def unknown(known: str) -> dict[str, Any]:
    """The answer of a process that cannot be inspected."""
    return {"at": "does not respond", "phase": known, "known": known, "stack": ""}


def inspect(
    known: Mapping[ProcessId, str], missing: Iterable[int] = ()
) -> dict[ProcessId, dict[str, Any]]:
    """What processes do that do not respond, whose phase is known, and those of this machine that
    are ranks that never joined; with their stacks where they are on this machine and prepared. One
    that is stopped runs on for a moment."""
    late = {process: START_UP for process in find(missing).values()}
    hostname = socket.gethostname()
    asked = {
        process: _Inspection(process.pid) for process in (*known, *late) if process.host == hostname
    }
    deadline = time.monotonic() + STACK_WITHIN
    while time.monotonic() < deadline and not all(
        inspection.is_whole() for inspection in asked.values()
    ):
        time.sleep(0.05)
    answers = {
        process: asked[process].answer(text) if process in asked else unknown(text)
        for process, text in {**known, **late}.items()
    }
    for process in late:
        stopped = f"; {answers[process]['at']}" if asked[process].state in ("T", "t") else ""
        answers[process]["at"] = f"{NEVER_JOINED}{stopped}"
    return answers


class _Inspection:
    """The request for the stack of a process of this machine, and its answer."""

    def __init__(self, pid: int):
        self.state = process_state(pid)
        self._text = ""
        self._file = _memory_file(pid)
        number = stack_signal()
        self._start = 0
        if self._file is None or number is None:
            return
        with contextlib.suppress(OSError):
            self._start = self._file.stat().st_size
            _signal_main_thread(pid, number)
            if self.state in "Tt":
                os.kill(pid, signal.SIGCONT)

    def is_whole(self) -> bool:
        """Has the main thread, which is the last, been written to its end, the program's own
        file?"""
        if self._file is None:
            return True
        with contextlib.suppress(OSError):
            self._text = self._file.read_bytes()[self._start :].decode(errors="replace")
        return self._text.endswith(("in <module>\n", "in _run_code\n", "in _run_module_as_main\n"))

    def answer(self, known: str) -> dict[str, Any]:
        frames = _main_thread(self._text)
        stack = "".join(f'  File "{path}", line {line}, in {name}\n' for path, line, name in frames)
        doing = full_phase(known, [(path, name) for path, _, name in frames])
        return {"at": _why_silent(self.state), "phase": doing, "known": known, "stack": stack}


def _why_silent(state: str) -> str:
    if state == "":
        return "does not respond"
    if state in "Tt":
        return "stopped by a signal (SIGSTOP)"
    return "does not respond: C code holds the interpreter's lock, or its network is cut"


def process_state(pid: int) -> str:
    """R, S, T ... of a process of this machine; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except (OSError, IndexError):
        return ""


def waited_for_core(pid: int) -> float:
    """Seconds that the main thread of a process of this machine has waited for a core."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def find(ranks: Iterable[int], prepared_only: bool = False) -> dict[int, ProcessId]:
    """The processes of these ranks of this run on this machine: the oldest that is prepared, else
    the newest (before it come its shells), unless `prepared_only`."""
    host = socket.gethostname()
    processes = {}
    for rank, candidates in _candidates(set(ranks)).items():
        prepared = [pid for is_prepared, pid in candidates if is_prepared]
        if prepared or not prepared_only:
            pid = min(prepared) if prepared else max(pid for _, pid in candidates)
            processes[rank] = ProcessId(rank, pid, host, host)
    return processes


def _candidates(wanted: Collection[int]) -> dict[int, list[tuple[bool, int]]]:
    """By rank (whether it is prepared, process id) of the processes of this run on this machine."""
    candidates: dict[int, list[tuple[bool, int]]] = {}
    for folder in Path("/proc").iterdir() if wanted else ():
        with contextlib.suppress(OSError, ValueError):
            pid = int(folder.name)
            data = (folder / "environ").read_bytes()
            if b"RANK" not in data and b"PROCID" not in data:  # most processes
                continue
            rank = cluster.rank_in_same_run(_variables(data))
            if (
                rank is not None
                and rank in wanted
                and pid != os.getpid()
                and process_state(pid) != "Z"
            ):
                candidates.setdefault(rank, []).append((_memory_file(pid) is not None, pid))
    return candidates


def kill(process: ProcessId, text: str) -> None:
    """End a process of this machine that is a rank of this run, also one that is stopped; torchrun
    is told `text` as its error."""
    if (
        process.pid > 0
        and process.host == socket.gethostname()
        and (_memory_file(process.pid) or process.rank in find([process.rank]))
    ):
        with contextlib.suppress(OSError):
            environ = _variables(Path(f"/proc/{process.pid}/environ").read_bytes())
            log.tell_torchrun(f"hang: {process} {text}", environ)
        with contextlib.suppress(OSError):
            os.kill(process.pid, signal.SIGKILL)


def _variables(data: bytes) -> dict[str, str]:
    """Of /proc/PID/environ."""
    pairs = data.decode(errors="replace").split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


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


def _main_thread(text: str) -> list[tuple[str, str, str]]:
    """(file, line, function) of the main thread's stack, outermost first."""
    block = re.split(r"^(?:Current thread|Thread) .*$", text, flags=re.MULTILINE)[-1]
    return [(match[1], match[2], match[3]) for match in reversed(list(_FRAME.finditer(block)))]


def numbers(ranks: Sequence[int]) -> str:
    """`0, 2-5`."""
    spans = [
        [rank for _, rank in span]
        # of consecutive ranks the distance to their position is the same
        for _, span in groupby(enumerate(ranks), lambda item: item[1] - item[0])
    ]
    return ", ".join(f"{span[0]}-{span[-1]}" if span[1:] else f"{span[0]}" for span in spans)
