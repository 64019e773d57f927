"""The MLP of a transformer layer, plain or gated."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from megatron.config.model import ModelConfig
from megatron.kernels import functional
from megatron.kernels.kernels import Kernels
from megatron.parallel.context import ParallelContext
from megatron.parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.parallel.sharding import ParameterFactory

Activation = Callable[[torch.Tensor], torch.Tensor]


def activation(config: ModelConfig, kernels: Kernels) -> Activation:
    """The function between the two matrices, other than xIELU, which is a module; gated ones take
    [..., 2, ffn] and return [..., ffn]."""
    functions: dict[str, Activation] = {
        "swiglu": partial(functional.swiglu, fused=kernels.fused_swiglu),
        "geglu": functional.geglu,
        "squared_relu": functional.squared_relu,
        "gelu (tanh)": lambda x: functional.gelu(x, True),
        "gelu (erf)": lambda x: functional.gelu(x, False),
    }
    return functions[config.activation]


class MLP(nn.Module):
    """h -> ffn -> h. Gated (Shazeer 2020): linear_fc1 [2, ffn, h] holds gate and up, split over
    ranks alike."""

    def __init__(
        self,
        config: ModelConfig,
        params: ParameterFactory,
        ctx: ParallelContext,
        kernels: Kernels,
    ):
        super().__init__()
        self.gated = config.gated
        self.activation: Activation
        if config.activation == "xielu":
            from megatron.model.xielu import XIELU

            self.xielu = XIELU(params.scope("xielu"))  # named as its parameters are
            self.activation = self.xielu.forward
        else:
            self.activation = activation(config, kernels)
        self.linear_fc1 = ColumnParallelLinear.named("linear_fc1", params, ctx, kernels)
        self.linear_fc2 = RowParallelLinear.named("linear_fc2", params, ctx, kernels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [s, b, h] -> [s, b, h]."""
        x = self.linear_fc1(x)
        if self.gated:
            x = x.unflatten(-1, (2, -1))
        return self.linear_fc2(self.activation(x))
