"""Processors and memory that this process may use: what the machine has, less the limits of its
control groups (v1 and v2, every level that shows), its affinity and its SLURM job. Needs no torch.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from megatron import launcher
from megatron.small_files import read_text

ROOT = Path("/")


def processors() -> int:
    """Processors on which this process may run, whatever share of their time it gets."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1


def shows_accelerator(root: Path = ROOT) -> bool:
    """Whether a GPU of any kind shows among the device files."""
    names = ("nvidia[0-9]*", "dxg", "kfd", "dri/renderD*")
    return any(file for name in names for file in (root / "dev").glob(name))


def cores(root: Path = ROOT, environ: Mapping[str, str] = os.environ) -> int:
    """Processors that this process may keep busy at once, at least 1."""
    limits = [processors()]
    for folder in _groups("cpu", root):
        quota = [*_numbers(folder / "cpu.max"), *_numbers(folder / "cpu.cfs_quota_us")]
        period = [*quota[1:], *_numbers(folder / "cpu.cfs_period_us")]
        if quota and period:
            limits.append(quota[0] // period[0])
    of_job, _ = launcher.slurm_share(environ)
    return max(1, min(limits if of_job is None else [*limits, of_job]))


def total_memory(root: Path = ROOT, environ: Mapping[str, str] = os.environ) -> int:
    """Bytes that the processes on this host which share its limits can have together."""
    try:
        limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    except (AttributeError, ValueError, OSError):
        limits = [1 << 62]  # nobody says: no limit
    limits += [limit for limit, _ in _memory_groups(root)]
    _, of_job = launcher.slurm_share(environ)
    return min(limits if of_job is None else [*limits, of_job])


def available_memory(root: Path = ROOT, environ: Mapping[str, str] = os.environ) -> int:
    """Bytes that are to be had now: files in the page cache, which give way, do not count as
    used."""
    free = [total_memory(root, environ)]
    free += [1024 * kib for kib in _fields(root / "proc/meminfo", "MemAvailable:")]
    free += [limit - used for limit, used in _memory_groups(root)]
    return max(0, min(free))


def _memory_groups(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, bytes in use that do not give way) of each control group that has a limit."""
    for folder in _groups("memory", root):
        limit = [*_numbers(folder / "memory.max"), *_numbers(folder / "memory.limit_in_bytes")]
        used = [*_numbers(folder / "memory.current"), *_numbers(folder / "memory.usage_in_bytes")]
        if limit and used:
            # those of groups below it, where v1 counts them apart
            cached = [
                *_fields(folder / "memory.stat", "total_inactive_file"),
                *_fields(folder / "memory.stat", "inactive_file"),
            ]
            yield limit[0], used[0] - sum(cached[:1])


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """The folders of this process's control groups, from its own to the outermost. In a container
    the outermost that shows is the container's own, whatever its name outside."""
    try:
        lines = read_text(root / "proc/self/cgroup").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mounts = (controllers, controller) if controllers else ("", "unified")
        for mount in mounts:
            outermost = root / "sys/fs/cgroup" / mount
            own = outermost if ".." in path else outermost / path.strip("/")
            for folder in (own, *own.parents):
                yield folder
                if folder == outermost:
                    break


def _numbers(file: Path) -> list[int]:
    """The numbers of a file; none if it is missing, or says `max` or -1: no limit."""
    try:
        words = read_text(file).split()
        return [] if words[:1] in (["max"], ["-1"]) else [int(word) for word in words]
    except (OSError, ValueError):
        return []


def _fields(file: Path, name: str) -> list[int]:
    """The number of each line `name number ...` of a file; none if it is missing."""
    try:
        lines = [line.split() for line in read_text(file).splitlines()]
    except (OSError, ValueError):
        return []
    return [int(words[1]) for words in lines if words[:1] == [name] and words[1:]]
