"""Linear layers of a few rows of fp32 on a CPU by this suite's C++ (few_rows.cpp), which reads the
weight, in fp32, bf16 or fp16, at the speed of memory; forward only."""

import torch
from torch import Tensor

from megatron.kernels.cpu.native import load_built

INTERFACE = 2
MOST_ROWS = 16  # with more, a library's GEMM is as fast


def load(capability: str):
    """few_rows.cpp as built for this processor, or why there is none (a str)."""
    return load_built("few_rows", INTERFACE, capability)


def runs(x: Tensor, weight: Tensor) -> bool:
    """Whether the C++ multiplies these: a few rows of fp32 on a CPU."""
    return (
        0 < x.numel() <= MOST_ROWS * x.shape[-1]
        and x.device.type == "cpu"
        and x.dtype == torch.float32
        and weight.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and not isinstance(load(torch.backends.cpu.get_cpu_capability()), str)
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., in] of fp32, weight [out, in] and bias [out] of fp32 or None -> [..., out]."""
    outputs, width = weight.shape
    # The C++ reads memory by these sizes.
    assert x.dtype == torch.float32 and x.shape[-1] == width, (x.shape, width)
    assert bias is None or (bias.dtype == torch.float32 and bias.numel() == outputs)
    x, weight = x.contiguous(), weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    out = x.new_empty((*x.shape[:-1], outputs))
    module = load(torch.backends.cpu.get_cpu_capability())
    getattr(module, f"linear_{str(weight.dtype).removeprefix('torch.')}")(
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
