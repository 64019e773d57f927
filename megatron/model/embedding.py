"""Token and position embeddings, and the tables of rotary angles."""

from collections.abc import Callable

import torch
from torch import nn

from megatron.config.model import ModelConfig
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
        word_factor, self.position_factor = config.embedding_factors
        # rounded as Gemma's is: 55.5 in bf16, not the root of 3,072
        self.word_factors = {
            dtype: torch.tensor(word_factor, dtype=dtype, device="cpu").item()
            for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
        }
        self.scaled = word_factor != 1.0
        self.dropout = config.hidden_dropout
        asked = spec_of(self.word_embeddings.weight)
        self.choose("drop", DROPOUT, asked)
        self.fp32 = config.fp32_residual_connection
        self.ctx = ctx
        # of dropout: each rank with tokens of its own draws other masks
        self.place = EMBEDDING_LAYER, "embedding", ctx.tp.rank if ctx.sequence_parallel else 0

    def forward(
        self,
        tokens: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        seeds: DropoutSeeds | None = None,
        layer: int = EMBEDDING_LAYER,
    ) -> torch.Tensor:
        """tokens [b, s], position_ids [b or 1, s] or None for 0..s-1 -> [s, b, h] ([s/tp, b, h],
        sequence parallel). layer: whose masks of dropout are drawn."""
        x = self.word_embeddings(tokens)
        if self.scaled:
            x = x * self.word_factors[x.dtype]
        if self.position_embeddings is not None:
            positions = self.position_embeddings(tokens.shape[1], position_ids)
            if self.position_factor != 1.0:
                positions = positions * self.position_factor
            x = x + (my_slice(positions, self.ctx.tp) if self.ctx.sequence_parallel else positions)
        if self.fp32:
            x = x.to(torch.promote_types(x.dtype, torch.float32))
        if seeds is None or self.dropout == 0.0:  # in evaluation there are no seeds
            return x
        return self.drop(x, self.dropout, seeds.tensor(layer, *self.place[1:]), None)
