"""What decides the last bits of a run beside its flags: processor, device, kernels and torch. They
are saved with a checkpoint, and a resume on others says so."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from megatron.checkpoint.state import RunState
from megatron.device import cpu_info, name


def hardware(kernels: Mapping[str, str], device: torch.device) -> dict[str, Any]:
    """Of this process: processor, device, and the `kernels` by operation of its run."""
    return {
        "processor": f"{cpu_info('model name')} {torch.backends.cpu.get_cpu_capability()}",
        "device": name(device),
        "kernels": dict(kernels),
    }


def other_hardware(kernels: Mapping[str, str], device: torch.device, state: RunState) -> str | None:
    """A line where a checkpoint was written with another processor, device, kernel or torch; None
    where not, or where an older checkpoint does not say."""
    now = hardware(kernels, device) | {"torch": f"torch {torch.__version__}"}
    saved = state.hardware and state.hardware | {"torch": f"torch {state.versions.get('torch')}"}
    changed = [f"{before} -> {after}" for before, after in _changes(saved, now)]
    if not changed:
        return None
    return (
        f"the checkpoint was written on other hardware or software ({'; '.join(changed)}): from "
        "here on the run is not bit for bit what it would be there [resume-not-bit-for-bit]"
    )


def _changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    for key, value in now.items():
        before = saved.get(key, value)
        if isinstance(value, dict) and isinstance(before, dict):
            for operation in sorted(before.keys() & value.keys()):
                if before[operation] != value[operation]:
                    yield f"{operation}: {before[operation]}", value[operation]
        elif before != value:
            yield before, value
