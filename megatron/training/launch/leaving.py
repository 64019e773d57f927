"""The end of a run that fails: what is said of an error, by which rank, and the exit code."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, cast

from megatron import launcher, log
from megatron.checkpoint.filesystem import CheckpointError
from megatron.problems import printable
from megatron.training.launch.process import (
    HUNG,
    Failure,
    Refusal,
    code_location,
    exit_now,
    this_process,
)

if TYPE_CHECKING:
    from megatron.training.launch import rank_monitor

LOST_WAITS = 10.0  # for the news why a connection is lost


class Watch(Protocol):
    """Of `SignalWatch`."""

    monitor: Any
    limit: str
    on_failure: Callable[[Failure], None]


def leave_with(error: Exception | SystemExit, watch: Watch) -> NoReturn:
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
    exit_now(code)


def leave_for(failure: Failure) -> NoReturn:
    """Another rank has failed: end this process without output, as that one prints the error.

    torchrun reports what it sees first on its node, so there the others wait to be ended by it; on
    another node one rank reports to torchrun what happened. Without it rank 0 (or 1) says in one
    line whom to look at.
    """
    agent = launcher.under_torchrun()
    if failure.code == HUNG:  # which has been reported, above torchrun's report
        log.tell_torchrun(f"hang: {failure.process} {failure.text}")
        exit_now(HUNG)
    if agent and (launcher.info().local_rank or failure.process.node == this_process().node):
        time.sleep(log.PEERS_WAIT)
        exit_now(max(1, failure.code))
    if (
        agent
        or launcher.rank() == (0 if failure.process.rank else 1)
        and (failure.silent or failure.process.rank)
    ):
        log.last_words(
            f"rank {launcher.rank()} ends, because {failure.process} "
            f"{'' if failure.silent else 'failed: '}{failure.text}\n"
        )
    exit_now(max(1, failure.code))


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
