"""Causal self-attention with multi-head or grouped queries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from megatron.kernels.attention import select, unfit
from megatron.kernels.attention_spec import AttentionCall, AttentionSpec, Forward
from megatron.kernels.block_attention import KeyBlock, block_maxima
from megatron.kernels.implementation import lacking
from megatron.kernels.kernels import Kernels
from megatron.kernels.qkv import split_qkv
from megatron.model.blocks.attention.facts import Attention
from megatron.model.blocks.module import BlockModule, LayerInputs, Recompute, Seeds
from megatron.model.norm import Norm
from megatron.parallel.collectives import gather_sequence, my_slice
from megatron.parallel.context import ParallelContext
from megatron.parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.parallel.sharding import ParameterFactory

if TYPE_CHECKING:
    from megatron.model.blocks.cache import Cache


class CoreAttention(nn.Module):
    """The sinks of --softmax-type, one score of each head [n], under Megatron's name: parameters if
    learnable, else 0."""

    def __init__(self, facts: Attention, params: ParameterFactory, weight: torch.Tensor, n: int):
        super().__init__()
        if facts.model.softmax_type == "learnable":
            self.softmax_offset = params("softmax_offset")
        else:
            zeros = torch.zeros(n, dtype=weight.dtype, device=weight.device)
            self.register_buffer("softmax_offset", zeros, persistent=False)


class SelfAttention(BlockModule):
    """Attention of this rank's heads (Vaswani et al. 2017; groups of query heads share a key and a
    value head).

    Rows of linear_qkv by query group: the group's query heads, with --attention-output-gate the
    gates of these, its key head, its value head. Scores and softmax are fp32 at least in every
    kernel, so --attention-softmax-in-fp32 is always on and --apply-query-key-layer-scaling, which
    keeps half-precision scores in range, has nothing left to do.
    """

    rotate: Callable[..., torch.Tensor]
    # where the largest score of each of this rank's heads [n] is added up; None: nowhere
    maxima: torch.Tensor | None = None

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
        self.cp = ctx.cp
        # of the context-parallel ranks: those that exchange heads, and those of a ring
        self.exchanging, self.ring = ctx.attention_axes(facts.comm_type)
        self.asked = facts.attention(ctx.tp.size * self.exchanging.size)
        self.dropout = config.attention_dropout
        self.recompute_core = recompute.includes("core_attn")
        self.requested = kernels.attention

        self.project_from(params, ctx, kernels)
        self.core_attention = None
        if self.asked["sink"]:
            scope = params.scope("core_attention")
            heads = self.groups * self.queries_per_group
            self.core_attention = CoreAttention(facts, scope, self.weight, heads)
        self.linear_proj = RowParallelLinear.named("linear_proj", params, ctx, kernels)
        spec = replace(self.spec(self.weight), window=facts.window)
        # a graph of torch.compile has attention without any features, but for the widths of values
        # that a kernel of GPUs takes
        on_cpu = self.weight.device.type == "cpu"
        self.plain = not lacking(spec, frozenset(() if on_cpu else {"value_dim"}))
        # of a generation, where the cache hides what is before the window
        self.fused = not lacking(spec, frozenset({"window"}))
        self.implementation = self._implementation(spec, ctx, kernels)
        self._chosen: dict[tuple[object, ...], tuple[AttentionSpec, Forward]] = {}

    def project_from(
        self, params: ParameterFactory, ctx: ParallelContext, kernels: Kernels
    ) -> None:
        """Build what makes queries, keys and values of hidden states, and `rotate`."""
        config = self.facts.model

        def head_norm(name: str) -> nn.Module | None:
            if not config.qk_layernorm:
                return None
            if not config.qk_layernorm_all_heads:
                return Norm(config, params.scope(name), kernels)
            from megatron.model.blocks.attention.all_heads_norm import AllHeadsNorm

            return AllHeadsNorm(config, params.scope(name), ctx.tp)

        self.linear_qkv = ColumnParallelLinear.named("linear_qkv", params, ctx, kernels)
        if self.facts.rope is not None:
            from megatron.kernels.rotary import ROTARY

            rotary = kernels.rotary(self.linear_qkv.weight, config.rotary_interleaved)
            self.choose("rotate", ROTARY, rotary, interleaved=config.rotary_interleaved)
        self.norm_after_rope = config.qk_layernorm_after_rope
        self.q_layernorm = head_norm("q_layernorm")
        self.k_layernorm = head_norm("k_layernorm")

    @property
    def weight(self) -> torch.Tensor:
        """One whose dtype and device are those of the computation."""
        return self.linear_qkv.weight

    def _implementation(
        self, spec: AttentionSpec, ctx: ParallelContext, kernels: Kernels
    ) -> Forward | None:
        """That of all sequences; None: by what each asks for."""
        if kernels.transformer_engine is not None and kernels.attention == "transformer_engine":
            return kernels.transformer_engine.attention(spec)
        if self.ring.size == 1:
            return None
        from megatron.parallel.ring_attention import ring_attention

        return partial(ring_attention, cp=self.ring, comm_type=self.facts.comm_type)

    def spec(
        self, queries: torch.Tensor, dropout: float = 0.0, documents: bool = False
    ) -> AttentionSpec:
        """What this layer asks of attention, in the dtype and on the device of `queries` [s/ring,
        ...]."""
        window = self.facts.window_in(queries.shape[0] * self.ring.size)
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
        outside: list[tuple[nn.Module, str]] = [(self, "record")]
        spec = self.spec(self.weight)
        if self.requested != "auto" or unfit("torch_flash", spec):
            outside.append((self, "masked_core"))
        if self.ring.size > 1:
            outside.append((self, "attend"))
        if self.exchanging.size > 1:
            outside += [(self, "share"), (self, "attend_to")]
        return outside

    def new_cache(self, rows: int, length: int, dtype: torch.dtype) -> Cache:
        """Of keys and values."""
        from megatron.kernels.reference_attention import CACHED
        from megatron.model.blocks.cache import Cache, WindowCache

        weight = self.weight
        if why_not := lacking(self.spec(weight), CACHED):
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
        q, k, v, gates = self.project(x)
        if not self.norm_after_rope:
            q, k = self.normalize(q, k)
        if inputs.rotary is not None:
            batch_first = document_ids is not None and self.cp.size == 1
            q = self.rotate(q, *inputs.rotary, batch_first=batch_first)
            k = self.rotate(k, *inputs.rotary, batch_first=batch_first)
        if self.norm_after_rope:
            q, k = self.normalize(q, k)
        if self.cache is not None:
            y = self.attend_cached(self.cache, q, k, v)
        else:
            y = self.attend_to(*self.share(q, k, v), document_ids, dropout_seed)
        if gates is not None:
            y = y * gates
        return self.linear_proj(y.flatten(2))

    def share(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values as `core` takes them: those of `megatron.parallel.ulysses` where
        context-parallel ranks exchange heads."""
        if self.exchanging.size == 1:
            return q, k, v
        from megatron.parallel.ulysses import by_heads

        return by_heads(q, k, v, self.exchanging)

    def attend_to(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        document_ids: torch.Tensor | None,
        dropout_seed: torch.Tensor | None,
    ) -> torch.Tensor:
        """`core` of what `share` has made, whose activations are kept, or computed again in
        backward: [s/cp, b, n, v]."""
        if self.recompute_core and torch.is_grad_enabled():
            from megatron.parallel.recompute import recompute

            y = recompute(self.core, q, k, v, document_ids, dropout_seed)
        else:
            y = self.core(q, k, v, document_ids, dropout_seed)
        if self.exchanging.size == 1:
            return y
        from megatron.parallel.ulysses import by_positions

        return by_positions(y, self.exchanging)

    def normalize(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys, by the norms of --qk-layernorm if there are any."""
        if self.q_layernorm is None or self.k_layernorm is None:
            return q, k
        return self.q_layernorm(q), self.k_layernorm(k)

    def own_queries(self, rows: torch.Tensor) -> torch.Tensor:
        """This rank's part [s, b, ...] of the rows of linear_qkv -> its queries, their gates, and
        the key and value that they share with other ranks, whose gradients for these are summed."""
        qkv = gather_sequence(rows, self.tp, -1)
        qkv = qkv.unflatten(-1, (self.all_groups, -1, self.head_dim))
        ranks = self.tp.size // self.all_groups  # that share a group
        group, number = divmod(self.tp.rank, ranks)
        heads = qkv[..., group, :-2, :].unflatten(-2, (-1, ranks, self.queries_per_group))
        own = heads[..., number, :, :].flatten(-3, -2)
        return torch.cat((own, qkv[..., group, -2:, :]), -2).flatten(-2)

    def project(
        self, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """x [s, b, h] -> queries [s, b, n, d], keys and values [s, b, g, d] of this rank's n heads
        in g groups, and factors [s, b, n, d] of the core's result, if there are any."""
        qkv = self.linear_qkv(x)
        if self.tp.size > self.all_groups:
            qkv = self.own_queries(qkv)
        qkv = qkv.unflatten(-1, (self.groups, -1, self.head_dim))
        n = self.queries_per_group
        if not self.facts.gates:
            return *split_qkv(qkv, n), None
        q, gates, k, v = qkv.split((n, n, 1, 1), 3)
        return q.flatten(2, 3), k.squeeze(3), v.squeeze(3), gates.sigmoid().flatten(2, 3)

    def core(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        document_ids: torch.Tensor | None,
        dropout_seed: torch.Tensor | None,
    ) -> torch.Tensor:
        """The part without weights: q [s, b, n, d], k [s, b, g, d] and v [s, b, g, v] -> [s, b, n,
        v]."""
        if document_ids is None and dropout_seed is None and self.plain:
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
        """`core` inside documents or a window, with dropout of the probabilities, sinks or capped
        scores."""
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
        asked = (len(q), q.dtype, q.device, dropout, document_ids is not None)
        if torch.compiler.is_compiling():
            spec, forward = self._choose(q, dropout, document_ids)
        elif asked in self._chosen:
            spec, forward = self._chosen[asked]
        else:
            spec, forward = self._chosen[asked] = self._choose(q, dropout, document_ids)
        if self.maxima is not None and torch.is_grad_enabled():
            self.record(q, k, spec, document_ids)
        return forward(q, k, v, AttentionCall(spec, document_ids, dropout_seed, self.sinks))

    @torch.no_grad()
    def record(
        self, q: torch.Tensor, k: torch.Tensor, spec: AttentionSpec, ids: torch.Tensor | None
    ) -> None:
        """Take the scores of these queries and keys into `maxima`."""
        assert self.maxima is not None
        if self.ring.size > 1:
            from megatron.parallel.ring_attention import ring_maxima

            comm_type = self.facts.comm_type
            largest = ring_maxima(q, k, spec, ids, cp=self.ring, comm_type=comm_type)
        else:
            largest = block_maxima(q, k, KeyBlock(spec, True, ids, ids))
        own = self.maxima.chunk(self.exchanging.size)[self.exchanging.rank]
        torch.maximum(own, largest.to(own.dtype), out=own)

    def _choose(
        self, q: torch.Tensor, dropout: float, document_ids: torch.Tensor | None
    ) -> tuple[AttentionSpec, Forward]:
        spec = self.spec(q, dropout, document_ids is not None)
        if self.implementation is not None:
            return spec, self.implementation
        return spec, select(spec, self.requested).implementation.forward

    @property
    def sinks(self) -> torch.Tensor | None:
        """Scores of the sinks [n] of the heads that `core` computes; None without."""
        if self.core_attention is None:
            return None
        return my_slice(self.core_attention.softmax_offset, self.exchanging)

    def attend_cached(
        self, cache: Cache, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """To the keys of a sequence so far, or of its window: q [s, b, n, d], k and v [s, b, g, d]
        of the tokens of this call -> [s, b, n, d]."""
        s, b, n, d = q.shape
        k = cache.remember("keys", k).transpose(1, 2)
        v = cache.remember("values", v).transpose(1, 2)
        visible, causal = cache.seen
        if not self.fused:
            call = AttentionCall(self.spec(q), sinks=self.sinks)
            from megatron.kernels.reference_attention import cached_attention

            return cached_attention(q, k, v, visible, causal, call)
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
