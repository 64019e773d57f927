"""Token and position embeddings, and the tables of rotary angles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import nn

from megatron.config.model import ModelConfig
from megatron.config.rope import Rope
from megatron.kernels import functional
from megatron.kernels.dropout import DROPOUT
from megatron.kernels.rows import RowModule, spec_of
from megatron.parallel.collectives import my_slice
from megatron.parallel.context import ParallelContext
from megatron.parallel.layers import VocabParallelEmbedding, embedding
from megatron.parallel.random import DropoutSeeds
from megatron.parallel.sharding import ParameterFactory

EMBEDDING_LAYER = -1  # the layer number of the embedding's dropout


class LearnedPositions(nn.Module):
    """A learned vector for each position: weight [max positions, h]."""

    def __init__(self, weight: nn.Parameter):
        super().__init__()
        self.weight = weight

    def forward(self, length: int, position_ids: torch.Tensor | None) -> torch.Tensor:
        """Vectors of positions 0..length-1, [s, 1, h], or of position_ids [b or 1, s], [s, b or 1,
        h]."""
        if position_ids is not None:
            return embedding(position_ids.t(), self.weight)
        return self.weight[:length].unsqueeze(1)


class Embedding(RowModule):
    """Word embedding, plus learned positions where the model has them, plus dropout."""

    drop: Callable[..., torch.Tensor]

    def __init__(self, config: ModelConfig, params: ParameterFactory, ctx: ParallelContext):
        super().__init__()
        self.word_embeddings = VocabParallelEmbedding(params("word_embeddings.weight"), ctx)
        positions = params.optional("position_embeddings.weight")
        self.position_embeddings = None if positions is None else LearnedPositions(positions)
        self.word_factor, self.position_factor = config.embedding_factors
        self.dropout = config.hidden_dropout
        asked = spec_of(self.word_embeddings.weight)
        self.choose("drop", DROPOUT, asked)
        self.fp32 = config.fp32_residual_connection
        self.ctx = ctx

    def forward(
        self,
        tokens: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        seeds: DropoutSeeds | None = None,
    ) -> torch.Tensor:
        """tokens [b, s], position_ids [b or 1, s] or None for 0..s-1 -> [s, b, h] ([s/tp, b, h],
        sequence parallel)."""
        x = self.word_embeddings(tokens)
        if self.word_factor != 1.0:
            x = x * self.word_factor
        shard = self.ctx.tp.rank if self.ctx.sequence_parallel else 0
        if self.position_embeddings is not None:
            positions = self.position_embeddings(tokens.shape[1], position_ids)
            if self.position_factor != 1.0:
                positions = positions * self.position_factor
            x = x + (my_slice(positions, self.ctx.tp) if self.ctx.sequence_parallel else positions)
        if self.fp32:
            x = x.to(torch.promote_types(x.dtype, torch.float32))
        if seeds is None or self.dropout == 0.0:  # in evaluation there are no seeds
            return x
        seed = seeds.seed(EMBEDDING_LAYER, "embedding", shard)
        return self.drop(x, self.dropout, seed, None)


class RotaryTables(nn.Module):
    """Cosines and sines of rotary positions (Su et al. 2021), computed once for every position
    there can be."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(
        self, config: ModelConfig, rope: Rope, dtype: torch.dtype, device: torch.device | str
    ):
        super().__init__()
        self.rope = rope
        cos, sin = functional.rotary_tables(
            config.max_position_embeddings or config.seq_length,
            rope.width,
            rope.base,
            device=device,
            interpolation_factor=rope.interpolation,
            scaling_factor=rope.scaling,
            yarn=rope.yarn,
            dtype=torch.promote_types(dtype, torch.float32),
        )
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Of `.to`: the tables move with the model, but are not rounded to 16 bits."""
        before = self.cos, self.sin
        super()._apply(fn, recurse)
        wide = torch.promote_types(self.cos.dtype, torch.float32)
        if wide != self.cos.dtype:
            self.cos, self.sin = (table.to(self.cos.device, wide) for table in before)
        return self

    def forward(
        self, length: int, position_ids: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin) of positions 0..length-1, each [s, dim/2], or of position_ids [b or 1, s],
        each [s, b or 1, dim/2]."""
        if position_ids is None:
            return self.cos[:length], self.sin[:length]
        return F.embedding(position_ids.t(), self.cos), F.embedding(position_ids.t(), self.sin)
