"""The watch of a run of one rank, which has no rank monitor: a thread that names a hang and ends
the process, if the interpreter's lock is free."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from types import FrameType

from megatron.config.tree import Config
from megatron.training.launch import hang, progress
from megatron.training.launch.hang_limits import limits
from megatron.training.launch.process import HUNG, Failure, this_process
from megatron.training.launch.progress import Progress

LEAVES_WITHIN = 5.0  # the ledger and the lock may be on a dead disk
DEBUGGERS = ("/bdb.py", "/pdb.py", "/IPython/", "/pydevd", "/debugpy/")


class OwnWatch(Progress):
    """In the place of a `MonitorClient`."""

    def __init__(
        self,
        config: Config,
        leave_for: Callable[[Failure], None],
    ):
        super().__init__(limits(config))
        self._leave_for = leave_for
        threading.Thread(target=self._run, name="hang watch", daemon=True).start()

    def report(self, text: str, code: int = 1) -> None:
        """There is no other rank to notify."""

    def _run(self) -> None:
        while True:
            time.sleep(progress.TICK)
            self._look()
            if self._is_stalled():
                frames = self._main_frames()
                if not _is_debugged(frames):
                    self._end(frames)
                self._ticks = 0

    def _end(self, frames: list[FrameType]) -> None:
        answer = hang.describe(str(self._phase), frames)
        failure = hang.name(this_process(), self._seconds, answer)
        threading.Thread(target=self._leave_for, args=(failure,), daemon=True).start()
        time.sleep(LEAVES_WITHIN)
        os._exit(HUNG)


def _is_debugged(frames: list[FrameType]) -> bool:
    """Does a person look at the process?"""
    names = [frame.f_code.co_filename.replace(os.sep, "/") for frame in frames]
    return any(debugger in name for name in names for debugger in DEBUGGERS)
