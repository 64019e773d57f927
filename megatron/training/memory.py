"""The memory of a run against that of its host and devices: refused before it is allocated, and
explained where it runs out after all."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron import host, launcher, log
from megatron.config.plan import fit
from megatron.config.plan.fit import gib
from megatron.config.plan.plan import Plan
from megatron.config.tree import Config

if TYPE_CHECKING:
    from megatron.config.command_line import CommandLine
    from megatron.training.launch.initialize import Runtime


def problems_of_host(config: Config, plan: Plan, on_cpu: bool) -> Iterator[str]:
    """A line if the ranks of this host need more memory than it has; a warning if it is more than
    what is available now."""
    ranks = launcher.info().local_world_size or 1
    rank = fit.fullest(config, plan)
    copies = sum(fit.host_copies(config, plan).values())
    needed = ranks * (copies + (rank.total if on_cpu else 0))
    total = host.total_memory()
    largest = rank.largest() if on_cpu else f"snapshots {gib(copies)} a rank"
    if needed > total:
        fewer = "keep fewer snapshots (--dry-run says for what)"
        advice = fit.remedy(config) if on_cpu else fewer
        yield (
            f"the run needs about {gib(needed)} of memory for {ranks} rank{'s' * (ranks > 1)} on "
            f"this host, which has {gib(total)}; largest: {largest}. {advice} [not-enough-memory]"
        )
    elif needed > (free := host.available_memory()):
        log.warn_once(
            f"the run needs about {gib(needed)} of memory on this host, where {gib(free)} are "
            f"available now; largest: {largest} [little-memory]"
        )


def check(line: CommandLine, plan: Plan, runtime: Runtime) -> None:
    """Raise ValueError if this rank's device (or, on CPUs, this host) has less memory than the
    fullest rank needs by the plan; warn if less is free. Nothing of a script's own model, which the
    plan does not know."""
    from megatron import device as devices

    if line.script.model_provider:
        return
    config = line.config
    on_cpu = runtime.device.type == "cpu"
    for problem in problems_of_host(config, plan, on_cpu):
        raise ValueError(problem)
    if on_cpu:
        return
    free, total = devices.free_memory(runtime.device)
    rank = fit.fullest(config, plan)
    name = f"{runtime.device} ({devices.name(runtime.device)})"
    if rank.total > total:
        raise ValueError(f"{name}: {fit.verdict(config, plan, total)[1]} [not-enough-memory]")
    if rank.total > free:
        log.warn_once(
            f"{name}: the fullest rank has {gib(rank.total)} by the plan, and {gib(free)} of "
            f"{gib(total)} are free: other processes have the rest [little-memory]"
        )


@contextlib.contextmanager
def explained(line: CommandLine, plan: Plan, runtime: Runtime) -> Iterator[None]:
    """In this context memory that ran out is a ValueError of one line: where, what is held against
    the plan, who else is on the device, and flags that take less. Not so with a script's own model,
    which the plan does not know."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if line.script.model_provider or not _ran_out(error):
            raise
        raise ValueError(_explanation(error, line.config, plan, runtime)) from None


def _ran_out(error: BaseException) -> bool:
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "DefaultCPUAllocator" in str(error)  # of a CPU: a RuntimeError
    )


def _explanation(error: BaseException, config: Config, plan: Plan, runtime: Runtime) -> str:
    from megatron import device as devices
    from megatron.training.launch.process import code_location

    rank = fit.fullest(config, plan)
    device = runtime.device
    location = code_location(traceback.extract_tb(error.__traceback__))
    tried = next(
        (sentence for sentence in str(error).split(". ") if "allocate" in sentence.lower()), ""
    )
    if device.type == "cpu":
        total = gib(host.total_memory())
        held = f"the host has {total}, {gib(host.available_memory())} of them available"
    else:
        free, limit = devices.free_memory(device)
        memory = devices.memory_report(device)
        by_others = limit - free - int(memory["reserved"])
        held = (
            f"allocated {gib(memory['allocated'])} (most {gib(memory['max allocated'])}), reserved "
            f"{gib(memory['reserved'])} of {gib(limit)}; other processes and CUDA itself "
            f"{gib(by_others)}"
        )
    return (
        f"out of memory on {device} in {location}{f': {tried.strip()}' if tried else ''}; {held}. "
        f"The plan has {gib(rank.total)} for the fullest rank: {rank.largest(4)}. "
        f"{fit.remedy(config)} [out-of-memory]"
    )
