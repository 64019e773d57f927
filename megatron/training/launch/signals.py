"""Signal handling and abnormal exit: signals, Ctrl-C and errors."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from megatron import interrupt, launcher
from megatron.training.launch.process import Failure, exit_now, this_process

if TYPE_CHECKING:
    from megatron.training.launch import progress, rank_monitor, start_watch

WATCHED = (signal.SIGTERM, signal.SIGUSR1)
SAME_REQUEST_SECONDS = 1.0  # a scheduler and a launcher both pass one request on


class SignalWatch:
    """Hears signals at once, also while the main thread waits inside a library: a thread of its own
    reads them.

    With `catch_interrupts`, Ctrl-C ends the process with one line and exit code 130; `advice` is
    the line's second half. With `remember_requests`, the first SIGTERM or SIGUSR1 is kept in
    `received`; a second one, at least a second later, ends the process. Both are to be called in
    the main thread. Once the ranks are connected, `monitor` notifies them of each other's failure
    (of one rank: watches it); `limit` is that of a collective, as a user types it.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.advice = "training had not started"
        self.monitor: rank_monitor.MonitorClient | progress.OwnWatch | None = None
        self.start: start_watch.StartWatch | None = None
        # what a process does before it ends at once
        self.leaving: Callable[[], None] = lambda: None
        # the run ends by this error
        self.on_failure: Callable[[Failure], None] = lambda failure: None
        self.limit = ""
        self._received_at = 0.0
        self._listener: threading.Thread | None = None

    def catch_interrupts(self) -> None:
        """From now on Ctrl-C means one line, no traceback, exit code 130; a crash in a library
        shows where it was; and the deaths of torchrun and of other ranks are noticed."""
        faulthandler.enable(all_threads=False)
        if launcher.world_size() > 1:
            # no file is read any more when a rank or a file system has failed
            import megatron.training.launch.leaving  # noqa: F401
            from megatron.training.launch.hang import prepare

            prepare()
        if launcher.world_size() > 1 or launcher.under_torchrun():
            from megatron.training.launch.start_watch import StartWatch

            self.start = StartWatch(self.leave, self.leave_for)
        self._listen(signal.SIGINT)

    def remember_requests(self) -> None:
        """From now on SIGTERM and SIGUSR1 request a save and an exit, which the loop carries
        out."""
        self._listen(*WATCHED)

    def _listen(self, *numbers: signal.Signals) -> None:
        listener = None
        if self._listener is None:
            read_end, write_end = os.pipe()
            os.set_blocking(write_end, False)
            signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
            os.register_at_fork(after_in_child=_deafen)
            self._listener = listener = threading.Thread(
                target=self._hear, args=(read_end,), name="signals", daemon=True
            )
        for number in numbers:
            signal.signal(number, leave_to_listener)
        if listener is not None:
            listener.start()

    def _hear(self, read_end: int) -> None:
        while True:
            for number in os.read(read_end, 64):
                if number == signal.SIGINT:
                    start = "\n" if os.isatty(2) else ""  # below the terminal's ^C
                    self.leave(interrupt.INTERRUPTED, f"{start}interrupted: {self.advice}\n")
                elif number in WATCHED:
                    self._request(signal.Signals(number))

    def _request(self, number: signal.Signals) -> None:
        if self.received is None:
            self._received_at = time.monotonic()
            self.received = number
        elif time.monotonic() - self._received_at > SAME_REQUEST_SECONDS:
            self.leave(128 + number, "second signal: exiting immediately, without a save\n")

    def leave_for(self, failure: Failure) -> NoReturn:
        """Another rank has failed: end this process."""
        self.on_failure(failure)
        self.leaving()
        from megatron.training.launch.leaving import leave_for

        leave_for(failure)

    def leave(self, code: int, text: str) -> NoReturn:
        """End the run; of all ranks that received the signal, the lowest prints the line."""
        self.on_failure(Failure(this_process(), text.strip(), code))
        self.leaving()
        if self.monitor:
            self.monitor.report(text.strip().removeprefix("error: "), code)
            exit_now(code, text)
        exit_now(code, text if launcher.rank() == 0 else "")


def leave_to_listener(number: int, frame: FrameType | None) -> None:
    """Python's own handler of a signal that the listener handles: it does nothing."""


def _deafen() -> None:
    """In a forked child: its signals are not the parent's."""
    signal.set_wakeup_fd(-1)


class WorkerSignals:
    """Signals in a worker process: ending the run is the parent's affair, and the worker must not
    die before it."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, leave: Callable[[int], object] = os._exit
    ) -> None:
        self._clock = clock
        self._leave = leave
        self._first_at: float | None = None

    def install(self) -> None:
        """Ignore Ctrl-C and, where the parent catches them, the first SIGTERM and SIGUSR1."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for number in WATCHED:
            caught = signal.getsignal(number) is leave_to_listener
            signal.signal(number, self._outlive if caught else signal.SIG_DFL)

    def _outlive(self, number: int, frame: FrameType | None) -> None:
        """A signal to the whole process group must not end the workers that the parent still needs;
        on a second signal the worker exits."""
        now = self._clock()
        self._first_at = now if self._first_at is None else self._first_at
        if now - self._first_at > SAME_REQUEST_SECONDS:
            self._leave(128 + number)
