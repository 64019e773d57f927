"""Where the operations of fused_ops.py run."""

from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from megatron.kernels.libraries import load_problem

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def fused_ops(device: torch.device, dtype: torch.dtype) -> ModuleType | None:
    """kernels/cuda/fused_ops.py where its operations run, else None."""
    if device.type == "cpu" or torch.compiler.is_compiling():
        return None
    if unavailable_reason(device, dtype) is not None:
        return None
    from megatron.kernels.cuda import fused_ops as operations

    return operations


def arranged(x: Tensor, batch_first: bool) -> Tensor:
    """x [s, b, n, d] in memory without gaps, sample by sample if `batch_first`, else position by
    position; x itself where it is so already. Torch copies such views number by number."""
    rows = x.transpose(0, 1) if batch_first else x
    if rows.is_contiguous():
        return x
    if fused_ops(x.device, x.dtype):
        return torch.ops.megatron.move(x, batch_first)
    rows = rows.contiguous()
    return rows.transpose(0, 1) if batch_first else rows


def unavailable_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why they cannot run here; None if they can. The meta device stands for CUDA."""
    if device.type not in ("cuda", "meta"):
        return f"CUDA only; the device is {device.type}"
    if dtype not in DTYPES:
        return f"not for {dtype}"
    if device.type == "meta":
        return None
    why_not = load_problem("triton", "triton", "it comes with torch's CUDA builds for Linux")
    return why_not or _launch_problem(device)


@cache
def _launch_problem(device: torch.device) -> str | None:
    """Why a kernel of one block does not run there. Triton compiles C for its first launch, which
    fails without a compiler or Python's headers, in the middle of the first step."""
    from megatron.kernels.cuda import triton_kernels as kernels

    try:
        kernels.RUNS["swiglu"](torch.zeros(2, 1, device=device)).tolist()
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        return f"Triton's first kernel fails ({reason}); it needs gcc and Python.h (python3-dev)"
    return None
