"""Signal handling and abnormal exit: signals, Ctrl-C and errors."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, NoReturn, cast

from megatron import interrupt, launcher, log
from megatron.checkpoint.filesystem import CheckpointError
from megatron.problems import printable
from megatron.training.launch.process import HUNG, Failure, code_location, this_process

if TYPE_CHECKING:
    from megatron.training.launch import progress, rank_monitor, start_watch

WATCHED = (signal.SIGTERM, signal.SIGUSR1)
SAME_REQUEST_SECONDS = 1.0  # a scheduler and a launcher both pass one request on
LOST_WAITS = 10.0  # for the news why a connection is lost


class Refusal(ValueError):
    """Why a run ends, in one line for the user, and with which exit code. To be raised on all
    ranks."""

    def __init__(self, text: str, code: int):
        super().__init__(text)
        self.code = code


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
        leave_for(failure)

    def leave(self, code: int, text: str) -> NoReturn:
        """End the run; of all ranks that received the signal, the lowest prints the line."""
        self.on_failure(Failure(this_process(), text.strip(), code))
        self.leaving()
        if self.monitor:
            self.monitor.report(text.strip().removeprefix("error: "), code)
            _exit(code, text)
        _exit(code, text if launcher.rank() == 0 else "")


def leave_to_listener(number: int, frame: FrameType | None) -> None:
    """Python's own handler of a signal that the listener handles: it does nothing."""


def _deafen() -> None:
    """In a forked child: its signals are not the parent's."""
    signal.set_wakeup_fd(-1)


def _exit(code: int, text: str = "") -> NoReturn:
    """End this process and its workers immediately, with `text` on stderr."""
    if text:
        # Ctrl-C also ends the `tee` that stderr may be a pipe to
        with contextlib.suppress(OSError):
            os.write(2, text.encode(errors="replace"))
    # where nobody loaded it there are no workers
    processes = sys.modules.get("multiprocessing.process")
    for child in getattr(processes, "active_children", list)():
        child.kill()
    launcher.remove_log_folder()
    os._exit(code)


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


def leave_with(error: Exception | SystemExit, watch: SignalWatch) -> NoReturn:
    """Print the error and end this process with exit code 1 (of a SystemExit or a Refusal, with its
    own).

    What is wrong for one rank is mostly wrong for all, and a rank that fails breaks the connections
    of the others. Over the rank monitor they agree on one to print its error: the lowest of those
    that failed for reasons of their own. Without it, rank 0 prints first, and the others wait long
    enough for a launcher to end them.
    """
    monitor = None
    if launcher.world_size() > 1:  # `OwnWatch` is of one process alone
        monitor = cast("rank_monitor.MonitorClient | None", watch.monitor)
    if isinstance(error, SystemExit) and monitor is None:
        raise error  # a bad command line, which has been said
    rank = launcher.rank()
    code = error.code if isinstance(error, (SystemExit, Refusal)) else 1
    code = code if isinstance(code, int) else int(code is not None)
    text = describe(error)
    if monitor is None:
        time.sleep(log.PEERS_WAIT if rank else 0.0)
    elif _is_timeout(error):
        text = _timeout(error, monitor, watch.limit)
    elif _is_lost(error):
        time.sleep(LOST_WAITS)  # the monitor's thread ends this process when it receives the reason
    if not _is_lost(error):
        watch.on_failure(Failure(this_process(), text.strip().rpartition("\n")[2], code))
    if monitor is not None:
        monitor.report(text.strip().rpartition("\n")[2].removeprefix("error: "), code)
    sys.stdout.flush()
    if launcher.world_size() > 1 and text.startswith("Traceback"):
        log.last_words(f"{this_process()} failed:\n{text}")
    else:
        log.last_words(f"rank {rank}: {text}" if rank else text)
    _exit(code)


def leave_for(failure: Failure) -> NoReturn:
    """Another rank has failed: end this process without output, as that one prints the error.

    torchrun reports what it sees first on its node, so there the others wait to be ended by it; on
    another node one rank reports to torchrun what happened. Without it rank 0 (or 1) says in one
    line whom to look at.
    """
    agent = launcher.under_torchrun()
    if failure.code == HUNG:  # which has been reported, above torchrun's report
        log.tell_torchrun(f"hang: {failure.process} {failure.text}")
        _exit(HUNG)
    if agent and (launcher.info().local_rank or failure.process.node == this_process().node):
        time.sleep(log.PEERS_WAIT)
        _exit(max(1, failure.code))
    if (
        agent
        or launcher.rank() == (0 if failure.process.rank else 1)
        and (failure.silent or failure.process.rank)
    ):
        log.last_words(
            f"rank {launcher.rank()} ends, because {failure.process} "
            f"{'' if failure.silent else 'failed: '}{failure.text}\n"
        )
    _exit(max(1, failure.code))


def _is_timeout(error: BaseException) -> bool:
    text = str(error).lower()
    return (
        isinstance(error, RuntimeError)
        and ("timed out" in text or "timeout" in text)
        and "connect" not in text
    )


def _is_lost(error: BaseException) -> bool:
    """Whether the connection to another rank broke. Other errors of NCCL (a device given to two
    ranks, no memory) are this rank's own."""
    text = str(error)
    return type(error).__name__ in ("DistNetworkError", "DistStoreError") or any(
        sign in text
        for sign in (
            "Connection closed by peer",
            "Connection reset",
            "Broken pipe",
            "ncclRemoteError",
        )
    )


def _timeout(error: BaseException, monitor: rank_monitor.MonitorClient, limit: str) -> str:
    """Where this rank waited, and what the ranks that do not wait are doing."""
    busy = monitor.ask()
    actions = (
        f"{monitor.server_process} does not answer (stopped, or its network is cut)"
        if busy is None
        else "; ".join(busy[:8])
        or "none (a slow network, or collectives that do not fit each other)"
    )
    return (
        f"error: waited longer than {limit} allows in "
        f"{code_location(traceback.extract_tb(error.__traceback__))}. Not waiting: {actions}. Find "
        "out what keeps them, or allow more where so long a wait is right\n"
    )


def describe(error: BaseException) -> str:
    """One line where the user can fix it or another rank says it; otherwise the traceback."""
    text = printable(str(error) or type(error).__name__)
    if isinstance(error, (ValueError, OSError, ArithmeticError, CheckpointError)):
        return f"error: {text}\n"
    if _is_lost(error):
        return (
            "error: the connection to another rank is lost; its own message says why "
            f"({text.splitlines()[0]})\n"
        )
    # killed; torch raises it wherever the run is just then
    if text.startswith("DataLoader worker"):
        return (
            f"error: a data worker died ({text.partition('. ')[0]}): a file it had mapped was cut "
            "short (tools/inspect_data.py check PREFIX... shows which), or memory or /dev/shm ran "
            "out; start again from the last checkpoint\n"
        )
    if "InvalidCxxCompiler" in text:
        return (
            "error: --torch-compile needs a C++ compiler that works; install one (say g++), "
            "or omit the flag\n"
        )
    return "".join(traceback.format_exception(error))
