"""LayerNorm and RMSNorm over the last dimension."""

from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.kernels.cpu import native
from megatron.kernels.cpu.blocking import for_each, pays_off, row_blocks, wide_dtype
from megatron.kernels.cuda import fused_ops as fused
from megatron.kernels.cuda.availability import fused_ops


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool = False
) -> Tensor:
    """LayerNorm (Ba et al. 2016) over the last dimension: x [..., h], weight and bias [h] -> [...,
    h].

    Mean and variance are taken in fp32 for bf16 and fp16. `zero_centered`: the stored weight is
    gamma - 1, and the sum of the two is not rounded to a low precision.
    """
    if not zero_centered:
        if bias is not None and (ops := _one_pass(x, weight)):
            return ops.Norm.apply(x, weight, bias, eps)
        return F.layer_norm(x, weight.shape, weight, bias, eps)
    wide = wide_dtype(x)
    bias = None if bias is None else bias.to(wide)
    return F.layer_norm(x.to(wide), weight.shape, weight.to(wide) + 1, bias, eps).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    """RMSNorm (Zhang and Sennrich 2019) over the last dimension: x [..., h], weight [h] -> [...,
    h].

    The mean square is taken in fp32 for bf16 and fp16. `zero_centered`: the stored weight is gamma
    - 1, and the sum of the two is not rounded to a low precision.
    """
    weight = weight.to(wide_dtype(x)) + 1 if zero_centered else weight
    if pays_off(x):
        return _RmsNorm.apply(x, weight, eps)
    if ops := _one_pass(x, weight):
        return ops.Norm.apply(x, weight, None, eps)
    return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)


def _one_pass(x: Tensor, weight: Tensor) -> ModuleType | None:
    """The operations of CUDA with a backward of one pass, where it is for such a norm."""
    if (
        x.dtype != weight.dtype
        or x.shape[-1] > fused.WIDEST_NORM
        or x.numel() < fused.MANY_ROWS * x.shape[-1]
    ):
        return None
    return fused_ops(x.device, x.dtype)


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean square + eps) of each row, [rows, 1]."""
    return x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()


class _RmsNorm(torch.autograd.Function):
    """With y = x / rms the gradient of x is (g w - y mean(g w y)) / rms."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        if native.runs(x):
            return native.rms_norm(x, weight, eps)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        source = x.reshape(-1, x.shape[-1])
        target = out.view(-1, x.shape[-1])

        def work(rows: slice) -> None:
            block = source[rows].to(wide_dtype(x))
            torch.mul(block * _inverse_rms(block, eps), weight, out=target[rows])

        for_each(row_blocks(*source.shape), x.device, work)
        return out

    @staticmethod
    def backward(ctx, grad_out: Tensor):
        x, weight = ctx.saved_tensors
        if native.runs(x):
            grad_x, grad_weight = native.rms_norm_grad(x, weight, grad_out, ctx.eps)
            return grad_x, grad_weight.to(weight.dtype), None
        grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        source, grads, target = (t.reshape(-1, x.shape[-1]) for t in (x, grad_out, grad_x))
        blocks = row_blocks(*source.shape)
        weight_grads = torch.empty((len(blocks), len(weight)), dtype=wide_dtype(x), device=x.device)

        def work(numbered: tuple[int, slice]) -> None:
            number, rows = numbered
            block = source[rows].to(wide_dtype(x))
            grad = grads[rows].to(wide_dtype(x))
            inverse = _inverse_rms(block, ctx.eps)
            y = block * inverse
            weight_grads[number] = (grad * y).sum(0)
            grad = grad * weight
            mean = (grad * y).mean(-1, keepdim=True)
            torch.mul(grad.addcmul_(y, mean, value=-1), inverse, out=target[rows])

        for_each(list(enumerate(blocks)), x.device, work)
        return grad_x, weight_grads.sum(0).to(weight.dtype), None
