"""Matrix products of linear layers with a separable weight gradient; knows local tensors, no module and no rank."""

from functools import cache

import torch
from torch import Tensor


@cache
def low_precision_is_native(device_type: str, dtype: torch.dtype) -> bool:
    """Whether matrix products of `dtype` run at full speed on this kind of device.

    Asked of the capability flags of the library, never of a clock: a resumed run must decide alike. fp32 and fp64
    are always native; bf16 and fp16 on a CPU are so only where oneDNN has instructions for them (AVX512, AMX, ARM).
    """
    if device_type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return True
    name = "_is_mkldnn_bf16_supported" if dtype == torch.bfloat16 else "_is_mkldnn_fp16_supported"
    supported = getattr(torch.ops.mkldnn, name, None)
    return bool(supported is not None and torch.backends.mkldnn.is_available() and supported())


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which matrix products of `tensor` are computed: its own, or fp32 where its own is emulated."""
    return tensor.dtype if low_precision_is_native(tensor.device.type, tensor.dtype) else torch.float32


def linear_weight_grad(grad_out: Tensor, x: Tensor, accumulate_into: Tensor | None = None) -> Tensor | None:
    """Gradient of the weight of y = x w^T.

    grad_out [..., out], x [..., in] -> [out, in] in x's dtype, rounded once. With `accumulate_into` (a buffer
    [out, in], as a rule fp32) the gradient is added there instead, without rounding it to x's dtype where the
    product is computed in fp32, and None is returned.
    """
    dtype = compute_dtype(x)
    rows_out = grad_out.reshape(-1, grad_out.shape[-1]).to(dtype)
    rows_in = x.reshape(-1, x.shape[-1]).to(dtype)
    if accumulate_into is None:
        return torch.mm(rows_out.t(), rows_in).to(x.dtype)
    if accumulate_into.dtype == dtype:
        accumulate_into.addmm_(rows_out.t(), rows_in)
    else:
        accumulate_into.add_(torch.mm(rows_out.t(), rows_in))
    return None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, accumulate_into: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.accumulate_into = accumulate_into
        dtype = compute_dtype(x)
        rows = x.reshape(-1, x.shape[-1]).to(dtype)
        matrix = weight.to(dtype).t()
        out = torch.mm(rows, matrix) if bias is None else torch.addmm(bias.to(dtype), rows, matrix)
        return out.to(x.dtype).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx, grad_out: Tensor):
        x, weight = ctx.saved_tensors
        rows = grad_out.reshape(-1, grad_out.shape[-1]).to(compute_dtype(x))
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.mm(rows, weight.to(rows.dtype)).to(x.dtype).view(x.shape)
        if ctx.needs_input_grad[1]:
            grad_weight = linear_weight_grad(rows, x, ctx.accumulate_into)
        if ctx.needs_input_grad[2]:
            grad_bias = rows.sum(0).to(ctx.bias_dtype)
        return grad_x, grad_weight, grad_bias, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, accumulate_into: Tensor | None = None) -> Tensor:
    """y = x w^T + bias.

    x [..., in], weight [out, in], bias [out] or None, all of one dtype (bf16, fp16, fp32, fp64) -> [..., out].

    `accumulate_into`: None, or a buffer [out, in] (the parameter's fp32 `main_grad`). Then backward does
    `accumulate_into += weight gradient` itself, before any rounding to a low precision, and autograd sees no
    gradient for the weight: its `.grad` stays None and its post-accumulate hooks do not run for this use.
    """
    return _Linear.apply(x, weight, bias, accumulate_into)
