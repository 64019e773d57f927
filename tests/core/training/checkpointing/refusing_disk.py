"""A disk that refuses: a hook for tests.runs.train."""

import errno
import os

from megatron.checkpoint import filesystem

FULL = errno.ENOSPC
BROKEN = errno.EIO
LOCKED = errno.EACCES


def refuse(action: str, part: str, rank: int, number: int, times: int = 1) -> None:
    """A hook: on this rank the disk refuses an action, the first `times` times, on a path that
    holds `part`."""
    if int(os.environ["RANK"]) != rank:
        return
    left = times

    def step(self, what, path) -> None:
        nonlocal left
        if left and what == action and part in str(path):
            left -= 1
            raise OSError(number, os.strerror(number))

    filesystem.Disk.step = step
