"""For how long a rank has made no progress. Time is counted in looks of a thread, so that a process
that is stopped, or has no free core, does not hang."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from megatron.training.launch import hang
from megatron.training.launch.hang_limits import Limits, Phase

TICK = 1.0  # seconds between looks


class Progress:
    """Phase and progress of this rank; `look` is to be called once per TICK."""

    def __init__(self, limits: Limits):
        self.limits = limits
        # the actions of the pipeline that are done, say
        self.progress: Callable[[], int] = lambda: 0
        self._phase = Phase(hang.START_UP, limit=limits.startup)
        self._last: tuple[Any, ...] = ()  # phase and progress at the last look
        self._ticks = 0  # since progress
        self._main = threading.main_thread().ident or 0  # it has one, since it runs

    def begin(self, phase: Phase) -> None:
        """This rank is in `phase` from now on."""
        self._phase = phase

    def _look(self) -> None:
        phase = self._phase
        now = (phase, self.progress(), hang.mib_moved() if phase.announced else 0)
        self._ticks = self._ticks + 1 if now == self._last else 0
        self._last = now

    @property
    def _seconds(self) -> float:
        """Without progress."""
        return self._ticks * TICK

    def _is_stalled(self) -> bool:
        limit = self._phase.limit
        return limit is not None and self._seconds > limit and self._last[0] == self._phase

    def _main_frames(self) -> list[FrameType]:
        """Those of the main thread, outermost first."""
        return hang.frames_of(sys._current_frames()[self._main])
