"""Ctrl-C in a program: one line on stderr and exit code 130, from its first statement to its last.

A program installs the handler before its slow imports and runs its main function under `run`:

    from megatron import interrupt
    if __name__ == "__main__":
        interrupt.exit_at_once()
    import numpy
    ...
    if __name__ == "__main__":
        sys.exit(interrupt.run(main, sys.argv[1:]))
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType

INTERRUPTED = 130  # the exit code that shells report for a program ended by Ctrl-C


def exit_at_once() -> None:
    """From now on Ctrl-C ends this process with one line and exit code 130, without any cleanup.

    A process started with SIGINT ignored (nohup, a background job of a script) keeps ignoring it.
    """
    parent = os.getpid()
    _install(lambda number, frame: _exit(parent))


def run(main: Callable[[Sequence[str]], int | None], argv: Sequence[str]) -> int:
    """The exit code of `main(argv)`, where Ctrl-C raises KeyboardInterrupt; uncaught: one line and
    130.

    During an import, whose code may not survive an exception, Ctrl-C ends the process at once.
    `main` may install handlers of its own.
    """
    parent = os.getpid()

    def interrupt(number: int, frame: FrameType | None) -> None:
        if _imports(frame):
            _exit(parent)
        raise KeyboardInterrupt

    try:
        _install(interrupt)
        return main(argv) or 0
    except KeyboardInterrupt:
        sys.stderr.write(_line())
        return INTERRUPTED
    finally:
        exit_at_once()  # for the interpreter's own shutdown


def _install(handler: Callable[[int, FrameType | None], None]) -> None:
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, handler)


def _imports(frame: FrameType | None) -> bool:
    """Whether an import is in progress in this frame or one of its callers."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _exit(parent: int) -> None:
    """End this process; the one line comes from `parent`, not from the processes that it forked."""
    if os.getpid() == parent:
        try:
            sys.stdout.flush()
        except Exception:
            pass  # the interrupted statement was itself writing
        with suppress(OSError):  # stderr may be a pipe to a process that Ctrl-C ended, too
            os.write(2, _line().encode())
    os._exit(INTERRUPTED)


def _line() -> str:
    return "\ninterrupted\n" if os.isatty(2) else "interrupted\n"  # below the terminal's ^C
