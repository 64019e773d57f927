"""Which process a rank is, and why a run ends early."""

import os
import socket
import sysconfig
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

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
