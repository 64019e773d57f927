"""The MLP of a transformer layer, plain or gated."""

from collections.abc import Callable

import torch

from megatron.kernels.activations import implementations
from megatron.kernels.kernels import Kernels
from megatron.model.blocks.block import Block
from megatron.model.blocks.module import BlockModule, LayerInputs, Recompute, Seeds
from megatron.parallel.context import ParallelContext
from megatron.parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.parallel.sharding import ParameterFactory

Activation = Callable[[torch.Tensor], torch.Tensor]


class MLP(BlockModule):
    """h -> ffn -> h. Gated (Shazeer 2020): linear_fc1 [2, ffn, h] holds gate and up, split over
    ranks alike."""

    def __init__(
        self,
        facts: Block,
        params: ParameterFactory,
        ctx: ParallelContext,
        number: int,
        kernels: Kernels,
        recompute: Recompute,
    ):
        super().__init__()
        config = facts.model
        self.gated = config.gated
        self.activation: Activation
        if config.activation == "xielu":
            from megatron.model.blocks.mlp.xielu import XIELU

            self.xielu = XIELU(params.scope("xielu"))  # named as its parameters are
            self.activation = self.xielu.forward
        self.linear_fc1 = ColumnParallelLinear.named("linear_fc1", params, ctx, kernels)
        self.linear_fc2 = RowParallelLinear.named("linear_fc2", params, ctx, kernels)
        if config.activation != "xielu":
            # gated ones [..., 2, ffn] -> [..., ffn]
            rows, numbers = implementations(config)
            spec = kernels.activation(config.activation, self.linear_fc1.weight)
            self.choose("activation", rows, spec, **numbers)

    def forward(self, x: torch.Tensor, inputs: LayerInputs, seeds: Seeds) -> torch.Tensor:
        """x [s, b, h] -> [s, b, h]."""
        return self.compute(x)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """The same of the stream alone, on which nothing else has an effect."""
        x = self.linear_fc1(x)
        if self.gated:
            x = x.unflatten(-1, (2, -1))
        return self.linear_fc2(self.activation(x))
