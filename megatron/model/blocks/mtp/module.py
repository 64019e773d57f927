"""Multi-token prediction (DeepSeek-AI 2024, DeepSeek-V3): module k behind the decoder predicts the
token k further than the next one, from the hidden states of the module before it and the embeddings
of the tokens up to there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from megatron.config.model import ModelConfig
from megatron.kernels.kernels import Kernels
from megatron.model.blocks.module import AddLoss, LayerInputs, Recompute
from megatron.model.embedding import Embedding
from megatron.model.layer import LAYERS
from megatron.model.norm import Norm
from megatron.model.rotary_tables import RotaryTables
from megatron.parallel.context import Axis, ParallelContext
from megatron.parallel.layers import ColumnParallelLinear
from megatron.parallel.recompute import recompute as recomputed
from megatron.parallel.sharding import ParameterFactory

# (hidden states [s, b, h], labels [b, s]) -> losses, and whether the label is the likeliest, [b, s]
Losses = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class Depth(NamedTuple):
    """What one module reads of a micro-batch, [b, s] each: the tokens that it embeds, the labels
    that it predicts, and which of these count."""

    tokens: torch.Tensor
    labels: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True)
class Depths:
    """The depths of a micro-batch, [b, s/cp], each with what the sum of its losses is multiplied by
    in backward. The model fills `metrics`, (sum, count) by name."""

    depths: Sequence[tuple[Depth, float | torch.Tensor]]
    metrics: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def add_losses(self, states: Sequence[torch.Tensor], losses: Losses) -> torch.Tensor:
        """The decoder's hidden states and those of each depth, [s, b, h] -> the first, itself: in
        backward the losses of the depths are added to the loss."""
        x, *states = states
        right = None
        for k, (state, (depth, scale)) in enumerate(zip(states, self.depths, strict=True), 1):
            of_tokens, correct = losses(state, depth.labels)
            total = (of_tokens * depth.mask).sum()
            x = AddLoss.apply(x, total, scale)
            right = correct if right is None else right & correct
            count = depth.mask.sum()
            self.metrics[f"mtp_{k} loss"] = (total.detach(), count)
            self.metrics[f"mtp_{k} acceptance"] = ((right * depth.mask).sum(), count)
        return x


def rolled(
    tokens: torch.Tensor,
    labels: torch.Tensor,
    loss_mask: torch.Tensor | None,
    document_ids: torch.Tensor | None,
    depths: int,
) -> list[Depth]:
    """The depths of whole sequences, [b, s] each. At depth k position i has the token and the label
    of i + k; it counts where i + k is in the same document and counts itself."""
    result = []
    for k in range(1, depths + 1):
        inside = torch.zeros_like(tokens, dtype=torch.bool)
        inside[:, :-k] = True
        if document_ids is not None:
            inside[:, :-k] = document_ids[:, k:] == document_ids[:, :-k]
        mask = inside.float() if loss_mask is None else inside * loss_mask.roll(-k, 1)
        result.append(Depth(tokens.roll(-k, 1) * inside, labels.roll(-k, 1) * inside, mask))
    return result


class MTPLayer(nn.Module):
    """One module: its layer's input is eh_proj(enorm(embedding of the later token), hnorm(hidden
    state))."""

    def __init__(
        self,
        config: ModelConfig,
        params: ParameterFactory,
        ctx: ParallelContext,
        number: int,
        kernels: Kernels,
        recompute: Recompute,
    ):
        super().__init__()
        whole = copy(ctx)
        whole.tp = Axis("tp", ranks=(ctx.rank,))
        whole.sequence_parallel = False
        self.enorm = Norm(config, params.scope("enorm"), kernels)
        self.hnorm = Norm(config, params.scope("hnorm"), kernels)
        self.eh_proj = ColumnParallelLinear.named("eh_proj", params, whole, kernels)
        self.transformer_layer = LAYERS[config.layer(number).residual](
            config, params.scope("transformer_layer"), ctx, number, kernels, recompute
        )
        self.final_layernorm = Norm(config, params.scope("final_layernorm"), kernels)
        self.fp32 = config.fp32_residual_connection
        self.whole_layer_again = recompute.granularity == "full"

    def forward(
        self, x: torch.Tensor, embed: Callable[[], torch.Tensor], inputs: LayerInputs
    ) -> torch.Tensor:
        """Hidden states x [s, b, h] ([s/tp, b, h] with sequence parallelism) and what makes the
        embeddings of the later tokens, alike -> the module's hidden states, normed."""
        x = self.eh_proj(torch.cat((self.enorm(embed()), self.hnorm(x)), -1))
        if self.fp32:
            x = x.to(torch.promote_types(x.dtype, torch.float32))
        seeds = self.transformer_layer.dropout_seeds(inputs.dropout_seeds)
        if self.whole_layer_again and torch.is_grad_enabled():
            x = recomputed(self.transformer_layer, x, inputs, seeds)
        else:
            x = self.transformer_layer(x, inputs, seeds)
        return self.final_layernorm(x)


class MultiTokenPrediction(nn.Module):
    """All modules of a model, behind its decoder."""

    def __init__(
        self,
        config: ModelConfig,
        params: ParameterFactory,
        ctx: ParallelContext,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device | str,
        recompute: Recompute,
    ):
        super().__init__()
        kernels = replace(kernels, compiled=False)
        # of MTPLayer, which torch's type forgets
        self.layers: Any = nn.ModuleList(
            MTPLayer(config, params.scope(f"layers.{k}"), ctx, number, kernels, recompute)
            for k, number in enumerate(config.mtp_layers)
        )
        rope = config.layer(config.mtp_layers.start).rope
        self.rotary = None if rope is None else RotaryTables(config, rope, dtype, device)
        self.moe_layers = [n for n in config.mtp_layers if n in config.moe_layers]

    def forward(
        self,
        x: torch.Tensor,
        embedding: Embedding,
        inputs: LayerInputs,
        depths: Depths,
        length: int,
        position_ids: torch.Tensor | None,
    ) -> list[torch.Tensor]:
        """x [s, b, h], the decoder's result -> it and that of each depth."""
        if self.rotary is not None:
            inputs = replace(inputs, rotary=self.rotary(length, position_ids))
        states = [x]
        for layer, (depth, _) in zip(self.layers, depths.depths, strict=True):
            number = layer.transformer_layer.number
            # Past the embedding's hooks: where weights are shared it is here a part of the layer
            # (`GPTModel.calls`), whose hooks gather its weights too.
            embed = partial(
                embedding.forward, depth.tokens, position_ids, inputs.dropout_seeds, number
            )
            states.append(layer(states[-1], embed, inputs))
        return states
