"""Which process a rank is, and why a run ends early."""

import contextlib
import os
import socket
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from megatron import launcher

START_UP = "start-up"  # the first phase of a run
IO_STEP = 20  # bits: a MiB that was read or written is progress
HUNG = 4  # exit code of a run that a rank kept from making progress


@dataclass(frozen=True)
class ProcessId:
    """The process of a rank; `node` distinguishes the launcher's nodes, also where two are one
    machine. `pid` is 0 where it is not known."""

    rank: int
    pid: int
    host: str
    node: str

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid or 'unknown'} on {self.host})"


class Refusal(ValueError):
    """Why a run ends, in one line for the user, and with which exit code. To be raised on all
    ranks."""

    def __init__(self, text: str, code: int):
        super().__init__(text)
        self.code = code


@dataclass(frozen=True)
class Failure:
    """Why a run ends early: the error of the rank `process`, in one line; every other rank exits
    with `code`.

    `silent`: that rank died and cannot report it itself.
    """

    process: ProcessId
    text: str
    code: int = 1
    silent: bool = False


def this_process() -> ProcessId:
    """The id of this process."""
    host = socket.gethostname()
    info = launcher.info()
    return ProcessId(info.rank, os.getpid(), host, info.node or host)


def mib_moved() -> int:
    """MiB that this process has read and written, where the system counts them."""
    try:
        with open("/proc/self/io", "rb") as file:
            first, second = file.read().split(b"\n")[:2]
        return int(first.split()[1]) + int(second.split()[1]) >> IO_STEP
    except (OSError, ValueError, IndexError):
        return 0


def frames_of(frame: FrameType | None) -> list[FrameType]:
    """The frames of a stack, outermost first."""
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames[::-1]


def exit_now(code: int, text: str = "") -> NoReturn:
    """End this process and its workers immediately, with `text` on stderr."""
    if text:
        # Ctrl-C also ends the `tee` that stderr may be a pipe to
        with contextlib.suppress(OSError):
            os.write(2, text.encode(errors="replace"))
    # where nobody loaded it there are no workers
    processes = sys.modules.get("multiprocessing.process")
    for child in getattr(processes, "active_children", list)():
        child.kill()
    launcher.remove_log_folder()
    os._exit(code)


def code_location(frames: Sequence[traceback.FrameSummary]) -> str:
    """`function (file:line)` of the innermost frame that is neither torch's nor Python's."""
    libraries = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib"))
    own_frames = [frame for frame in frames if not frame.filename.startswith((*libraries, "<"))]
    frame = (own_frames or list(frames))[-1]
    return f"{frame.name} ({_below_the_top(Path(frame.filename))}:{frame.lineno})"


def _below_the_top(file: Path) -> str:
    """The path from `megatron`, `tools` or `tests` on; of other code, its last three parts."""
    tops = [
        index for index, folder in enumerate(file.parts) if folder in ("megatron", "tools", "tests")
    ]
    return "/".join(file.parts[tops[-1] if tops else -3 :])
