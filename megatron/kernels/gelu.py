"""GELU with tanh, and its slope."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.kernels.cpu import native
from megatron.kernels.cpu.blocking import FEW, for_each, row_blocks, wide_dtype

GELU_LINEAR = 2 * math.sqrt(2 / math.pi)  # tanh GELU is x sigmoid(GELU_LINEAR x + GELU_CUBIC x^3)
GELU_CUBIC = 0.044715 * GELU_LINEAR


def tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def tanh_gelu_in_cpp(x: Tensor) -> Tensor:
    if x.dtype == torch.bfloat16:
        return _NativeTanhGelu.apply(x)
    return tanh_gelu(x) if x.numel() < FEW else _NativeSlope.apply(x)


class _NativeTanhGelu(torch.autograd.Function):
    """Keeps its input: a slope in bf16 would be rounded."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return native.gelu(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out: Tensor):
        (x,) = ctx.saved_tensors
        return native.gelu_grad(x, grad_out)


class TanhGelu(torch.autograd.Function):
    """Computes the slope together with the value, while the sigmoid is in registers, and keeps it
    instead of the input.

    Backward turns the slope into the gradient in place; torch refuses a second backward over
    it.
    """

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        out, slope = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))
        source = x.reshape(-1)
        targets = (out.view(-1), slope.view(-1))
        linear = torch.tensor(GELU_LINEAR, dtype=wide_dtype(x), device=x.device)

        def work(run: slice) -> None:
            block = source[run].to(wide_dtype(x))
            value, rise = (
                t[run] if t.dtype == block.dtype else torch.empty_like(block) for t in targets
            )
            torch.mul(block, block, out=rise)
            torch.add(linear, rise, alpha=GELU_CUBIC, out=rise).mul_(block)
            torch.sigmoid(rise, out=value)
            # a third of x times the slope of what the sigmoid is taken of
            rise.add_(block, alpha=-2 / 3 * GELU_LINEAR)
            torch.ops.aten.sigmoid_backward.grad_input(rise, value, grad_input=rise)
            torch.add(value, rise, alpha=3, out=rise)
            value.mul_(block)
            if block.dtype != x.dtype:
                targets[0][run], targets[1][run] = value, rise

        for_each(row_blocks(len(source), 1), x.device, work)
        ctx.save_for_backward(slope)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out: Tensor):
        (slope,) = ctx.saved_tensors
        return slope.mul_(grad_out)


class _NativeSlope(TanhGelu):
    """The same by the C++."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        out, slope = native.gelu_with_slope(x)
        ctx.save_for_backward(slope)
        return out
