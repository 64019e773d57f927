"""What a run says where memory ran out although the plan fits."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING

from megatron import device as devices
from megatron import host
from megatron.config.plan import fit
from megatron.config.plan.fit import gib
from megatron.config.plan.plan import Plan
from megatron.config.tree import Config
from megatron.training.launch.code_location import code_location

if TYPE_CHECKING:
    from megatron.training.launch.initialize import Runtime


def is_cause(error: BaseException) -> bool:
    """Did memory run out?"""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "DefaultCPUAllocator" in str(error)  # of a CPU: a RuntimeError
    )


def explanation(error: BaseException, config: Config, plan: Plan, runtime: Runtime) -> str:
    """Where, what is held against the plan, who else is on the device, and flags that take less."""
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
