"""Gated delta nets, computed, and the state that generation keeps of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from megatron.kernels.delta_rule import DELTA_RULES, causal_conv
from megatron.kernels.kernels import Kernels
from megatron.model.blocks.cache import Cache
from megatron.model.blocks.gated_delta.facts import GatedDeltaNet
from megatron.model.blocks.module import BlockModule, LayerInputs, Recompute, Seeds
from megatron.model.norm import Norm
from megatron.parallel.context import ParallelContext
from megatron.parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.parallel.recompute import recompute as recomputed
from megatron.parallel.sharding import ParameterFactory


class StateCache(Cache):
    """States of `rows` sequences of any length. Two of each are kept, those before and after the
    last call: what it read may be read once more, as keys and values may."""

    rewinds = False

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        rows: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        super().__init__(shapes, rows, 2, dtype, device)
        self._ends = torch.zeros(rows, 2, dtype=torch.int64, device=device)  # tokens in each

    def read(self) -> dict[str, torch.Tensor]:
        """What is before the call's first tokens: zeros, a state that is kept, or NaN."""
        tokens = self.tokens
        starts = tokens.positions[:, 0]
        rows = torch.arange(tokens.rows.start, tokens.rows.stop, device=starts.device)
        fits = self._ends[tokens.rows] == starts.unsqueeze(1)
        slot = fits.int().argmax(1)
        self._ends[rows, slot] = starts
        self._to = rows, 1 - slot
        lost = ~fits.any(1)

        def taken(stored: torch.Tensor) -> torch.Tensor:
            def where(mask: torch.Tensor) -> torch.Tensor:
                return mask.view(-1, *[1] * (stored.dim() - 2))

            values = stored[rows, slot].masked_fill(where(lost), torch.nan)
            return values.masked_fill(where(starts == 0), 0.0)

        return {name: taken(stored) for name, stored in self._tensors.items()}

    @property
    def counts(self) -> torch.Tensor | None:
        """How many tokens of each row of the call count, where not all of them do."""
        positions, lengths = self.tokens.positions, self.tokens.lengths
        if min(lengths) == positions.shape[1]:
            return None
        return torch.tensor(lengths, device=positions.device)

    def write(self, counts: torch.Tensor | int, **values: torch.Tensor) -> None:
        """Keep what is behind the call's tokens."""
        self._ends[self._to] = self.tokens.positions[:, 0] + counts
        for name, value in values.items():
            self._tensors[name][self._to] = value.to(self._tensors[name].dtype)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the sequence `source` to the sequence `target`."""
        for tensor in (self._ends, *self._tensors.values()):
            tensor[target] = tensor[source]


class GatedDelta(BlockModule):
    """A gated delta net of this rank's heads (Yang et al. 2025). Decays and states are fp32 at
    least."""

    rule: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    cache: StateCache | None

    def __init__(
        self,
        facts: GatedDeltaNet,
        params: ParameterFactory,
        ctx: ParallelContext,
        number: int,
        kernels: Kernels,
        recompute: Recompute,
    ):
        super().__init__()
        self.facts = facts
        self.tp = ctx.tp.size
        self.heads = facts.model.linear_num_key_heads // ctx.tp.size
        self.in_proj = ColumnParallelLinear.named("in_proj", params, ctx, kernels)
        self.conv1d = nn.ParameterDict({"weight": params("conv1d.weight")})
        self.dt_bias = params("dt_bias")
        self.A_log = params("A_log")
        plain = replace(facts.model, normalization="RMSNorm", apply_layernorm_1p=False)
        self.out_norm = Norm(plain, params.scope("out_norm"), kernels)
        self.out_proj = RowParallelLinear.named("out_proj", params, ctx, kernels)
        self.choose("rule", DELTA_RULES, kernels.in_layers(self.A_log))

    def outside_graph(self) -> list[tuple[nn.Module, str]]:
        """What is unrolled by the length of the sequence."""
        return [(self, "core")]

    def new_cache(self, rows: int, length: int, dtype: torch.dtype) -> StateCache:
        """Of states, whatever the length."""
        wide = torch.promote_types(dtype, torch.float32)
        return StateCache(self.facts.cache(self.tp), rows, wide, self.A_log.device)

    def forward(self, x: torch.Tensor, inputs: LayerInputs, seeds: Seeds) -> torch.Tensor:
        """x [s, b, h] -> [s, b, h]; with document_ids [b, s] no token sees another document."""
        return self.out_proj(self.core(self.in_proj(x), inputs.document_ids))

    def core(self, rows: torch.Tensor, document_ids: torch.Tensor | None) -> torch.Tensor:
        """`mix`, of which only the arguments are kept."""
        if torch.is_grad_enabled():
            return recomputed(self.mix, rows, document_ids)
        return self.mix(rows, document_ids)

    def mix(self, rows: torch.Tensor, document_ids: torch.Tensor | None) -> torch.Tensor:
        """Rows of in_proj [s, b, ...] -> values [s, b, m e] of this rank's m heads."""
        *of_conv, gates, betas, decays = self.facts.parts
        rows = rows.transpose(0, 1).unflatten(-1, (self.heads, -1))
        qkv, z, b, a = rows.split((sum(of_conv), gates, betas, decays), -1)
        qkv = qkv.flatten(2)
        s = qkv.shape[1]
        wide = torch.promote_types(rows.dtype, torch.float32)
        g = -self.A_log.to(wide).exp() * F.softplus(a.flatten(2).to(wide) + self.dt_bias)
        beta = b.flatten(2).to(wide).sigmoid()
        weight = self.conv1d["weight"]
        taps = weight.shape[1]
        state = counts = None
        if self.cache is None:
            qkv = F.pad(qkv, (0, 0, taps - 1, 0))
        else:
            kept = self.cache.read()
            state = kept["state"]
            qkv = torch.cat((kept["conv"].to(qkv.dtype), qkv), 1)
            counts = self.cache.counts
            if counts is not None:  # padding changes no state
                padding = torch.arange(s, device=qkv.device) >= counts.unsqueeze(1)
                g, beta = (t.masked_fill(padding.unsqueeze(-1), 0.0) for t in (g, beta))
        mixed = causal_conv(qkv, weight, document_ids).unflatten(-1, (self.heads, -1))
        q, k, v = mixed.split(of_conv, -1)
        v = v.flatten(2).unflatten(-1, (-1, self.facts.model.linear_value_head_dim))
        y, state = self.rule(q, k, v, g, beta, document_ids, state)
        if self.cache is not None:
            conv = qkv[:, s:]
            if counts is not None:
                last = counts.unsqueeze(1) + torch.arange(taps - 1, device=qkv.device)
                conv = qkv.take_along_dim(last.unsqueeze(-1), 1)
            self.cache.write(s if counts is None else counts, state=state, conv=conv)
        y = self.out_norm(y).flatten(2)
        return (y * F.silu(z.flatten(2).to(wide))).to(y.dtype).transpose(0, 1)
