"""Norms of layers, of query and key heads, and the final norm."""

from collections.abc import Callable

import torch
from torch import nn

from megatron.config.model_flags import ModelFlags
from megatron.kernels import norms
from megatron.kernels.kernels import Kernels
from megatron.kernels.rows import RowModule
from megatron.parallel.sharding import ParameterFactory


class Norm(RowModule):
    """LayerNorm (Ba et al. 2016) or RMSNorm (Zhang and Sennrich 2019) over the last dim, as
    --normalization says."""

    compute: Callable[..., torch.Tensor]

    def __init__(self, config: ModelFlags, params: ParameterFactory, kernels: Kernels):
        super().__init__()
        self.weight = params("weight")
        self.bias = params.optional("bias")
        spec = kernels.in_layers(self.weight, zero_centered=config.apply_layernorm_1p)
        # (x [..., width], weight [width], bias [width] where the norm has one) -> [..., width]
        self.choose(
            "compute",
            norms.implementations(config.normalization),
            spec,
            eps=config.norm_epsilon,
            zero_centered=config.apply_layernorm_1p,
        )
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
        if x.dtype == weight.dtype:
            return self.compute(x, weight, bias)
        wide_bias = None if bias is None else bias.to(x.dtype)
        return self.compute(x, weight.to(x.dtype), wide_bias).to(weight.dtype)
