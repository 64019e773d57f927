"""xIELU, an activation function with two learnt scalars per layer."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from megatron.parallel.sharding import ParameterFactory

BETA = 0.5
_EPS = -1e-6


class XIELU(nn.Module):
    """xIELU (Huang and Schlag 2024): a x^2 + x / 2 above 0, b (exp(x) - 1 - x) + x / 2 below, with
    a = softplus(alpha_p) and b = 1/2 + softplus(alpha_n)."""

    def __init__(self, params: ParameterFactory):
        super().__init__()
        self.alpha_p = params("alpha_p")
        self.alpha_n = params("alpha_n")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any shape."""
        wide = torch.promote_types(x.dtype, torch.float32)
        above = F.softplus(self.alpha_p.to(wide))
        below = BETA + F.softplus(self.alpha_n.to(wide))
        return _XIELU.apply(x, above, below)


class _XIELU(torch.autograd.Function):
    """Keeps its input alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, above: torch.Tensor, below: torch.Tensor):
        ctx.save_for_backward(x, above, below)
        wide = x.to(above.dtype)
        curve = torch.expm1(wide.clamp(max=_EPS)) - wide
        bent = torch.where(wide > 0, above * wide.square(), below * curve)
        return bent.add_(wide, alpha=BETA).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple:
        x, above, below = ctx.saved_tensors
        wide = x.to(above.dtype)
        grad = grad_out.to(above.dtype)
        positive = wide > 0
        low = wide.clamp(max=_EPS)
        slope = torch.where(
            positive, 2 * above * wide, below * ((wide < _EPS) * torch.exp(low) - 1)
        )
        above_grad = (grad * torch.where(positive, wide.square(), 0)).sum().view(1)
        below_grad = (grad * torch.where(positive, 0, torch.expm1(low) - wide)).sum().view(1)
        return (slope.add_(BETA).mul_(grad)).to(x.dtype), above_grad, below_grad
