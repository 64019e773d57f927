"""Gated delta nets: their sizes, parameters, memory, traffic, and what they cannot be combined
with."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.config.plan.parameter_spec import (
    LayerScheme,
    Matrices,
    ParameterSpec,
    column,
    row,
)
from megatron.config.plan.transfer import (
    Traffic,
    column_to_row_backward,
    gathered_input,
    summed_result,
)
from megatron.model.blocks.block import Mixer, Rules, Sizes, fit

CHUNK = 64  # that of kernels/delta_rule.py


@dataclass(frozen=True)
class GatedDeltaNet(Mixer):
    """Linear attention with a state of each value head [key, value channels], which each token
    shrinks and corrects towards its value (Yang et al. 2025, Gated Delta Networks; Qwen3-Next). A
    key head serves several value heads. What is between the two projections is always computed
    again in backward."""

    scope = "self_attention"
    recomputed_as = "attention"
    made_again = ("core_attn",)

    @property
    def values_of_key(self) -> int:
        """Value heads of a key head."""
        return self.model.linear_num_value_heads // self.model.linear_num_key_heads

    @property
    def parts(self) -> tuple[int, ...]:
        """Rows of in_proj of a key head: query, key, values, their gates, betas, decays."""
        m = self.model
        values = self.values_of_key * m.linear_value_head_dim
        keys = m.linear_key_head_dim
        return keys, keys, values, values, self.values_of_key, self.values_of_key

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values of all heads."""
        return self.model.linear_num_key_heads * sum(self.parts[:3])

    @property
    def projected(self) -> int:
        """Rows of in_proj."""
        return self.model.linear_num_key_heads * sum(self.parts)

    @property
    def values(self) -> int:
        """Width of all value heads together."""
        return self.model.linear_num_value_heads * self.model.linear_value_head_dim

    @property
    def text(self) -> str:
        """Heads and their widths."""
        m = self.model
        return (
            f"gated delta net, {m.linear_num_key_heads} key heads of {m.linear_key_head_dim}, "
            f"{m.linear_num_value_heads} value heads of {m.linear_value_head_dim}"
        )

    def refuses(self, f: Rules) -> Iterator[str]:
        """Heads that cannot share keys or ranks, parts of a sequence, FP8, graphs, LayerNorm."""
        names = ("linear_num_key_heads", "linear_num_value_heads", "tensor_model_parallel_size")
        by_letter = f["hybrid_layer_pattern"] is not None
        variant = f.say("hybrid_layer_pattern" if by_letter else "experimental_attention_variant")
        if f["normalization"] != "RMSNorm":
            yield (
                f"{variant}: needs --normalization RMSNorm, as its own norm is; add that "
                "[flag-needs-other-flag]"
            )
        if f["use_mup"]:
            yield f"--use-mup: not with {variant}; omit one of the two [flags-exclude-each-other]"
        if f["context_parallel_size"] > 1:
            yield (
                f"{f.say('context_parallel_size')}: the state of {variant} needs all earlier "
                "tokens on a rank; use 1 [flags-exclude-each-other]"
            )
        if f["fp8"]:
            yield (
                f"{f.say('fp8')}: not with {variant}; omit one of the two "
                "[flags-exclude-each-other]"
            )
        if not f.ok(*names):
            return
        keys, values, tp = (f[name] for name in names)
        if values % keys:
            yield (
                f"--linear-num-value-heads {values}: not a multiple of --linear-num-key-heads "
                f"{keys}; use {keys} or {max(2, values // keys + 1) * keys} [value-out-of-range]"
            )
        elif keys % tp:
            yield (
                f"{f.say('tensor_model_parallel_size')}: --linear-num-key-heads {keys} is not a "
                f"multiple of it; {fit(keys)} [tensor-parallel-does-not-divide-heads]"
            )

    def uneven(self, tp: int, etp: int) -> Iterator[tuple[str, int]]:
        """The key heads, each with its value heads."""
        if self.model.linear_num_key_heads % tp:
            yield "key heads of gated delta nets", self.model.linear_num_key_heads

    def gemm_sizes(self, tp: int, etp: int) -> Iterator[tuple[int, str, str]]:
        """The values of a rank."""
        split = f" with --tensor-model-parallel-size {tp}" if tp > 1 else ""
        remedy = "change --linear-num-value-heads or --linear-value-head-dim"
        yield self.values // tp, f"the width of a rank's value heads{split}", remedy

    def parameters(self, prefix: str, draw: LayerScheme) -> list[ParameterSpec]:
        """Rows of in_proj by key head, as `parts` says; those of conv1d its first three."""
        m = self.model
        taps = m.linear_conv_kernel_dim
        split = (("tp", 0),)
        of_heads = (m.linear_num_value_heads,)
        shape = (self.projected, m.hidden_size)
        return [
            *column(prefix + "in_proj", shape, False, draw("qkv"), Matrices(parts=self.parts)),
            ParameterSpec(
                f"{prefix}conv1d.weight",
                (self.channels, taps),
                split,
                init="uniform",
                std=1 / math.sqrt(taps),
            ),
            ParameterSpec(f"{prefix}dt_bias", of_heads, split, init="ones"),
            ParameterSpec(f"{prefix}A_log", of_heads, split, init="log_uniform", std=16.0),
            # of the heads of one rank, so its gradient is partial
            ParameterSpec(
                f"{prefix}out_norm.weight",
                (m.linear_value_head_dim,),
                init="ones",
                partial=("tp",),
            ),
            *row(
                prefix + "out_proj", (m.hidden_size, self.values), False, draw("attention_output")
            ),
        ]

    def core_flops(self) -> int:
        """Of four products of a head's state with vectors, as Megatron-LM counts them."""
        return 8 * self.values * self.model.linear_key_head_dim

    def saved(self, sizes: Sizes) -> int:
        """What in_proj makes, and what out_proj takes."""
        return sizes.tokens * sizes.itemsize * (self.projected + self.values) // sizes.tp

    def backward(self, sizes: Sizes) -> int:
        """Of in_proj; or what is between the projections, made again in torch, with its gradients,
        as measured (within 5 %): of each token and value head scores, keys and values."""
        m = self.model
        keys, values = m.linear_num_key_heads, m.linear_num_value_heads
        key, value = m.linear_key_head_dim, m.linear_value_head_dim
        numbers = values * (6.5 * CHUNK + 10 * (key + value) + key * value / CHUNK)
        numbers += keys * (3.5 * CHUNK + 6 * key)
        again = int(sizes.tokens * sizes.wide * numbers) // sizes.tp
        stream = sizes.rows * sizes.hidden * sizes.itemsize
        first = sizes.linear_backward(self.projected // sizes.tp, sizes.hidden)
        return max(first, again) + stream

    def traffic(self, sizes: Sizes) -> Traffic:
        """Of its two linear layers."""
        first = gathered_input(sizes)
        return Traffic([*first, *summed_result(sizes)], column_to_row_backward(sizes), first, [])

    def attention(self, tp: int) -> dict[str, Any]:
        """Nothing."""
        return {}

    def cache(self, tp: int) -> dict[str, tuple[int, ...]]:
        """Of all tokens together: the states of a rank's heads, and what the convolution sees."""
        m = self.model
        heads = m.linear_num_key_heads // tp
        state = (heads, self.values_of_key, m.linear_key_head_dim, m.linear_value_head_dim)
        return {"state": state, "conv": (m.linear_conv_kernel_dim - 1, self.channels // tp)}
