"""Signals that ask a run to save and leave. Knows nothing of what is run."""
from __future__ import annotations

import os
import signal
from types import FrameType

WATCHED = (signal.SIGTERM, signal.SIGUSR1)


class SignalWatch:
    """After `install`, the first SIGTERM or SIGUSR1 is remembered in `received`; a second one ends the process now."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None

    def install(self) -> None:
        """Take over the watched signals, in the main thread."""
        for number in WATCHED:
            signal.signal(number, self._remember)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            os.write(2, b"second signal: leaving now, without a save\n")
            os._exit(128 + number)
        self.received = signal.Signals(number)


def ignore_interrupts() -> None:
    """For worker processes: Ctrl-C and the watched signals are the parent's affair."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in WATCHED:
        signal.signal(number, signal.SIG_DFL)
