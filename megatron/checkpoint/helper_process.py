"""A background process forked from a rank, controlled over a pipe, and ended with it."""

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import NoReturn

from megatron import interrupt


class SideProcess:
    """The rank's side. `pipe` leads to the process; `exit_code` is None until its exit has been
    noticed."""

    def __init__(self, serve: Callable[[Connection], None]):
        """Fork, and have the process call `serve` with its end of the pipe; when that returns it
        ends."""
        self.pipe, child_end = multiprocessing.Pipe()
        parent = os.getpid()
        self.exit_code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _run(serve, child_end, self.pipe, parent)
        child_end.close()

    def alive(self) -> bool:
        """Whether the process is running."""
        self.wait(os.WNOHANG)
        return self.exit_code is None

    def wait(self, options: int = 0) -> None:
        """Wait for its end; with os.WNOHANG only look whether it has come."""
        if self.exit_code is None:
            pid, status = os.waitpid(self.pid, options)
            self.exit_code = os.waitstatus_to_exitcode(status) if pid else None

    def close(self) -> None:
        """End it, whatever it is doing."""
        if self.alive():
            # data workers hold copies of the pipe, so that closing it says nothing
            os.kill(self.pid, signal.SIGKILL)
        self.pipe.close()
        self.wait()


def _run(
    serve: Callable[[Connection], None], pipe: Connection, parent_end: Connection, parent: int
) -> NoReturn:
    """The background process. It ignores signals, which the rank handles."""
    code = 1
    try:
        parent_end.close()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        interrupt.end_with_parent(parent)  # a rank that is killed cannot say so
        serve(pipe)
        code = 0
    except (EOFError, OSError):  # the rank has exited
        code = 0
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    os._exit(code)
