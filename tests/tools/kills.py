"""A process that is killed in the middle of what it does to a disk."""

import os
import signal
from collections.abc import Callable


def status_of_killed(call: str, count: int, work: Callable[[], int]) -> int:
    """The exit status of `work` in a process that SIGKILL ends before its `count`th os.`call`: the
    negative signal, or what `work` returns if it calls that less often."""
    child = os.fork()
    if not child:
        function = getattr(os, call)
        calls = 0

        def counted(*words: object, **named: object) -> object:
            nonlocal calls
            calls += 1
            if calls == count:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*words, **named)

        setattr(os, call, counted)
        os._exit(work())
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
