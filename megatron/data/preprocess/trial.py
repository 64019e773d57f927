"""Foreign code, that of tokenizers and chat templates: tried where it can be ended."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing import connection

SECONDS = 60


def try_first(work: Callable[[], object], subject: str, seconds: float = SECONDS) -> None:
    """Do `work` in a process of its own: nothing can end it in this one while native code holds
    Python's lock. Raises ValueError, about `subject`, if it fails or is not done in time."""
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_try, args=(work, sending), daemon=True)
    process.start()
    sending.close()
    reason = f"has not finished its first text in {seconds:.0f} s"
    try:
        if receiving.poll(seconds):
            reason = receiving.recv()
    except EOFError:
        process.join()
        reason = f"ends the process at its first text (exit code {process.exitcode})"
    finally:
        process.kill()
        process.join()
        receiving.close()
    if reason:
        raise ValueError(f"{subject}: {reason}; give another one [tokenizer-fails]")


def _try(work: Callable[[], object], pipe: connection.Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # Rust's panics
    reason = ""
    try:
        work()
    except ValueError:  # as it will say itself
        pass
    except BaseException as error:
        reason = f"fails ({failure(error)})"
    pipe.send(reason)


def failure(error: BaseException) -> str:
    """What foreign code raised, as text. Raises an error that is neither an Exception nor pyo3's
    PanicException, which is none and in no module."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
