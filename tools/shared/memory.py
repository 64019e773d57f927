"""How much memory this process can get. Depends on nothing."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def free_memory() -> int:
    """Bytes of memory that this process can get, within the limit of its container."""
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, StopIteration, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(
            int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")
        )
    with contextlib.suppress(OSError, ValueError):
        limit = int((_CGROUP / "memory.max").read_text(encoding="ascii"))
        free = min(free, limit - int((_CGROUP / "memory.current").read_text(encoding="ascii")))
    return max(0, free)
