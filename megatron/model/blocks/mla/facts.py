"""Multi-head latent attention: its sizes, parameters, memory, traffic, and what it cannot be
combined with."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from megatron.config.plan.parameter_spec import (
    ONE_MATRIX,
    LayerScheme,
    ParameterSpec,
    column,
    drawn,
    norm,
    row,
)
from megatron.config.plan.transfer import Traffic, Transfer, summed_result
from megatron.model.blocks.attention.facts import Attention
from megatron.model.blocks.block import Rules, Sizes


@dataclass(frozen=True)
class LatentAttention(Attention):
    """Causal attention whose keys and values are linear in a latent of each token (DeepSeek-AI
    2024, DeepSeek-V2), beside channels of keys with rotary positions, which all heads share. The
    layers down to latents are whole on each tensor-parallel rank."""

    made_again = ("core_attn", "mla_up_proj")

    @property
    def plain(self) -> int:
        """Channels of a query's and a key's head without rotary positions."""
        return self.model.qk_head_dim

    @property
    def rotary(self) -> int:
        """Those with rotary positions."""
        return self.model.qk_pos_emb_head_dim

    @property
    def latent(self) -> int:
        """Width of what keys and values are made of."""
        return self.model.kv_lora_rank

    @property
    def head_dim(self) -> int:
        """Width of a query's and a key's head."""
        return self.plain + self.rotary

    @property
    def value_dim(self) -> int:
        """Width of a value's head."""
        return self.model.v_head_dim

    @property
    def scale(self) -> float:
        """Factor on scores, YaRN's among it."""
        yarn = self.model.yarn
        return (1.0 if yarn is None else yarn.scores) / math.sqrt(self.head_dim)

    @property
    def queries_from(self) -> int:
        """Width of what queries are made of."""
        return self.model.q_lora_rank or self.model.hidden_size

    @property
    def values(self) -> int:
        """Width of all value heads together."""
        return self.model.num_attention_heads * self.value_dim

    @property
    def keys_values(self) -> int:
        """Width of what is made of a latent: all keys without rotary positions, and values."""
        return self.model.num_attention_heads * (self.plain + self.value_dim)

    def clipped(self, alpha: float) -> dict[str, tuple[tuple[int, float], ...]]:
        """As of Attention (Kimi Team 2025): channels of queries with rotary positions, whose keys
        all heads share, by the whole factor."""
        queries = "linear_q_up_proj" if self.model.q_lora_rank else "linear_q_proj"
        return {
            f"{queries}.weight": ((self.plain, alpha), (self.rotary, 1.0)),
            "linear_kv_up_proj.weight": ((self.plain, 1.0 - alpha), (self.value_dim, 0.0)),
        }

    @property
    def text(self) -> str:
        """Heads and latents."""
        heads = self.model.num_attention_heads
        of_queries = self.model.q_lora_rank
        latents = f"{of_queries} and {self.latent}" if of_queries else f"{self.latent}"
        return f"{heads} heads of {self.plain} + {self.rotary}, latents of {latents}"

    def refuses(self, f: Rules) -> Iterator[str]:
        """Channels that are no pairs, LongRoPE, heads that do not fit the ranks or flash-attn."""
        if f.ok("qk_pos_emb_head_dim") and self.rotary % 2:
            yield (
                f"--qk-pos-emb-head-dim {self.rotary}: rotary positions rotate pairs of channels; "
                "it must be an even number [rotary-channels-odd]"
            )
        if f["rope_type"] == "longrope":
            yield (
                "--rope-type longrope and --multi-latent-attention: only one of these can be given "
                "[flags-exclude-each-other]"
            )
        yield from self._tensor_parallel(f)
        yield from self._exchanged_heads(f)
        yield from self._flash(f)

    def uneven(self, tp: int, etp: int) -> Iterator[tuple[str, int]]:
        """The heads."""
        if self.model.num_attention_heads % tp:
            yield "attention heads", self.model.num_attention_heads

    def gemm_sizes(self, tp: int, etp: int) -> Iterator[tuple[int, str, str]]:
        """Latents, and heads of a rank."""
        split = f" with --tensor-model-parallel-size {tp}" if tp > 1 else ""
        if self.model.q_lora_rank:
            yield self.model.q_lora_rank, "the latent of queries", "change --q-lora-rank"
        yield self.latent, "the latent of keys and values", "change --kv-lora-rank"
        down = self.latent + self.rotary
        yield down, "that latent and the rotary key", "change --qk-pos-emb-head-dim"
        remedy = "change the heads or their widths"
        yield self.query // tp, f"the width of a rank's query heads{split}", remedy
        yield self.keys_values // tp, f"the width of a rank's keys and values{split}", remedy
        yield self.values // tp, f"the width of a rank's value heads{split}", remedy

    def parameters(self, prefix: str, draw: LayerScheme) -> list[ParameterSpec]:
        """Rows of linear_q_(up_)proj by head: channels without and with rotary positions; of
        linear_kv_down_proj: latent, rotary key; of linear_kv_up_proj by head: key, value."""
        m = self.model

        def down(name: str, width: int) -> ParameterSpec:
            shape = (width, m.hidden_size)
            return ParameterSpec(
                f"{prefix}{name}.weight", shape, **drawn(draw("qkv")), matrices=ONE_MATRIX
            )

        def latent_norm(name: str, width: int) -> list[ParameterSpec]:
            return norm(m, prefix + name, width) if m.qk_layernorm else []

        def up(name: str, shape: tuple[int, int]) -> list[ParameterSpec]:
            return column(prefix + name, shape, False, draw("qkv"))

        if m.q_lora_rank is None:
            table = up("linear_q_proj", (self.query, m.hidden_size))
        else:
            table = [
                down("linear_q_down_proj", m.q_lora_rank),
                *latent_norm("q_layernorm", m.q_lora_rank),
                *up("linear_q_up_proj", (self.query, m.q_lora_rank)),
            ]
        table += [
            down("linear_kv_down_proj", self.latent + self.rotary),
            *latent_norm("kv_layernorm", self.latent),
            *up("linear_kv_up_proj", (self.keys_values, self.latent)),
        ]
        out = (m.hidden_size, self.values)
        draw_out = draw("attention_output")
        return table + row(prefix + "linear_proj", out, m.attention_output_bias, draw_out)

    def core_flops(self) -> int:
        """Of the whole square of positions."""
        return 2 * self.model.seq_length * (self.query + self.values)

    def saved(self, sizes: Sizes) -> int:
        """Latents before and behind their norms; queries, keys and values as the core takes them,
        its result."""
        m = self.model
        heads = m.num_attention_heads // sizes.tp
        nbytes = 0
        for width in (self.latent, m.q_lora_rank):
            if width:
                nbytes += sizes.rows * width * sizes.itemsize
                nbytes += sizes.norm(sizes.rows, width, sizes.itemsize) if m.qk_layernorm else 0
        widths = heads * (2 * self.head_dim + self.value_dim)
        if self.up_again(sizes):
            widths = self.rotary
        widths += heads * self.value_dim  # the result
        return nbytes + sizes.tokens * sizes.itemsize * widths + self._saved_by_core(sizes, heads)

    def up_again(self, sizes: Sizes) -> bool:
        """Are queries, keys and values made of latents once more in backward?"""
        return "mla_up_proj" in sizes.config.training.recomputed_modules

    def backward(self, sizes: Sizes) -> int:
        """Of the layers from latents; queries, keys and values that are made again, and their
        gradients."""
        heads = self.model.num_attention_heads // sizes.tp
        again = 0
        if self.up_again(sizes):
            again = 2 * sizes.tokens * heads * (2 * self.head_dim + self.value_dim) * sizes.itemsize
        up = max(
            sizes.linear_backward(heads * (self.plain + self.value_dim), self.latent),
            sizes.linear_backward(heads * self.head_dim, self.queries_from),
        )
        return max(up, again) + sizes.rows * sizes.hidden * sizes.itemsize

    def traffic(self, sizes: Sizes) -> Traffic:
        """Latents and rotary keys that tensor-parallel ranks make of their own tokens, gradients of
        these, the result, and keys and values of other context-parallel ranks."""
        from megatron.model.blocks.attention.context_traffic import context_traffic

        together = (self.queries_from, self.latent, self.rotary)
        gather = [self._of_tokens(sizes, "all-gather", width) for width in together]
        gather = gather if sizes.sequence else []
        operation = "reduce-scatter" if sizes.sequence else "all-reduce"
        gradients = [self._of_tokens(sizes, operation, width) for width in together]
        again = gather[:2]  # what weights' gradients are made of
        keys, key_gradients, exchanged, recorded = context_traffic(self, sizes)
        result = self._of_tokens(sizes, "all-gather", sizes.hidden)
        unneeded = [*gather, *exchanged, keys, *recorded]
        once_more = [*again, *exchanged[:1]] * self.up_again(sizes)
        if "core_attn" in sizes.config.training.recomputed_modules:
            once_more += [keys, *recorded]
        return Traffic(
            [*unneeded, *summed_result(sizes)],
            [*again, *gradients, *[result] * sizes.sequence, *exchanged, keys, key_gradients],
            unneeded,
            once_more,
        )

    def _of_tokens(self, sizes: Sizes, operation: str, width: int) -> Transfer:
        return Transfer("tp", operation, 1, sizes.tokens * width * sizes.itemsize)

    def cache(self, tp: int) -> dict[str, tuple[int, ...]]:
        """The latent and the rotary key, the same on each rank."""
        return {"latents": (self.latent + self.rotary,)}
