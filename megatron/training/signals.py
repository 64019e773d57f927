"""How a run is left before its end: signals, Ctrl-C and errors. Knows nothing of what is run, and needs no torch."""
from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from types import FrameType
from typing import NoReturn

from megatron import log
from megatron.checkpoint.disk import CheckpointError

WATCHED = (signal.SIGTERM, signal.SIGUSR1)
INTERRUPTED = 130               # what a shell reports of a program that Ctrl-C ended
SAME_REQUEST_SECONDS = 1.0      # a scheduler and a launcher both pass one request on
FIRST_RANK_WAITS, OTHERS_WAIT = 0.5, 3.0


class SignalWatch:
    """Hears signals at once, also while the main thread waits inside a library: a thread of its own reads them.

    With `catch_interrupts`, Ctrl-C ends the process with one line and exit code 130; `advice` is the line's second
    half. With `remember_requests`, the first SIGTERM or SIGUSR1 is kept in `received`; a second one, at least a second
    later, ends the process. Both are to be called in the main thread.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.advice = "training had not begun"
        self._received_at = 0.0
        self._listener: threading.Thread | None = None

    def catch_interrupts(self) -> None:
        """From now on Ctrl-C means: one line, no traceback, exit code 130."""
        self._listen(signal.SIGINT)

    def remember_requests(self) -> None:
        """From now on SIGTERM and SIGUSR1 mean: save and leave, when the loop comes to it."""
        self._listen(*WATCHED)

    def _listen(self, *numbers: signal.Signals) -> None:
        first = self._listener is None
        if first:
            read_end, write_end = os.pipe()
            os.set_blocking(write_end, False)
            signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
            os.register_at_fork(after_in_child=_deafen)
            self._listener = threading.Thread(target=self._hear, args=(read_end,), name="signals", daemon=True)
        for number in numbers:
            signal.signal(number, _leave_to_listener)
        if first:
            self._listener.start()

    def _hear(self, read_end: int) -> None:
        while True:
            for number in os.read(read_end, 64):
                if number == signal.SIGINT:
                    start = "\n" if os.isatty(2) else ""            # below the terminal's ^C
                    _exit(INTERRUPTED, f"{start}interrupted: {self.advice}\n")
                elif number in WATCHED:
                    self._request(signal.Signals(number))

    def _request(self, number: signal.Signals) -> None:
        if self.received is None:
            self.received, self._received_at = number, time.monotonic()
        elif time.monotonic() - self._received_at > SAME_REQUEST_SECONDS:
            _exit(128 + number, "second signal: leaving now, without a save\n")


def _leave_to_listener(number: int, frame: FrameType | None) -> None:
    """What Python itself does about a signal that the listener hears: nothing."""


def _deafen() -> None:
    """In a forked child: its signals are not the parent's."""
    signal.set_wakeup_fd(-1)


def _exit(code: int, text: str, rank: int = 0) -> NoReturn:
    """End this process and its workers at once; `text` is written by `rank` only."""
    if text and log.rank() == rank:
        os.write(2, text.encode(errors="replace"))
    processes = sys.modules.get("multiprocessing.process")          # where nobody loaded it there are no workers
    for child in getattr(processes, "active_children", list)():
        child.kill()
    os._exit(code)


class WorkerSignals:
    """Signals in a worker process: ending the run is the parent's affair, and the worker must not die before it."""

    def __init__(self) -> None:
        self._first_at: float | None = None

    def install(self) -> None:
        """Ignore Ctrl-C and, where the parent catches them, the first SIGTERM and SIGUSR1."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for number in WATCHED:
            caught = signal.getsignal(number) is _leave_to_listener
            signal.signal(number, self._outlive if caught else signal.SIG_DFL)

    def _outlive(self, number: int, frame: FrameType | None) -> None:
        """A request to the whole process group must not cost the parent its data; asked again, the worker goes."""
        now = time.monotonic()
        self._first_at = now if self._first_at is None else self._first_at
        if now - self._first_at > SAME_REQUEST_SECONDS:
            os._exit(128 + number)


def leave_with(error: Exception) -> NoReturn:
    """Say what went wrong and end this process with exit code 1.

    What is wrong for one rank is mostly wrong for all, and a rank that fails breaks the connections of the others: rank
    0 speaks first, and the others stay silent long enough for a launcher to end them.
    """
    rank, alone = log.rank(), log.world_size() == 1
    if not alone:
        time.sleep(OTHERS_WAIT if rank else FIRST_RANK_WAITS)
    text = describe(error)
    sys.stdout.flush()
    _exit(1, text if alone or rank == 0 else f"rank {rank}: {text}", rank)


def describe(error: Exception) -> str:
    """One line where the user can mend it or another rank says it; otherwise the traceback."""
    text = str(error) or type(error).__name__
    if isinstance(error, (ValueError, OSError, ArithmeticError, CheckpointError)):
        return f"error: {text}\n"
    if type(error).__name__.startswith("Dist") or "Connection closed by peer" in text or "Connection reset" in text:
        return f"error: the connection to another rank is lost; its own message says why ({text.splitlines()[0]})\n"
    if "InvalidCxxCompiler" in text:
        return "error: --torch-compile needs a C++ compiler that works; install one (say g++), or leave the flag out\n"
    return "".join(traceback.format_exception(error))
