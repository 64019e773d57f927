"""Norms of layers, of query and key heads, and the final norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from megatron.config.model_flags import ModelFlags
from megatron.kernels import functional
from megatron.kernels.cuda import apex
from megatron.kernels.kernels import Kernels
from megatron.parallel.sharding import ParameterFactory

# (x [..., width], weight [width], bias [width] where the norm has one) -> [..., width]
Operation = Callable[[torch.Tensor, torch.Tensor, Any], torch.Tensor]


def operation(config: ModelFlags, kernels: Kernels) -> Operation:
    """What a norm of --normalization computes, by apex where `kernels` says so."""
    eps = config.norm_epsilon
    zero_centered = config.apply_layernorm_1p
    # 1 + weight would be rounded to 16 bits
    by_apex = kernels.apex_norms and not zero_centered
    operations: dict[tuple[str, bool], Operation] = {
        ("LayerNorm", False): lambda x, w, b: functional.layer_norm(x, w, b, eps, zero_centered),
        ("LayerNorm", True): lambda x, w, b: apex.layer_norm(x, w, b, eps),
        ("RMSNorm", False): lambda x, w, _: functional.rms_norm(x, w, eps, zero_centered),
        ("RMSNorm", True): lambda x, w, _: apex.rms_norm(x, w, eps),
    }
    return operations[config.normalization, by_apex]


class Norm(nn.Module):
    """LayerNorm (Ba et al. 2016) or RMSNorm (Zhang and Sennrich 2019) over the last dim, as
    --normalization says."""

    def __init__(self, config: ModelFlags, params: ParameterFactory, kernels: Kernels):
        super().__init__()
        self.weight = params("weight")
        self.bias = params.optional("bias")
        self.compute = operation(config, kernels)
        self.transformer_engine: nn.Module | None = None
        if kernels.transformer_engine is not None:
            self.transformer_engine = kernels.transformer_engine.norm(
                self.weight,
                self.bias,
                config.norm_epsilon,
                config.apply_layernorm_1p,
                config.normalization == "RMSNorm",
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., width] -> [..., width] in the weight's dtype (an fp32 residual stream comes out
        in the model's)."""
        if self.transformer_engine is not None:
            return self.transformer_engine(x)
        weight: torch.Tensor = self.weight
        bias: torch.Tensor | None = self.bias
        if x.dtype != weight.dtype:
            weight = weight.to(x.dtype)
            bias = None if bias is None else bias.to(x.dtype)
        return self.compute(x, weight, bias).to(self.weight.dtype)
