"""Norms of layers, of query and key heads, and the final norm."""

from __future__ import annotations

import torch
from torch import nn

from megatron.config.model import ModelConfig
from megatron.kernels import functional
from megatron.kernels.cuda import apex
from megatron.kernels.kernels import Kernels
from megatron.parallel.sharding import ParameterFactory


class Norm(nn.Module):
    """LayerNorm (Ba et al. 2016) or RMSNorm (Zhang and Sennrich 2019) over the last dim, as
    --normalization says."""

    def __init__(self, model: ModelConfig, params: ParameterFactory):
        super().__init__()
        self.weight = params("weight")
        self.bias = params.optional("bias")
        self.rms = model.normalization == "RMSNorm"
        self.eps = model.norm_epsilon
        self.zero_centered = model.apply_layernorm_1p
        self.apex = False
        self.transformer_engine: nn.Module | None = None

    def set_kernels(self, kernels: Kernels) -> None:
        """From now on compute as `kernels` says."""
        # 1 + weight would be rounded to 16 bits
        self.apex = kernels.apex_norms and not self.zero_centered
        if kernels.transformer_engine is not None:
            self.transformer_engine = kernels.transformer_engine.norm(
                self.weight, self.bias, self.eps, self.zero_centered, self.rms
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
        if self.apex and self.rms:
            y = apex.rms_norm(x, weight, self.eps)
        elif self.apex:
            assert bias is not None, "LayerNorm has a bias"
            y = apex.layer_norm(x, weight, bias, self.eps)
        elif self.rms:
            y = functional.rms_norm(x, weight, self.eps, self.zero_centered)
        else:
            y = functional.layer_norm(x, weight, bias, self.eps, self.zero_centered)
        return y.to(self.weight.dtype)
