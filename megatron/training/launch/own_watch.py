"""The watch of a run of one rank, which has no rank monitor: a thread that names a hang and ends
the process, if the interpreter's lock is free."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

from megatron.config.tree import Config
from megatron.training.launch import hang
from megatron.training.launch.hang_limits import Phase, limits
from megatron.training.launch.process import HUNG, Failure, code_location, this_process

TICK = 1.0  # seconds between looks
LEAVES_WITHIN = 5.0  # the ledger and the lock may be on a dead disk
DEBUGGERS = ("/bdb.py", "/pdb.py", "/IPython/", "/pydevd", "/debugpy/")


class OwnWatch:
    """In the place of a `MonitorClient`. Time is counted in looks, so that a process that is
    stopped, or has no free core, does not hang."""

    def __init__(
        self,
        config: Config,
        leave_for: Callable[[Failure], None],
    ):
        self.limits = limits(config)
        self.progress: Callable[[], int] = lambda: 0
        self._leave_for = leave_for
        self._phase = Phase(hang.START_UP, limit=self.limits.startup)
        self._main = threading.main_thread().ident or 0  # it has one, since it runs
        threading.Thread(target=self._run, name="hang watch", daemon=True).start()

    def begin(self, phase: Phase) -> None:
        """The run is in `phase` from now on."""
        self._phase = phase

    def report(self, text: str, code: int = 1) -> None:
        """There is no other rank to notify."""

    def _run(self) -> None:
        seen: tuple[Any, ...] = ()
        ticks = 0
        while True:
            time.sleep(TICK)
            phase = self._phase
            now = (phase, self.progress(), hang.mib_moved() if phase.announced else 0)
            ticks = ticks + 1 if now == seen else 0
            seen = now
            if phase.limit is not None and ticks * TICK > phase.limit:
                frames = hang.frames_of(sys._current_frames()[self._main])
                if not _is_debugged(frames):
                    self._end(phase, int(ticks * TICK), frames)
                ticks = 0

    def _end(self, phase: Phase, seconds: int, frames: list[FrameType]) -> None:
        places = [(one.f_code.co_filename, one.f_code.co_name) for one in frames]
        answer = {
            "at": code_location(traceback.extract_stack(frames[-1])),
            "phase": hang.full_phase(str(phase), places),
            "stack": hang.stack_text(frames),
        }
        failure = hang.failure(this_process(), seconds, answer)
        print(hang.report(failure, answer), file=sys.stderr, flush=True)
        threading.Thread(target=self._leave_for, args=(failure,), daemon=True).start()
        time.sleep(LEAVES_WITHIN)
        os._exit(HUNG)


def _is_debugged(frames: list[FrameType]) -> bool:
    """Does a person look at the process?"""
    names = [one.f_code.co_filename.replace(os.sep, "/") for one in frames]
    return any(part in name for name in names for part in DEBUGGERS)
