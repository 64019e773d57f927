"""Linear layers of a few rows of fp32 on a CPU by this suite's C++ (few_rows.cpp), which reads the
weight at the speed of memory; forward only."""

import torch
from torch import Tensor

from megatron.kernels.cpu.native import load_built

INTERFACE = 1
MOST_ROWS = 16  # with more, a library's GEMM is as fast


def load(capability: str):
    """few_rows.cpp as built for this processor, or why there is none (a str)."""
    return load_built("few_rows", INTERFACE, capability)


def unavailable_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the C++ is unavailable for such tensors, None if it is available."""
    if device.type != "cpu" or dtype != torch.float32:
        return "only fp32 on a CPU"
    module = load(torch.backends.cpu.get_cpu_capability())
    return module if isinstance(module, str) else None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., in], weight [out, in] and bias [out] or None, both contiguous -> [..., out]."""
    outputs, width = weight.shape
    # The C++ reads memory by these sizes.
    assert x.dtype == weight.dtype == torch.float32 and x.shape[-1] == width, (x.shape, width)
    x = x.contiguous()
    out = x.new_empty((*x.shape[:-1], outputs))
    load(torch.backends.cpu.get_cpu_capability()).linear(
        x.data_ptr(),
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        x.numel() // max(1, width),
        outputs,
        width,
        torch.get_num_threads(),
    )
    return out
