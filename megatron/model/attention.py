"""Causal self-attention with multi-head or grouped queries."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from megatron.config.model import ModelConfig
from megatron.kernels import functional
from megatron.kernels.attention_spec import AttentionSpec, Forward
from megatron.kernels.kernels import Kernels
from megatron.model.norm import Norm
from megatron.parallel.collectives import gather_sequence
from megatron.parallel.context import ParallelContext
from megatron.parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.parallel.random import recompute
from megatron.parallel.sharding import ParameterFactory

Rotary = tuple[torch.Tensor, torch.Tensor]


class SelfAttention(nn.Module):
    """Attention of this rank's heads (Vaswani et al. 2017; groups of query heads share a key and a
    value head).

    Rows of linear_qkv by query group: the group's query heads, its key head, its value head. Scores
    and softmax are fp32 at least in every kernel, so --attention-softmax-in-fp32 is always on and
    --apply-query-key-layer-scaling, which keeps half-precision scores in range, has nothing left to
    do.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: ParameterFactory,
        ctx: ParallelContext,
        kernels: Kernels,
        *,
        recompute_core: bool = False,
    ):
        super().__init__()
        self.tp = ctx.tp
        self.head_dim = config.head_dim
        self.all_groups = config.query_groups
        self.groups = config.groups_per_rank(ctx.tp.size)
        self.queries_per_group = config.num_attention_heads // ctx.tp.size // self.groups
        self.options = config.attention_options
        self.dropout = config.attention_dropout
        self.recompute_core = recompute_core
        self.cp = ctx.cp
        self.requested = kernels.attention
        self.rotate = partial(
            functional.apply_rotary,
            interleaved=config.rotary_interleaved,
            fused=kernels.fused_rotary,
        )

        def head_norm(name: str) -> nn.Module:
            if not config.qk_layernorm:
                return nn.Identity()
            if not config.qk_layernorm_all_heads:
                return Norm(config, params.scope(name), kernels)
            from megatron.model.all_heads_norm import AllHeadsNorm

            return AllHeadsNorm(config, params.scope(name), ctx.tp)

        self.linear_qkv = ColumnParallelLinear.named("linear_qkv", params, ctx, kernels)
        self.q_layernorm = head_norm("q_layernorm")
        self.k_layernorm = head_norm("k_layernorm")
        self.linear_proj = RowParallelLinear.named("linear_proj", params, ctx, kernels)
        self.implementation = self._implementation(ctx, kernels)

    def _implementation(self, ctx: ParallelContext, kernels: Kernels) -> Forward:
        if kernels.transformer_engine is not None and kernels.attention == "transformer_engine":
            return kernels.transformer_engine.attention(self.spec(self.linear_qkv.weight))
        if self.cp.size == 1:
            return partial(functional.attention, requested=kernels.attention)
        from megatron.parallel.ring_attention import ring_attention

        return partial(ring_attention, cp=self.cp, comm_type=ctx.cp_comm_type)

    def spec(
        self, queries: torch.Tensor, dropout: float = 0.0, documents: bool = False
    ) -> AttentionSpec:
        """What this layer asks of attention, in the dtype and on the device of `queries` [s,
        ...]."""
        return AttentionSpec(
            queries.device,
            queries.dtype,
            len(queries),
            self.groups * self.queries_per_group,
            self.groups,
            self.head_dim,
            dropout=dropout,
            documents=documents,
            compiled=torch.compiler.is_compiling(),
            **self.options,
        )

    def forward(
        self,
        x: torch.Tensor,
        rotary: Rotary | None = None,
        document_ids: torch.Tensor | None = None,
        dropout_seed: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [s/cp, b, h] -> [s/cp, b, h]; with document_ids [b, s], whole, no position sees another
        document. `dropout_seed`: that of the probabilities' dropout, None without."""
        q, k, v = self.project(x)
        q = self.q_layernorm(q)
        k = self.k_layernorm(k)
        if rotary is not None:
            batch_first = document_ids is not None and self.cp.size == 1
            q = self.rotate(q, *rotary, batch_first=batch_first)
            k = self.rotate(k, *rotary, batch_first=batch_first)
        if self.recompute_core and torch.is_grad_enabled():
            y = recompute(self.core, q, k, v, document_ids, dropout_seed)
        else:
            y = self.core(q, k, v, document_ids, dropout_seed)
        return self.linear_proj(y.flatten(2))

    def own_queries(self, rows: torch.Tensor) -> torch.Tensor:
        """This rank's part [s, b, ...] of the rows of linear_qkv -> its queries and the key and
        value that they share with other ranks, whose gradients for these are summed."""
        qkv = gather_sequence(rows, self.tp, -1)
        qkv = qkv.unflatten(-1, (self.all_groups, -1, self.head_dim))
        ranks = self.tp.size // self.all_groups  # that share a group
        group, number = divmod(self.tp.rank, ranks)
        first = number * self.queries_per_group
        queries = qkv[..., group, first : first + self.queries_per_group, :]
        return torch.cat((queries, qkv[..., group, -2:, :]), -2).flatten(-2)

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [s, b, h] -> queries [s, b, n, d], keys and values [s, b, g, d] of this rank's n heads
        in g groups."""
        qkv = self.linear_qkv(x)
        if self.tp.size > self.all_groups:
            qkv = self.own_queries(qkv)
        qkv = qkv.unflatten(-1, (self.groups, self.queries_per_group + 2, self.head_dim))
        return functional.split_qkv(qkv, self.queries_per_group)

    def core(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        document_ids: torch.Tensor | None,
        dropout_seed: torch.Tensor | None,
    ) -> torch.Tensor:
        """The part without weights: q [s, b, n, d], k and v [s, b, g, d] -> [s, b, n, d]."""
        if document_ids is None and dropout_seed is None:
            return self.attend(q, k, v, None, None)
        return self.masked_core(q, k, v, document_ids, dropout_seed)

    def masked_core(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        document_ids: torch.Tensor | None,
        dropout_seed: torch.Tensor | None,
    ) -> torch.Tensor:
        """`core` inside documents, or with dropout of the probabilities."""
        return self.attend(q, k, v, document_ids, dropout_seed)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        document_ids: torch.Tensor | None,
        dropout_seed: torch.Tensor | None,
    ) -> torch.Tensor:
        """To this rank's keys alone, or with those of the other context-parallel ranks."""
        dropout = 0.0 if dropout_seed is None else self.dropout
        spec = self.spec(q, dropout, document_ids is not None)
        return self.implementation(q, k, v, spec, document_ids, dropout_seed)
