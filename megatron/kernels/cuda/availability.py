"""Where the operations of fused_ops.py run."""

from __future__ import annotations

from types import ModuleType

import torch

from megatron import optional
from megatron.kernels.libraries import load_problem

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def fused_ops(device: torch.device, dtype: torch.dtype) -> ModuleType | None:
    """kernels/cuda/fused_ops.py where its operations run, else None."""
    if device.type == "cpu" or torch.compiler.is_compiling():
        return None
    if unavailable_reason(device, dtype) is not None:
        return None
    return optional.load("megatron.kernels.cuda.fused_ops")


def unavailable_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why they cannot run here; None if they can. The meta device stands for CUDA."""
    if device.type not in ("cuda", "meta"):
        return f"CUDA only; the device is {device.type}"
    if dtype not in DTYPES:
        return f"not for {dtype}"
    if device.type == "meta":
        return None
    why_not = load_problem("triton", "triton", "it comes with torch's CUDA builds for Linux")
    if why_not is None:
        optional.load("megatron.kernels.cuda.triton_kernels")
    return why_not
