"""Linear layers whose weights do not change any more: the C++ of few_rows.py for a few rows on a
CPU, torch's otherwise. Forward only."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from megatron.kernels.cpu import few_rows
from megatron.parallel.collectives import reduce_from
from megatron.parallel.layers import ColumnParallelLinear, RowParallelLinear


class InferenceLinear:
    """y = x w^T + bias: weight [out, in] or, gated, [2, out, in], bias of the outputs or None."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        self.weight = weight.detach().flatten(0, -2).contiguous()
        self.bias = None if bias is None else bias.detach().flatten().contiguous()
        available = few_rows.unavailable_reason(weight.device, weight.dtype) is None
        self._few_rows = few_rows.MOST_ROWS if available else 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> [..., out]."""
        if 0 < x.numel() <= self._few_rows * x.shape[-1]:
            return few_rows.linear(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)


class ParallelLinear(nn.Module):
    """A linear layer split over tensor-parallel ranks as in training, forward only."""

    def __init__(self, layer: ColumnParallelLinear | RowParallelLinear):
        super().__init__()
        self.sum_over = layer.ctx.tp if isinstance(layer, RowParallelLinear) else None
        if self.sum_over is not None and self.sum_over.size == 1:
            self.sum_over = None
        self.bias = layer.bias if self.sum_over is not None else None
        self.linear = InferenceLinear(layer.weight, None if self.bias is not None else layer.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [s, b, in] -> [s, b, out], of this rank's features as in training."""
        y = self.linear(x)
        if self.sum_over is not None:
            y = reduce_from(y, self.sum_over)
        return y if self.bias is None else y + self.bias


def replace_linear_layers(model: nn.Module) -> None:
    """Each linear layer by one of the same weight that is faster without gradients."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, ColumnParallelLinear | RowParallelLinear):
                setattr(module, name, ParallelLinear(child))
