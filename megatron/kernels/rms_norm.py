"""RMSNorm over the last dimension."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.kernels.cpu import native
from megatron.kernels.cpu.blocking import for_each, row_blocks, wide_dtype
from megatron.kernels.implementation import Implementation
from megatron.kernels.layer_norm import CENTERED, FUSED, by_apex, no_apex, one_pass_ops
from megatron.kernels.rows import Row, rivals


def _widened(x: Tensor, weight: Tensor, zero_centered: bool) -> Tensor:
    return weight.to(wide_dtype(x)) + 1 if zero_centered else weight


def _rms_norm(x: Tensor, weight: Tensor, bias: None, eps: float, zero_centered: bool) -> Tensor:
    weight = _widened(x, weight, zero_centered)
    return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)


def _rms_norm_in_one_pass(
    x: Tensor, weight: Tensor, bias: None, eps: float, zero_centered: bool
) -> Tensor:
    weight = _widened(x, weight, zero_centered)
    if ops := one_pass_ops(x, weight):
        return ops.FusedNorm.apply(x, weight, None, eps)
    return _rms_norm(x, weight, None, eps, False)


def _rms_norm_in_blocks(
    x: Tensor, weight: Tensor, bias: None, eps: float, zero_centered: bool
) -> Tensor:
    return _RmsNorm.apply(x, _widened(x, weight, zero_centered), eps)


def _rms_norm_in_cpp(
    x: Tensor, weight: Tensor, bias: None, eps: float, zero_centered: bool
) -> Tensor:
    wide = _widened(x, weight, True) if zero_centered else weight
    return _NativeRmsNorm.apply(x, wide, eps)


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean square + eps) of each row, [rows, 1]."""
    return x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()


class _NativeRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return native.rms_norm(x, weight, eps)

    @staticmethod
    def backward(ctx, grad_out: Tensor):
        x, weight = ctx.saved_tensors
        grad_x, grad_weight = native.rms_norm_grad(x, weight, grad_out, ctx.eps)
        return grad_x, grad_weight.to(weight.dtype), None


class _RmsNorm(torch.autograd.Function):
    """With y = x / rms the gradient of x is (g w - y mean(g w y)) / rms."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
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


RMS_NORMS: tuple[Row, ...] = (
    Implementation(
        "apex",
        "apex",
        by_apex,
        unavailable=no_apex,
        why=lambda spec: FUSED,
    ),
    *rivals(
        _rms_norm,
        _rms_norm_in_blocks,
        _rms_norm_in_cpp,
        _rms_norm_in_one_pass,
        title="torch",
        why="single kernel",
        takes=CENTERED,
        cpp_takes=CENTERED,
    ),
)
