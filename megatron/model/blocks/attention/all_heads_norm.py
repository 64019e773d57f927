"""RMSNorm of all query or key heads together, which tensor-parallel ranks share."""

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from megatron.config.model_flags import ModelFlags
from megatron.parallel.collectives import all_reduce
from megatron.parallel.context import Axis
from megatron.parallel.sharding import ParameterFactory

_HEADS = (-2, -1)


class AllHeadsNorm(nn.Module):
    """RMSNorm (Zhang and Sennrich 2019) over the heads of all tensor-parallel ranks; each rank has
    the weights of its own heads."""

    def __init__(self, config: ModelFlags, params: ParameterFactory, tp: Axis):
        super().__init__()
        self.weight = params("weight")
        self.eps = config.norm_epsilon
        self.zero_centered = config.apply_layernorm_1p
        self.tp = tp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., heads of this rank, head width] -> the same shape."""
        weight = self.weight.view(x.shape[-2:])
        if self.zero_centered:
            weight = weight.to(_wide(x)) + 1
        return _AllHeadsRms.apply(x, weight, self.eps, self.tp)


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


class _AllHeadsRms(torch.autograd.Function):
    """With y = x / rms the gradient of x is (g w - y mean(g w y)) / rms; both means are over the
    heads of all ranks."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, tp: Axis
    ) -> torch.Tensor:
        wide = x.to(_wide(x))
        squares = all_reduce(wide.square().sum(_HEADS, keepdim=True), tp)
        inverse = (squares / (weight.numel() * tp.size) + eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        ctx.tp = tp
        return (wide * inverse * weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple:
        x, weight, inverse = ctx.saved_tensors
        y = x.to(inverse.dtype) * inverse
        grad = grad_out.to(inverse.dtype)
        weight_grad = (grad * y).flatten(0, -3).sum(0).to(weight.dtype)
        grad = grad * weight
        products = all_reduce((grad * y).sum(_HEADS, keepdim=True), ctx.tp)
        grad_x = (grad - y * (products / (weight.numel() * ctx.tp.size))) * inverse
        return grad_x.to(x.dtype), weight_grad, None, None
