"""How a program ends early: Ctrl-C at any moment is one line on stderr and exit code 130; standard
output that cannot be written (a full disk) is one line and exit code 1, one whose reader has closed
it (`head`) exit code 141. A standard stream that was closed before the start is the null device.

A program installs the handler before its slow imports and runs its main function under `run`:

    from megatron import interrupt
    if __name__ == "__main__":
        interrupt.exit_at_once()
    import numpy
    ...
    if __name__ == "__main__":
        sys.exit(interrupt.run(main, sys.argv[1:]))
"""

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, NoReturn, TextIO, TypeGuard

from megatron.problems import printable

INTERRUPTED = 130  # the exit code that shells report for a program ended by Ctrl-C
OUTPUT_CLOSED = 141  # ... for one that wrote to a pipe that nobody reads any more
_DIE_WITH_PARENT = 1  # Linux: prctl's PR_SET_PDEATHSIG


class PrintableOutput:
    """A standard stream of a tool: whatever it prints is `printable`; `as_is` is the stream."""

    def __init__(self, stream: TextIO):
        self.as_is = stream

    def write(self, text: str) -> int:
        """Write `text` so that it does not act on a terminal."""
        return self.as_is.write(printable(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.as_is, name)


def as_is(stream: TextIO) -> TextIO:
    """The stream for a program's own control characters."""
    return getattr(stream, "as_is", stream)


class CheckedOutput:
    """Standard output of a program: where it cannot be written, the program ends with one line on
    stderr and SystemExit(1), where its reader has closed it with SystemExit(141) alone. Everything
    else is that of `stream`."""

    def __init__(self, stream: TextIO):
        self.stream = stream

    def write(self, text: str) -> int:
        """Write `text`. Raises SystemExit."""
        try:
            return self.stream.write(text)
        except OSError as error:
            self._end(error)

    def flush(self) -> None:
        """Write what is in memory. Raises SystemExit."""
        try:
            self.stream.flush()
        except OSError as error:
            self._end(error)

    def _end(self, error: OSError) -> NoReturn:
        discard_output()
        if isinstance(error, BrokenPipeError):  # the reader has seen enough, as `head` has
            raise SystemExit(OUTPUT_CLOSED) from None
        sys.stderr.write(f"error: standard output cannot be written: {error.strerror or error}\n")
        raise SystemExit(1) from None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def check_output(own_prints: bool = False) -> None:
    """From now on a standard output that cannot be written ends this program with one line; with
    `own_prints`, where nobody else's code prints, both streams are `PrintableOutput`."""
    if own_prints and not isinstance(sys.stderr, PrintableOutput):
        sys.stdout, sys.stderr = PrintableOutput(sys.stdout), PrintableOutput(sys.stderr)
    if not isinstance(sys.stdout, CheckedOutput):
        sys.stdout = CheckedOutput(sys.stdout)


def data_output() -> CheckedOutput:
    """Standard output for what is data, or printable already, so that it stays as it is."""
    return CheckedOutput(as_is(sys.stdout))


def discard_output() -> None:
    """Let what is still in memory, and what follows, go to the null device: the interpreter writes
    it at its end."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def exit_at_once() -> None:
    """From now on Ctrl-C ends this process with one line and exit code 130, without any cleanup.

    A process started with SIGINT ignored (nohup, a background job of a script) keeps ignoring it.
    A Python without torch or numpy, as outside of the environment, ends it with one line, too.
    """
    _open_closed_streams()
    sys.excepthook = _name_missing_package
    parent = os.getpid()
    _install(lambda number, frame: end(parent))


def lacks_package(error: BaseException) -> TypeGuard[ModuleNotFoundError]:
    """Whether this Python has no numpy or torch; uncaught, such an error is one line."""
    return isinstance(error, ModuleNotFoundError) and error.name in ("numpy", "torch")


def _name_missing_package(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if lacks_package(error):
        sys.stderr.write(
            f"error: {sys.executable} has no {error.name}; activate the environment of this suite "
            "(. .venv/bin/activate), which make install makes [package-missing]\n"
        )
    else:
        sys.__excepthook__(kind, error, trace)


def _open_closed_streams() -> None:
    """Give each standard stream that was closed at the start (`>&-`) the null device, before
    another file gets its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode)  # gets the lowest free number, which is the stream's
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def end_with_parent(parent: int) -> None:
    """From now on the kernel kills this forked process as soon as process `parent` has ended, even
    by SIGKILL (Linux)."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl:
        prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def run(main: Callable[[Sequence[str]], int | None], argv: Sequence[str]) -> int:
    """The exit code of `main(argv)`, where Ctrl-C raises KeyboardInterrupt; uncaught: one line and
    130. All output is written when it returns; where it cannot be, SystemExit is raised as by
    CheckedOutput.

    During an import, whose code may not survive an exception, Ctrl-C ends the process at once.
    `main` may install handlers of its own.
    """
    parent = os.getpid()

    def interrupt(number: int, frame: FrameType | None) -> None:
        if _imports(frame):
            end(parent)
        raise KeyboardInterrupt

    try:
        _install(interrupt)
        check_output(own_prints=True)
        return _all_written(main, argv)
    except KeyboardInterrupt:
        sys.stderr.write(_line())
        return INTERRUPTED
    finally:
        exit_at_once()  # for the interpreter's own shutdown
        gc.freeze()  # or it would look through torch's objects once more: a third of a second


def _all_written(main: Callable[[Sequence[str]], int | None], argv: Sequence[str]) -> int:
    try:
        code = main(argv) or 0
    except SystemExit:
        sys.stdout.flush()
        raise
    sys.stdout.flush()
    return code


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


def end(parent: int) -> NoReturn:
    """End this process as Ctrl-C does, without any cleanup; the one line comes from `parent`, not
    from the processes that it forked."""
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
