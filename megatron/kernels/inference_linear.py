"""Linear layers whose weights do not change any more: the C++ of few_rows.py for a few rows on a
CPU, torch's otherwise. Forward only."""

import torch.nn.functional as F
from torch import Tensor

from megatron.kernels.cpu import few_rows


class InferenceLinear:
    """y = x w^T + bias: weight [out, in] or, gated, [2, out, in], bias of the outputs or None."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.weight = weight.detach().flatten(0, -2).contiguous()
        self.bias = None if bias is None else bias.detach().flatten().contiguous()
        available = few_rows.unavailable_reason(weight.device, weight.dtype) is None
        self._few_rows = few_rows.MOST_ROWS if available else 0

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        if 0 < x.numel() <= self._few_rows * x.shape[-1]:
            return few_rows.linear(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)
