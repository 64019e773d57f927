"""What decides the last bits of a run beside its flags: processor, device, kernels and torch. They
are saved with a checkpoint, and a resume on others says so (load.py)."""

from collections.abc import Mapping
from typing import Any

import torch

from megatron.device import cpu_info, name


def hardware(kernels: Mapping[str, str], device: torch.device) -> dict[str, Any]:
    """Of this process: processor, device, and the `kernels` by operation of its run."""
    return {
        "processor": f"{cpu_info('model name')} {torch.backends.cpu.get_cpu_capability()}",
        "device": name(device),
        "kernels": dict(kernels),
    }
