"""Progress of long work on stderr: percent, rate and ETA by elapsed time."""

import sys
import time
from collections.abc import Callable
from typing import TypeVar

from megatron.interrupt import as_is
from megatron.problems import printable

Result = TypeVar("Result")

SECONDS = 5.0  # between two lines
COLUMNS = 100  # of a line
TERMINAL_SECONDS = 0.2  # between two updates of the one line on a terminal


class Progress:
    """Progress of work on `total` bytes. On a terminal one line is updated; elsewhere a line is
    printed every SECONDS.

    Of input without a size (`total` 0, a pipe) only the details are printed. With `resumed`, the
    first update says where the work began, so that rate and ETA are those of this process. `shift`
    is added to every update, for work that counts its bytes in several passes.
    """

    def __init__(self, total: int, resumed: bool = False) -> None:
        self.shift = 0
        self.total = total
        self._first = None if resumed else 0
        self._start = self._shown = time.monotonic()
        self.terminal = sys.stderr.isatty()

    def update(self, done: int, details: str = "") -> None:
        """`done` bytes are behind us; `details` is printed before the rate, as "12 documents"."""
        done += self.shift
        now = time.monotonic()
        if self._first is None:
            self._first = done
        if now - self._shown < (TERMINAL_SECONDS if self.terminal else SECONDS):
            return
        text = details
        if self.total:
            if done <= self._first:
                return
            rate = (done - self._first) / max(now - self._start, 1e-9)
            remaining = max(self.total - done, 0) / rate
            share = min(1.0, done / self.total)
            text = (
                f"{share:6.1%}, {details + ', ' if details else ''}{rate / 1e6:.1f} MB/s, ETA "
                f"{clock(remaining)}"
            )
        self._shown = now
        text = text[:COLUMNS]
        if self.terminal:
            as_is(sys.stderr).write(f"\r{printable(text)}\x1b[K")
        else:
            sys.stderr.write(f"{text}\n")
        sys.stderr.flush()

    def clear(self) -> None:
        """Remove the line from the terminal, before something else is printed."""
        if self.terminal:
            as_is(sys.stderr).write("\r\x1b[K")
            sys.stderr.flush()


def counted(make: Callable[[], Result], size: int, progress: Progress) -> Callable[[], Result]:
    """`make`, which makes `size` bytes of a file, telling `progress` when it is called."""

    def counting() -> Result:
        result = make()
        progress.shift += size
        progress.update(0, f"{progress.shift / 1e9:.2f} of {progress.total / 1e9:.2f} GB")
        return result

    return counting


def clock(seconds: float) -> str:
    """h:mm:ss."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
