"""Multi-head latent attention: queries, keys and values from latents, and generation from a cache
of these."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from megatron.kernels.attention_spec import AttentionCall
from megatron.kernels.kernels import Kernels
from megatron.kernels.reference_attention import cached_attention
from megatron.kernels.rotary import ROTARY
from megatron.model.blocks.attention.module import SelfAttention
from megatron.model.blocks.mla.facts import LatentAttention
from megatron.model.blocks.module import LayerInputs, Recompute, Rotary, Seeds
from megatron.model.norm import Norm
from megatron.parallel.collectives import copy_to, gather_sequence
from megatron.parallel.context import Axis, ParallelContext
from megatron.parallel.layers import ColumnParallelLinear
from megatron.parallel.recompute import recompute_inputs
from megatron.parallel.sharding import ParameterFactory

if TYPE_CHECKING:
    from megatron.model.blocks.cache import Cache


class MultiLatentAttention(SelfAttention):
    """Attention of this rank's heads to keys and values that are made of latents (DeepSeek-AI 2024,
    DeepSeek-V2).

    Latents and the rotary key are computed alike on each tensor-parallel rank, with sequence
    parallelism of its own tokens. Rotary channels are rotated in neighbouring pairs.
    """

    facts: LatentAttention

    def __init__(
        self,
        facts: LatentAttention,
        params: ParameterFactory,
        ctx: ParallelContext,
        number: int,
        kernels: Kernels,
        recompute: Recompute,
    ):
        super().__init__(facts, params, ctx, number, kernels, recompute)
        self.split = (facts.plain, facts.rotary)
        self.sequence_parallel = ctx.sequence_parallel
        self.recompute_up = recompute.includes("mla_up_proj")

    def project_from(
        self, params: ParameterFactory, ctx: ParallelContext, kernels: Kernels
    ) -> None:
        """Build the layers to latents and from them, in the order of the table of parameters."""
        config = self.facts.model
        whole = copy(ctx)
        whole.tp = Axis("tp", ranks=(ctx.rank,))
        whole.sequence_parallel = False

        def latent_norm(name: str) -> nn.Module | None:
            if not config.qk_layernorm:
                return None
            epsilon = config.latent_norm_epsilon or config.norm_epsilon
            return Norm(replace(config, norm_epsilon=epsilon), params.scope(name), kernels)

        self.q_layernorm = None
        if config.q_lora_rank is None:
            self.linear_q_proj = ColumnParallelLinear.named("linear_q_proj", params, ctx, kernels)
        else:
            self.linear_q_down_proj = ColumnParallelLinear.named(
                "linear_q_down_proj", params, whole, kernels
            )
            self.q_layernorm = latent_norm("q_layernorm")
            self.linear_q_up_proj = ColumnParallelLinear.named(
                "linear_q_up_proj", params, ctx, kernels
            )
        self.linear_kv_down_proj = ColumnParallelLinear.named(
            "linear_kv_down_proj", params, whole, kernels
        )
        self.kv_layernorm = latent_norm("kv_layernorm")
        self.linear_kv_up_proj = ColumnParallelLinear.named(
            "linear_kv_up_proj", params, ctx, kernels
        )
        rotary = kernels.rotary(self.weight, interleaved=True)
        self.choose("rotate", ROTARY, rotary, interleaved=True)

    @property
    def weight(self) -> torch.Tensor:
        """One whose dtype and device are those of the computation."""
        return self.linear_kv_down_proj.weight

    def outside_graph(self) -> list[tuple[nn.Module, str]]:
        """As of any attention, and what is computed again."""
        outside = super().outside_graph()
        if self.recompute_up:
            outside.append((self, "attend_again"))
        return outside

    def new_cache(self, rows: int, length: int, dtype: torch.dtype) -> Cache:
        """Of latents and rotary keys."""
        from megatron.model.blocks.cache import Cache

        return Cache(self.facts.cache(self.tp.size), rows, length, dtype, self.weight.device)

    def forward(self, x: torch.Tensor, inputs: LayerInputs, seeds: Seeds) -> torch.Tensor:
        """x [s/cp, b, h] -> [s/cp, b, h]; with document_ids [b, s], whole, no position sees another
        document."""
        queries, latents, key = self.latents(x)
        assert inputs.rotary is not None, "the description of the layer has rotary positions"
        key = self.rotate(key.unsqueeze(2), *inputs.rotary, batch_first=False)
        if self.cache is not None:
            y = self.attend_cached_latents(self.cache, queries, latents, key, inputs.rotary)
            return self.linear_proj(y.flatten(2))
        document_ids = inputs.document_ids
        dropout_seed = seeds.get("attention")
        made_of = queries, latents, key
        if self.recompute_up and torch.is_grad_enabled():
            y = self.attend_again(made_of, inputs.rotary, document_ids, dropout_seed)
        else:
            y = self.attend_to(*self.up(*made_of, inputs.rotary), document_ids, dropout_seed)
        return self.linear_proj(y.flatten(2))

    def latents(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [s, b, h] ([s/tp, b, h] with sequence parallelism) -> what queries are made of
        [..., b, q_lora_rank or h] and what keys and values are made of [..., b, kv_lora_rank], both
        of this rank's tokens, and the channels of keys that all heads share [s, b, rotary]."""
        queries = x
        if self.facts.model.q_lora_rank is not None:
            queries = self.linear_q_down_proj(x)
            if self.q_layernorm is not None:
                queries = self.q_layernorm(queries)
        latents, key = self.linear_kv_down_proj(x).split((self.facts.latent, self.facts.rotary), -1)
        latents = latents.contiguous()
        if self.kv_layernorm is not None:
            latents = self.kv_layernorm(latents)
        # each rank's heads have a part of its gradient
        key = gather_sequence(key, self.tp) if self.sequence_parallel else copy_to(key, self.tp)
        return queries, latents, key

    def queries(self, latents: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        """Queries [s, b, n, d] of this rank's heads, rotated."""
        has_latent = self.facts.model.q_lora_rank is not None
        layer = self.linear_q_up_proj if has_latent else self.linear_q_proj
        plain, rotated = layer(latents).unflatten(-1, (self.groups, -1)).split(self.split, -1)
        return torch.cat((plain, self.rotate(rotated, *rotary, batch_first=False)), -1)

    def keys_values(
        self, latents: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [s, b, n, d] and values [s, b, n, v] of this rank's heads, from latents and rotated
        keys [s, b, 1, rotary]."""
        rows = self.linear_kv_up_proj(latents).unflatten(-1, (self.groups, -1))
        plain, values = rows.split((self.facts.plain, self.facts.value_dim), -1)
        keys = torch.cat((plain, key.expand(*plain.shape[:-1], -1)), -1)
        return keys, values.contiguous()  # not a view, which would keep all rows for backward

    def up(
        self, queries: torch.Tensor, latents: torch.Tensor, key: torch.Tensor, rotary: Rotary
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values, as `queries` and `keys_values`, shared."""
        return self.share(self.queries(queries, rotary), *self.keys_values(latents, key))

    def attend_again(
        self,
        made_of: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        rotary: Rotary,
        document_ids: torch.Tensor | None,
        dropout_seed: torch.Tensor | None,
    ) -> torch.Tensor:
        """`attend_to` what is made of latents, which is not kept but made again in backward."""

        def up(
            queries: torch.Tensor, latents: torch.Tensor, key: torch.Tensor
        ) -> tuple[torch.Tensor, ...]:
            return self.up(queries, latents, key, rotary)

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return self.attend_to(q, k, v, document_ids, dropout_seed)

        return recompute_inputs(attend, up, *made_of)

    def attend_cached_latents(
        self,
        cache: Cache,
        queries: torch.Tensor,
        latents: torch.Tensor,
        key: torch.Tensor,
        rotary: Rotary,
    ) -> torch.Tensor:
        """To the latents of a sequence so far: the arguments of `up` of the tokens of this call ->
        [s, b, n, v]. For a few tokens no key and no value is made (`absorbed`)."""
        q = self.queries(queries, rotary)
        kept = cache.remember("latents", torch.cat((latents, key.squeeze(2)), -1))
        visible, causal = cache.seen
        facts = self.facts
        if self.absorbs(len(q)):
            return self.absorbed(q, kept, visible, causal)
        if causal:
            return self.core(q, *self.keys_values(latents, key), None, None)
        latents, key = kept.transpose(0, 1).split((facts.latent, facts.rotary), -1)
        k, v = self.keys_values(latents.contiguous(), key.unsqueeze(2))
        k, v = k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3)
        return cached_attention(q, k, v, visible, False, AttentionCall(self.spec(q)))

    def absorbs(self, count: int) -> bool:
        """Are products of so many queries and their results with linear_kv_up_proj fewer than it
        takes to make keys and values?"""
        made = self.facts.plain + self.facts.value_dim
        return count * (2 * self.facts.latent - made) < self.facts.latent * made

    def absorbed(
        self, q: torch.Tensor, kept: torch.Tensor, visible: torch.Tensor | None, causal: bool
    ) -> torch.Tensor:
        """Attention of q [s, b, n, d] to `kept` [b, end, latent + rotary] -> [s, b, n, v]: keys of
        linear_kv_up_proj are multiplied with queries, its values with results, so that latents
        themselves are the keys and values of one head."""
        facts = self.facts
        s, b, n, _ = q.shape
        up = self.linear_kv_up_proj.weight.to(q.dtype).unflatten(0, (n, -1))
        up_keys, up_values = up.split((facts.plain, facts.value_dim), 1)
        plain, rotated = (t.permute(2, 0, 1, 3) for t in q.split(self.split, -1))  # heads first
        inner = torch.bmm(plain.flatten(1, 2), up_keys).unflatten(1, (s, b))
        # the heads of a position as that many positions
        lines = torch.cat((inner, rotated), -1).transpose(0, 1).flatten(0, 1).unsqueeze(2)
        if causal:
            visible = torch.ones(s, s, dtype=torch.bool, device=q.device).tril_()[None, None]
        if visible is not None:
            visible = visible.repeat_interleave(n, 2)
        keys, values = kept.unsqueeze(1), kept[..., : facts.latent].unsqueeze(1)
        y = cached_attention(lines, keys, values, visible, False, AttentionCall(self.spec(q)))
        y = y.view(s, n, b, -1).transpose(0, 1).flatten(1, 2)
        return torch.bmm(y, up_values.transpose(1, 2)).unflatten(1, (s, b)).permute(1, 2, 0, 3)
