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


def activation(model: ModelConfig, chosen: Kernels) -> Activation:
    """The function between the two matrices, other than xIELU, which is a module; gated ones take
    [..., 2, ffn] and return [..., ffn]."""
    functions: dict[str, Activation] = {
        "swiglu": partial(functional.swiglu, fused=chosen.fused_swiglu),
        "geglu": functional.geglu,
        "squared_relu": functional.squared_relu,
        "gelu (tanh)": lambda x: functional.gelu(x, True),
        "gelu (erf)": lambda x: functional.gelu(x, False),
    }
    return functions[model.activation]


class MLP(nn.Module):
    """h -> ffn -> h. Gated (Shazeer 2020): linear_fc1 [2, ffn, h] holds gate and up, split over
    ranks alike."""

    def __init__(self, model: ModelConfig, params: ParameterFactory, ctx: ParallelContext):
        super().__init__()
        self.model = model
        self.gated = model.gated
        self.xielu: nn.Module | None = None
        if model.xielu:
            from megatron.model.xielu import XIELU

            self.xielu = XIELU(params.scope("xielu"))
        self.set_kernels(Kernels())
        self.linear_fc1 = ColumnParallelLinear(
            params("linear_fc1.weight"),
            params.optional("linear_fc1.bias"),
            ctx,
            params.scaling("linear_fc1"),
        )
        self.linear_fc2 = RowParallelLinear(
            params("linear_fc2.weight"),
            params.optional("linear_fc2.bias"),
            ctx,
            params.scaling("linear_fc2"),
        )

    def set_kernels(self, kernels: Kernels) -> None:
        """From now on compute as `kernels` says."""
        if self.xielu is None:
            self.activation = activation(self.model, kernels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [s, b, h] -> [s, b, h]."""
        x = self.linear_fc1(x)
        if self.xielu is not None:
            return self.linear_fc2(self.xielu(x))
        return self.linear_fc2(self.activation(x.unflatten(-1, (2, -1)) if self.gated else x))
