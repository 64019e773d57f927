"""LayerNorm and RMSNorm over the last dimension; knows tensors, no module."""

import torch.nn.functional as F
from torch import Tensor


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool = False) -> Tensor:
    """LayerNorm (Ba et al. 2016) over the last dimension: x [..., h], weight and bias [h] -> [..., h].

    Mean and variance are taken in fp32 for bf16 and fp16. `zero_centered`: the stored weight is gamma - 1.
    """
    return F.layer_norm(x, weight.shape, weight + 1 if zero_centered else weight, bias, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    """RMSNorm (Zhang and Sennrich 2019) over the last dimension: x [..., h], weight [h] -> [..., h].

    The mean square is taken in fp32 for bf16 and fp16. `zero_centered`: the stored weight is gamma - 1.
    """
    return F.rms_norm(x, weight.shape, weight + 1 if zero_centered else weight, eps)
