"""How CPU threads of this process wait for work, which torch's OpenMP reads once, when it loads.
Needs no torch.

OpenMP's default is to spin for some milliseconds, longer than the gaps between operations, so that
the next one starts at once: a third of a small training step. Where more threads run than there are
free cores, a thread that spins takes the core from one that works; there they sleep at once.
"""

import os
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from megatron import host, launcher

# Whoever sets one of these has decided already.
OWN = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


@dataclass(frozen=True)
class Usage:
    """Seconds of processor time that were used up to now: by all processes on this process's cores,
    and by this one."""

    time: float
    everybody: float
    own: float


def usage(stat: Path = Path("/proc/stat")) -> Usage | None:
    """Now, or None where the system does not say it."""
    try:
        lines = stat.read_text(encoding="ascii").splitlines()
        cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    except (OSError, AttributeError):
        return None
    ticks = 0
    for line in lines:
        name, *values = line.split()
        if name in cores:
            idle = int(values[3]) + int(values[4])  # with those that wait for a disk
            ticks += sum(map(int, values[:8])) - idle
    return Usage(time.monotonic(), ticks / TICKS_PER_SECOND, time.process_time())


def busy_cores(before: Usage | None, after: Usage | None, ranks: int) -> int:
    """Cores that other processes kept busy between the two; other ranks of this run, which start as
    well, do not count."""
    if before is None or after is None or after.time - before.time < 0.1:
        return 0
    by_others = (after.everybody - before.everybody) - (after.own - before.own)
    return max(0, round(by_others / (after.time - before.time)) - (ranks - 1))


def spinning_fits(environ: Mapping[str, str], free: int, info: launcher.LaunchInfo) -> bool:
    """Whether the threads of all ranks on this host find a free core each. OMP_NUM_THREADS: threads
    of one rank."""
    if info.local_world_size is None:
        return False
    first = environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    threads = int(first) if first.isdecimal() and int(first) else host.cores()
    return info.local_world_size * threads <= free


def set_waiting(
    before: Usage | None = None, environ: MutableMapping[str, str] = os.environ
) -> bool:
    """Decide it, before torch is imported, unless the environment has: are they to sleep? `before`:
    `usage()` when the program started. Also how many threads there are, where a quota of the
    container allows fewer than the processors that torch would count."""
    info, _ = launcher.read(environ)
    if "OMP_NUM_THREADS" not in environ and host.cores() < host.processors():
        environ["OMP_NUM_THREADS"] = str(max(1, host.cores() // (info.local_world_size or 1)))
    if any(name in environ for name in OWN):
        return False
    busy = busy_cores(before, usage(), info.local_world_size or 1)
    if not spinning_fits(environ, host.cores() - busy, info):
        environ["OMP_WAIT_POLICY"] = "passive"
        return True
    return False
