"""One transformer layer, and the layers of one pipeline stage with activation recomputation."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from megatron.config.model import ModelConfig
from megatron.kernels.dropout import DROPOUT
from megatron.kernels.kernels import Kernels
from megatron.kernels.rows import RowModule
from megatron.model.blocks.block import (
    AFTER_MIXER,
    AFTER_MLP,
    BEFORE_MIXER,
    BEFORE_MLP,
    Block,
    Residual,
)
from megatron.model.blocks.module import BlockModule, LayerInputs, Recompute, Seeds
from megatron.model.blocks.modules import module_of
from megatron.model.norm import Norm
from megatron.parallel.context import ParallelContext
from megatron.parallel.random import DropoutSeeds
from megatron.parallel.sharding import ParameterFactory


class Branch(NamedTuple):
    """A block of a layer: the names of its module, the norm behind it and its site of dropout."""

    block: str
    after: str
    site: str


class TransformerLayer(RowModule):
    """The blocks and norms of a layer's description, pre-norm (Radford et al. 2019): x +
    mixer(norm(x)), then x + mlp(norm(x)), with dropout on both branches. A branch may be without
    that norm, and may end with one."""

    drop: Callable[..., torch.Tensor]

    def __init__(
        self,
        config: ModelConfig,
        params: ParameterFactory,
        ctx: ParallelContext,
        number: int,
        kernels: Kernels,
        recompute: Recompute = Recompute(),
    ):
        super().__init__()
        spec = config.layer(number)
        self.number = number
        self.rope = spec.rope
        self.hidden_dropout = config.hidden_dropout
        self.multiplier = config.residual_multiplier
        self.norms = spec.norms
        # Sites of dropout. Ranks that hold different parts of a tensor draw different masks, those
        # that hold the same tensor the same: hidden states are split with sequence parallelism.
        self.dropout_sites: dict[str, int] = {}
        hidden_part = ctx.tp.rank if ctx.sequence_parallel else 0
        self.recomputed: set[str] = set()

        def branch(block: Block | None, names: tuple[str, str, str]) -> Branch | None:
            if block is None:
                return None
            before, after, site = names
            # In the order of the table of parameters, in which gradient buffers hold them.
            self._add_norm(before, config, params, kernels)
            module = module_of(type(block))(
                block,
                params=params.scope(block.scope),
                ctx=ctx,
                number=number,
                kernels=kernels,
                recompute=recompute,
            )
            self.add_module(block.scope, module)
            self._add_norm(after, config, params, kernels)
            self.dropout_sites |= module.dropout_sites()
            if self.hidden_dropout:
                self.dropout_sites[site] = hidden_part
            if recompute.includes(block.recomputed_as):
                self.recomputed.add(block.scope)
            return Branch(block.scope, after, site)

        self.mixing = branch(spec.mixer, (BEFORE_MIXER, AFTER_MIXER, "attention_output"))
        self.feeding = branch(spec.mlp, (BEFORE_MLP, AFTER_MLP, "mlp_output"))
        asked = kernels.in_layers(next(self.parameters()))
        self.choose("drop", DROPOUT, asked)

    def _add_norm(
        self, name: str, config: ModelConfig, params: ParameterFactory, kernels: Kernels
    ) -> None:
        if name in self.norms:
            self.add_module(name, Norm(config, params.scope(name), kernels))

    def blocks(self) -> list[BlockModule]:
        """The modules of its blocks, in order; not a script's own in their place."""
        modules = [getattr(self, branch.block) for branch in (self.mixing, self.feeding) if branch]
        return [module for module in modules if isinstance(module, BlockModule)]

    def forward(self, x: torch.Tensor, inputs: LayerInputs, seeds: Seeds) -> torch.Tensor:
        """x [s, b, h] ([s/tp, b, h] with sequence parallelism) -> the same shape. `seeds`: those of
        `dropout_seeds`; a site without is not dropped."""
        if self.mixing is not None:
            x = self.add(x, self.mixing, self.norm(BEFORE_MIXER, x), inputs, seeds)
        if self.feeding is not None:
            x = self.add(x, self.feeding, self.norm(BEFORE_MLP, x), inputs, seeds)
        return x

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """The norm of this name, where the layer has it."""
        return getattr(self, name)(x) if name in self.norms else x

    def add(
        self,
        residual: torch.Tensor,
        branch: Branch,
        x: torch.Tensor,
        inputs: LayerInputs,
        seeds: Seeds,
    ) -> torch.Tensor:
        """`residual` and a branch, from its norm to the residual stream."""
        block = getattr(self, branch.block)
        if branch.block in self.recomputed and torch.is_grad_enabled():
            from megatron.parallel.recompute import recompute

            y = recompute(block, x, inputs, seeds)
        elif isinstance(block, BlockModule):
            y = block(x, inputs, seeds)
        else:  # a script's own module in its place sees the stream alone
            y = block(x)
        y = self.norm(branch.after, y)
        if self.multiplier != 1.0:
            y = y * self.multiplier
        seed = seeds.get(branch.site)
        return residual + y if seed is None else self.masked(residual, y, seed)

    def masked(self, residual: torch.Tensor, x: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
        """`residual` and `x` with elements dropped, the others scaled up."""
        return self.drop(x, self.hidden_dropout, seed, residual)

    def dropout_seeds(self, of_batch: DropoutSeeds | None) -> dict[str, torch.Tensor]:
        """The seed of each site of dropout; none in evaluation."""
        if of_batch is None:
            return {}
        return {
            site: of_batch.tensor(self.number, site, tp_part)
            for site, tp_part in self.dropout_sites.items()
        }


class ParallelResidualLayer(TransformerLayer):
    """--use-parallel-residual: x + attention(norm(x)) + mlp(norm'(x)) (Wang and Komatsuzaki 2021);
    both branches read the same stream."""

    def forward(self, x: torch.Tensor, inputs: LayerInputs, seeds: Seeds) -> torch.Tensor:
        """As TransformerLayer's."""
        total = x
        if self.mixing is not None:
            total = self.add(total, self.mixing, self.norm(BEFORE_MIXER, x), inputs, seeds)
        if self.feeding is not None:
            total = self.add(total, self.feeding, self.norm(BEFORE_MLP, x), inputs, seeds)
        return total


class NormedResidualLayer(TransformerLayer):
    """--apply-residual-connection-post-layernorm: the stream itself is normed before each
    branch."""

    def forward(self, x: torch.Tensor, inputs: LayerInputs, seeds: Seeds) -> torch.Tensor:
        """As TransformerLayer's."""
        if self.mixing is not None:
            x = self.norm(BEFORE_MIXER, x)
            x = self.add(x, self.mixing, x, inputs, seeds)
        if self.feeding is not None:
            x = self.norm(BEFORE_MLP, x)
            x = self.add(x, self.feeding, x, inputs, seeds)
        return x


LAYERS: dict[Residual, type[TransformerLayer]] = {
    "pre": TransformerLayer,
    "parallel": ParallelResidualLayer,
    "normed": NormedResidualLayer,
}


class Decoder(nn.Module):
    """The layers of one pipeline stage under their global numbers, and the final norm on the last
    one."""

    def __init__(
        self,
        config: ModelConfig,
        params: ParameterFactory,
        ctx: ParallelContext,
        layers: range,
        last: bool,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device | str,
        recompute: Recompute = Recompute(),
    ):
        super().__init__()
        # of TransformerLayer, which torch's type forgets
        self.layers: Any = nn.ModuleDict(
            {
                str(i): LAYERS[config.layer(i).residual](
                    config, params.scope(f"layers.{i}"), ctx, i, kernels, recompute
                )
                for i in layers
            }
        )
        self.moe_layers = [i for i in layers if config.is_moe_layer(i)]
        ropes = dict.fromkeys(config.layer(i).rope for i in layers)
        self.rotary: Any = nn.ModuleList()
        for rope in filter(None, ropes):
            from megatron.model.rotary_tables import RotaryTables

            self.rotary.append(RotaryTables(config, rope, dtype, device))
        self.chunks = recompute.chunks(len(layers))
        self.group = ctx.tp.group
        self.transformer_engine = kernels.transformer_engine
        self.final_layernorm = (
            Norm(config, params.scope("final_layernorm"), replace(kernels, compiled=False))
            if last
            else None
        )
        self.logits_divisor = config.logits_divisor

    def _autocast(self) -> AbstractContextManager[Any]:
        """Of Transformer Engine, where it computes: inside, its GEMMs may be FP8."""
        if self.transformer_engine is None:
            return nullcontext()
        return self.transformer_engine.autocast(self.group)

    def forward(
        self,
        x: torch.Tensor,
        inputs: LayerInputs,
        length: int,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [s, b, h] -> the same shape. `length`: tokens of a sequence, of positions 0..length-1
        or position_ids [b or 1, s]."""
        layers = list(self.layers.values())
        by_rope = {None: inputs}
        for tables in self.rotary:
            by_rope[tables.rope] = replace(inputs, rotary=tables(length, position_ids))

        def run(x: torch.Tensor, start: int, stop: int) -> torch.Tensor:
            with self._autocast():
                for layer in layers[start:stop]:
                    # Hashed here, because a compiled layer cannot.
                    seeds = layer.dropout_seeds(inputs.dropout_seeds)
                    x = layer(x, by_rope[layer.rope], seeds)
            return x

        # Of a recomputed chunk of layers only its input is kept.
        for start, stop, recomputed in self.chunks:
            if recomputed and torch.is_grad_enabled():
                from megatron.parallel.recompute import recompute

                x = recompute(run, x, start, stop)
            else:
                x = run(x, start, stop)
        if self.final_layernorm is None:
            return x
        x = self.final_layernorm(x)
        # dividing the output layer's input divides the logits
        return x if self.logits_divisor == 1.0 else x / self.logits_divisor
