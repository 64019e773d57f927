"""One transformer layer, and the layers of one pipeline stage with activation recomputation."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megatron.config.model import ModelConfig
from megatron.kernels import functional
from megatron.kernels.kernels import Kernels
from megatron.model.attention import Rotary, SelfAttention
from megatron.model.mlp import MLP
from megatron.model.norm import Norm
from megatron.parallel.context import ParallelContext
from megatron.parallel.random import DropoutSeeds, recompute
from megatron.parallel.sharding import ParameterFactory

if TYPE_CHECKING:
    from megatron.model.moe import RouterStep


Seeds = Mapping[str, torch.Tensor]  # of dropout, by site


@dataclass(frozen=True)
class LayerInputs:
    """What the layers read of a micro-batch besides the residual stream; None stands for the plain
    case.

    rotary: (cos, sin), see `RotaryTables`. document_ids [b, s], whole also with context
    parallelism, keep attention inside documents. dropout_seeds: None for no dropout. router_step:
    with experts, what routers exchange with the training step; without one no token is dropped.
    """

    rotary: Rotary | None = None
    document_ids: torch.Tensor | None = None
    dropout_seeds: DropoutSeeds | None = None
    router_step: RouterStep | None = None


@dataclass(frozen=True)
class Recompute:
    """Activations that are recomputed in backward instead of being kept.

    granularity: None, "selective" (the `modules`) or "full". method (with full): "uniform" (every
    chunk of `num_layers` layers keeps only its input) or "block" (the first `num_layers` layers
    each keep only their input).
    """

    granularity: str | None = None
    method: str | None = None
    num_layers: int | None = None
    modules: Collection[str] = ("core_attn",)

    def includes(self, module: str) -> bool:
        """Whether this part of every layer is recomputed by itself."""
        return self.granularity == "selective" and module in self.modules

    def chunks(self, layers: int) -> list[tuple[int, int, bool]]:
        """(start, stop, recomputed) of each run of a stage's layers, in order."""
        if self.granularity != "full":
            return [(0, layers, False)]
        count = self.num_layers or 1
        if self.method == "uniform":
            return [(i, min(i + count, layers), True) for i in range(0, layers, count)]
        recomputed = min(count, layers)
        return [*((i, i + 1, True) for i in range(recomputed)), (recomputed, layers, False)]


class TransformerLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): pre-norm (Radford et al. 2019), dropout on
    both branches. With --no-pre-layernorm without these norms; each branch may end with one."""

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
        self.number = number
        self.hidden_dropout = config.hidden_dropout
        self.multiplier = config.residual_multiplier
        self.rotates = config.rotates(number)
        # Sites of dropout. Ranks that hold different parts of a tensor draw different masks, those
        # that hold the same tensor the same: heads are always split over tp, hidden states only
        # with sequence parallelism.
        hidden_part = ctx.tp.rank if ctx.sequence_parallel else 0
        self.dropout_sites = {"attention": ctx.tp.rank} if config.attention_dropout else {}
        if config.hidden_dropout:
            self.dropout_sites |= {"attention_output": hidden_part, "mlp_output": hidden_part}

        def norm(name: str, present: bool) -> nn.Module:
            return Norm(config, params.scope(name), kernels) if present else nn.Identity()

        self.input_layernorm = norm("input_layernorm", not config.no_pre_layernorm)
        self.self_attention = SelfAttention(
            config,
            params.scope("self_attention"),
            ctx,
            kernels,
            recompute_core=recompute.includes("core_attn"),
        )
        self.post_self_attn_layernorm = norm(
            "post_self_attn_layernorm", config.post_self_attn_layernorm
        )
        self.pre_mlp_layernorm = norm("pre_mlp_layernorm", not config.no_pre_layernorm)
        self.post_mlp_layernorm = norm("post_mlp_layernorm", config.post_mlp_layernorm)
        self.moe = config.is_moe_layer(number)
        self.mlp: nn.Module
        if self.moe:
            from megatron.model.moe import MoELayer

            self.mlp = MoELayer(
                config,
                params.scope("mlp"),
                ctx,
                number,
                kernels,
                recompute_activation=recompute.includes("moe_act"),
                recompute_shared=recompute.includes("shared_experts"),
            )
        else:
            self.mlp = MLP(config, params.scope("mlp"), ctx, kernels)
        self.recompute_mlp = recompute.includes("moe" if self.moe else "mlp")

    def forward(self, x: torch.Tensor, inputs: LayerInputs, seeds: Seeds) -> torch.Tensor:
        """x [s, b, h] ([s/tp, b, h] with sequence parallelism) -> the same shape. `seeds`: those of
        `dropout_seeds`; a site without is not dropped."""
        x = self.attention(x, self.input_layernorm(x), inputs, seeds)
        return self.feed_forward(x, self.pre_mlp_layernorm(x), inputs, seeds)

    def attention(
        self, residual: torch.Tensor, x: torch.Tensor, inputs: LayerInputs, seeds: Seeds
    ) -> torch.Tensor:
        """`residual` and the branch of attention, from its norm to the residual stream."""
        rotary = inputs.rotary if self.rotates else None
        y = self.self_attention(x, rotary, inputs.document_ids, seeds.get("attention"))
        y = self.post_self_attn_layernorm(y)
        return self.add(residual, y, seeds.get("attention_output"))

    def feed_forward(
        self, residual: torch.Tensor, x: torch.Tensor, inputs: LayerInputs, seeds: Seeds
    ) -> torch.Tensor:
        """`residual` and the branch of the MLP or the experts, from its norm to the residual
        stream."""
        arguments = (x, inputs.router_step) if self.moe else (x,)
        if self.recompute_mlp and torch.is_grad_enabled():
            y = recompute(self.mlp, *arguments)
        else:
            y = self.mlp(*arguments)
        return self.add(residual, self.post_mlp_layernorm(y), seeds.get("mlp_output"))

    def dropout_seeds(self, of_batch: DropoutSeeds | None) -> dict[str, torch.Tensor]:
        """The seed of each site of dropout; none in evaluation. Tensors on the CPU: a graph would
        hold integers as constants, and each is new."""
        if of_batch is None:
            return {}
        return {
            site: torch.tensor(of_batch.seed(self.number, site, tp_part))
            for site, tp_part in self.dropout_sites.items()
        }

    def add(
        self, residual: torch.Tensor, x: torch.Tensor, seed: torch.Tensor | None
    ) -> torch.Tensor:
        """`residual` and a branch, with its factor and dropout."""
        if self.multiplier != 1.0:
            x = x * self.multiplier
        return residual + x if seed is None else self.masked(residual, x, seed)

    def masked(self, residual: torch.Tensor, x: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
        """`residual` and `x` with elements dropped, the others scaled up."""
        return functional.dropout(x, self.hidden_dropout, seed, residual)


class ParallelResidualLayer(TransformerLayer):
    """--use-parallel-residual: x + attention(norm(x)) + mlp(norm'(x)) (Wang and Komatsuzaki 2021);
    both branches read the same stream."""

    def forward(self, x: torch.Tensor, inputs: LayerInputs, seeds: Seeds) -> torch.Tensor:
        """As TransformerLayer's."""
        attended = self.attention(x, self.input_layernorm(x), inputs, seeds)
        return self.feed_forward(attended, self.pre_mlp_layernorm(x), inputs, seeds)


class NormedResidualLayer(TransformerLayer):
    """--apply-residual-connection-post-layernorm: the stream itself is normed before each
    branch."""

    def forward(self, x: torch.Tensor, inputs: LayerInputs, seeds: Seeds) -> torch.Tensor:
        """As TransformerLayer's."""
        x = self.input_layernorm(x)
        x = self.pre_mlp_layernorm(self.attention(x, x, inputs, seeds))
        return self.feed_forward(x, x, inputs, seeds)


def layer_class(config: ModelConfig) -> type[TransformerLayer]:
    """The layer with this model's residual connections."""
    if config.use_parallel_residual:
        return ParallelResidualLayer
    if config.apply_residual_connection_post_layernorm:
        return NormedResidualLayer
    return TransformerLayer


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
        recompute: Recompute = Recompute(),
    ):
        super().__init__()
        layer = layer_class(config)
        # of TransformerLayer, which torch's type forgets
        self.layers: Any = nn.ModuleDict(
            {
                str(i): layer(config, params.scope(f"layers.{i}"), ctx, i, kernels, recompute)
                for i in layers
            }
        )
        self.moe_layers = [i for i in layers if config.is_moe_layer(i)]
        self.chunks = recompute.chunks(len(layers))
        self.group = ctx.tp.group
        self.transformer_engine = kernels.transformer_engine
        self.final_layernorm = (
            Norm(config, params.scope("final_layernorm"), kernels) if last else None
        )
        self.logits_divisor = config.logits_divisor

    def _autocast(self) -> AbstractContextManager[Any]:
        """Of Transformer Engine, where it computes: inside, its GEMMs may be FP8."""
        if self.transformer_engine is None:
            return nullcontext()
        return self.transformer_engine.autocast(self.group)

    def forward(self, x: torch.Tensor, inputs: LayerInputs) -> torch.Tensor:
        """x [s, b, h] -> the same shape."""
        layers = list(self.layers.values())

        def run(x: torch.Tensor, start: int, stop: int) -> torch.Tensor:
            with self._autocast():
                for layer in layers[start:stop]:
                    # Hashed here, because a compiled layer cannot.
                    seeds = layer.dropout_seeds(inputs.dropout_seeds)
                    x = layer(x, inputs, seeds)
            return x

        # Of a recomputed chunk of layers only its input is kept.
        for start, stop, recomputed in self.chunks:
            if recomputed and torch.is_grad_enabled():
                x = recompute(run, x, start, stop)
            else:
                x = run(x, start, stop)
        if self.final_layernorm is None:
            return x
        x = self.final_layernorm(x)
        # dividing the output layer's input divides the logits
        return x if self.logits_divisor == 1.0 else x / self.logits_divisor
