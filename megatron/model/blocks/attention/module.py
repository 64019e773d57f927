"""Causal self-attention with multi-head or grouped queries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from megatron.kernels import functional
from megatron.kernels.attention_spec import AttentionSpec, Forward
from megatron.kernels.cuda import torch_flash
from megatron.kernels.implementation import lacking
from megatron.kernels.kernels import Kernels
from megatron.kernels.rotary import ROTARY
from megatron.model.blocks.attention.facts import Attention
from megatron.model.blocks.cache import Cache, WindowCache
from megatron.model.blocks.module import BlockModule, LayerInputs, Recompute, Seeds
from megatron.model.norm import Norm
from megatron.parallel.collectives import gather_sequence
from megatron.parallel.context import ParallelContext
from megatron.parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.parallel.random import recompute as recomputed
from megatron.parallel.sharding import ParameterFactory


class SelfAttention(BlockModule):
    """Attention of this rank's heads (Vaswani et al. 2017; groups of query heads share a key and a
    value head).

    Rows of linear_qkv by query group: the group's query heads, its key head, its value head. Scores
    and softmax are fp32 at least in every kernel, so --attention-softmax-in-fp32 is always on and
    --apply-query-key-layer-scaling, which keeps half-precision scores in range, has nothing left to
    do.
    """

    rotate: Callable[..., torch.Tensor]

    def __init__(
        self,
        facts: Attention,
        params: ParameterFactory,
        ctx: ParallelContext,
        number: int,
        kernels: Kernels,
        recompute: Recompute,
    ):
        super().__init__()
        config = facts.model
        self.facts = facts
        self.tp = ctx.tp
        self.head_dim = facts.head_dim
        self.all_groups = config.query_groups
        self.groups = facts.groups_of_rank(ctx.tp.size)
        self.queries_per_group = config.num_attention_heads // ctx.tp.size // self.groups
        self.asked = facts.attention(ctx.tp.size)
        self.dropout = config.attention_dropout
        self.recompute_core = recompute.includes("core_attn")
        self.cp = ctx.cp
        self.requested = kernels.attention

        def head_norm(name: str) -> nn.Module | None:
            if not config.qk_layernorm:
                return None
            if not config.qk_layernorm_all_heads:
                return Norm(config, params.scope(name), kernels)
            from megatron.model.blocks.attention.all_heads_norm import AllHeadsNorm

            return AllHeadsNorm(config, params.scope(name), ctx.tp)

        self.linear_qkv = ColumnParallelLinear.named("linear_qkv", params, ctx, kernels)
        rotary = kernels.rotary(self.linear_qkv.weight, config.rotary_interleaved)
        self.choose("rotate", ROTARY, rotary, interleaved=config.rotary_interleaved)
        self.q_layernorm = head_norm("q_layernorm")
        self.k_layernorm = head_norm("k_layernorm")
        self.linear_proj = RowParallelLinear.named("linear_proj", params, ctx, kernels)
        self.implementation = self._implementation(ctx, kernels)

    def _implementation(self, ctx: ParallelContext, kernels: Kernels) -> Forward:
        if kernels.transformer_engine is not None and kernels.attention == "transformer_engine":
            spec = replace(self.spec(self.linear_qkv.weight), window=self.facts.window)
            return kernels.transformer_engine.attention(spec)
        if self.cp.size == 1:
            return partial(functional.attention, requested=kernels.attention)
        from megatron.parallel.ring_attention import ring_attention

        return partial(ring_attention, cp=self.cp, comm_type=ctx.cp_comm_type)

    def spec(
        self, queries: torch.Tensor, dropout: float = 0.0, documents: bool = False
    ) -> AttentionSpec:
        """What this layer asks of attention, in the dtype and on the device of `queries` [s/cp,
        ...]."""
        window = self.facts.window_in(queries.shape[0] * self.cp.size)
        return AttentionSpec(
            queries.device,
            queries.dtype,
            queries.shape[0],
            dropout=dropout,
            documents=documents,
            compiled=torch.compiler.is_compiling(),
            **self.asked | {"window": window},
        )

    def dropout_sites(self) -> dict[str, int]:
        """That of the probabilities, whose heads are always split over tp."""
        return {"attention": self.tp.rank} if self.dropout else {}

    def outside_graph(self) -> list[tuple[nn.Module, str]]:
        """Attention with masks where it is no single operation, and between ranks: in chunks it
        would be unrolled into thousands, anew for each seed."""
        weight = self.linear_qkv.weight
        unfit = torch_flash.unavailable_reason(weight.device, weight.dtype, self.head_dim)
        outside: list[tuple[nn.Module, str]] = []
        if unfit is not None or self.requested != "auto":
            outside.append((self, "masked_core"))
        if self.cp.size > 1:
            outside.append((self, "attend"))
        return outside

    def new_cache(self, rows: int, length: int, dtype: torch.dtype) -> Cache:
        """Of keys and values."""
        weight = self.linear_qkv.weight
        if why_not := lacking(self.spec(weight), frozenset({"window"})):
            raise ValueError(f"attention to cached keys {why_not}")
        shapes = self.facts.cache(self.tp.size)
        if window := self.facts.window_in(length):
            return WindowCache(shapes, rows, window, dtype, weight.device)
        return Cache(shapes, rows, length, dtype, weight.device)

    def forward(self, x: torch.Tensor, inputs: LayerInputs, seeds: Seeds) -> torch.Tensor:
        """x [s/cp, b, h] -> [s/cp, b, h]; with document_ids [b, s], whole, no position sees another
        document."""
        document_ids = inputs.document_ids
        dropout_seed = seeds.get("attention")
        q, k, v = self.project(x)
        if self.q_layernorm is not None:
            q = self.q_layernorm(q)
        if self.k_layernorm is not None:
            k = self.k_layernorm(k)
        if inputs.rotary is not None:
            batch_first = document_ids is not None and self.cp.size == 1
            q = self.rotate(q, *inputs.rotary, batch_first=batch_first)
            k = self.rotate(k, *inputs.rotary, batch_first=batch_first)
        if self.cache is not None:
            return self.linear_proj(self.attend_cached(self.cache, q, k, v).flatten(2))
        if self.recompute_core and torch.is_grad_enabled():
            y = recomputed(self.core, q, k, v, document_ids, dropout_seed)
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
        if document_ids is None and dropout_seed is None and self.facts.window is None:
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
        """`core` inside documents or a window, or with dropout of the probabilities."""
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

    def attend_cached(
        self, cache: Cache, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """To the keys of a sequence so far, or of its window: q [s, b, n, d], k and v [s, b, g, d]
        of the tokens of this call -> [s, b, n, d]."""
        s, b, n, d = q.shape
        k = cache.append("keys", k).transpose(1, 2)
        v = cache.append("values", v).transpose(1, 2)
        visible, causal = cache.seen
        if s == 1:  # the query heads of a group as that many positions: nothing is repeated
            q = q.view(b, -1, self.queries_per_group, d)
        else:
            q = q.permute(1, 2, 0, 3)
        y = F.scaled_dot_product_attention(
            q,
            k,
            v,
            visible,
            is_causal=causal,
            scale=self.asked["scale"],
            enable_gqa=s > 1 and self.queries_per_group > 1,
        )
        return y.reshape(1, b, n, d) if s == 1 else y.permute(2, 0, 1, 3)
