"""Self-attention with multi-head or grouped queries: its sizes, parameters, memory, traffic, and
what it cannot be combined with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from megatron.config.plan.parameter_spec import (
    LayerScheme,
    Matrices,
    ParameterSpec,
    column,
    norm,
    row,
)
from megatron.config.plan.transfer import (
    Traffic,
    Transfer,
    column_to_row_backward,
    gathered_input,
    summed_result,
)
from megatron.model.blocks.block import Mixer, Rules, Sizes, fit

FLASH_HEAD_DIM = 256  # the widest head of flash-attn and of cuDNN


@dataclass(frozen=True)
class Attention(Mixer):
    """Causal attention; groups of query heads share a key and a value head. window: how many
    tokens, itself among them, a token sees, None for all before it."""

    window: int | None = None

    scope = "self_attention"
    recomputed_as = "attention"  # only its core is recomputed by itself
    made_again: ClassVar[tuple[str, ...]] = ("core_attn",)

    @property
    def head_dim(self) -> int:
        """Width of a query's and a key's head."""
        return self.model.head_dim

    @property
    def value_dim(self) -> int:
        """Width of a value's head."""
        return self.head_dim

    @property
    def scale(self) -> float:
        """Factor on scores."""
        return self.model.attention_scale

    @property
    def query(self) -> int:
        """Width of all query heads together."""
        return self.model.num_attention_heads * self.head_dim

    @property
    def key(self) -> int:
        """Width of all key heads together; values have the same."""
        return self.model.query_groups * self.head_dim

    @property
    def gates(self) -> int:
        """Width of the gates of all query heads; 0 without."""
        return self.query if self.model.attention_output_gate else 0

    @property
    def projected(self) -> int:
        """Rows of linear_qkv."""
        return self.query + self.gates + 2 * self.key

    @property
    def parts(self) -> tuple[int, ...]:
        """Those of a query group: its query heads, their gates, its key head, its value head."""
        m = self.model
        queries = self.query // m.query_groups
        return (queries, *[queries] * m.attention_output_gate, self.head_dim, self.head_dim)

    def groups_of_rank(self, tp: int) -> int:
        """Key/value heads on each of `tp` ranks; 1 where several ranks share one."""
        return max(1, self.model.query_groups // tp)

    def attention(self, tp: int) -> dict[str, Any]:
        """All that kernels are asked for but dtype, length, dropout and documents."""
        return {
            "heads": self.model.num_attention_heads // tp,
            "groups": self.groups_of_rank(tp),
            "head_dim": self.head_dim,
            "value_dim": self.value_dim,
            "scale": self.scale,
            "window": self.window_in(self.model.seq_length),
            "softcap": self.model.attn_logit_softcapping,
            "sink": self.model.softmax_type != "vanilla",
        }

    def window_in(self, length: int | None) -> int | None:
        """The window in sequences of this length; None where it hides nothing of them."""
        hides = self.window is not None and (length is None or self.window < length)
        return self.window if hides else None

    def clipped(self, alpha: float) -> dict[str, tuple[tuple[int, float], ...]]:
        """Weights that QK-clip scales, by name: of each key head so many rows by which power of its
        factor. None where norms of heads would undo it."""
        if self.model.qk_layernorm:
            return {}
        powers = (alpha, *[0.0] * self.model.attention_output_gate, 1.0 - alpha, 0.0)
        rows = tuple(zip(self.parts, powers, strict=True))
        return {"linear_qkv.weight": rows, "linear_qkv.bias": rows}

    @property
    def text(self) -> str:
        """Heads, key/value heads and their width."""
        m = self.model
        heads = "1 head" if m.num_attention_heads == 1 else f"{m.num_attention_heads} heads"
        groups = m.query_groups
        shared = "" if groups == m.num_attention_heads else f" ({groups} key/value)"
        window = "" if self.window is None else f", a window of {self.window}"
        gates = ", output gates" if m.attention_output_gate else ""
        return f"{heads}{shared} of {self.head_dim}{window}{gates}"

    def refuses(self, f: Rules) -> Iterator[str]:
        """Heads that do not fit the width, the query groups, the ranks or flash-attn."""
        yield from self._heads(f)
        yield from self._query_groups(f)
        yield from self._rotary(f)
        yield from self._tensor_parallel(f)
        yield from self._exchanged_heads(f)
        if f.ok("window_size") and f["window_size"][1]:
            yield (
                f"{f.say('window_size')}: no token sees later ones; the second number must be 0 "
                "[value-out-of-range]"
            )
        yield from self._flash(f)

    def _flash(self, f: Rules) -> Iterator[str]:
        flash = f.config.attention_backend == f.config.kernels.attention == "flash"
        sized = f.ok("hidden_size", "num_attention_heads")
        if flash and sized and self.head_dim > FLASH_HEAD_DIM:
            flag = "--use-flash-attn" if f["use_flash_attn"] else f.say("attention_backend")
            yield (
                f"{flag}: heads of {self.head_dim} channels, and it has at most "
                f"{FLASH_HEAD_DIM}; use auto [flash-attention-head-too-wide]"
            )

    def _heads(self, f: Rules) -> Iterator[str]:
        if not f.ok("hidden_size", "num_attention_heads") or f["kv_channels"] is not None:
            return
        hidden = f["hidden_size"]
        heads = f["num_attention_heads"]
        if hidden % heads:
            near = sorted({max(heads, hidden // heads * heads), (hidden // heads + 1) * heads})
            yield (
                f"--hidden-size {hidden}: not a multiple of --num-attention-heads {heads}; use "
                f"{' or '.join(map(str, near))}, another number of heads, or give --kv-channels "
                "[hidden-size-not-divisible-by-heads]"
            )

    def _query_groups(self, f: Rules) -> Iterator[str]:
        if not f.ok("num_attention_heads", "num_query_groups"):
            return
        heads = f["num_attention_heads"]
        groups = f["num_query_groups"]
        if f["group_query_attention"] and heads % groups:
            fit = [str(n) for n in range(1, heads + 1) if heads % n == 0]
            yield (
                f"--num-query-groups {groups}: --num-attention-heads {heads} is not a multiple of "
                f"it; use {', '.join(fit[:12])} [heads-not-divisible-by-query-groups]"
            )
        typed = "num_query_groups" in f.typed
        if typed and not f["group_query_attention"] and groups not in (1, heads):
            yield (
                f"--num-query-groups {groups}: needs --group-query-attention; add that, or omit "
                "it [flag-needs-other-flag]"
            )

    def _rotary(self, f: Rules) -> Iterator[str]:
        if self.rope is None or not f.ok("hidden_size", "num_attention_heads", "rotary_percent"):
            return
        rotated = self.rope.width
        for name in ("longrope_short_factor", "longrope_long_factor"):
            numbers = f[name] or ()
            if self.rope.longrope and (len(numbers) != rotated // 2 or min(numbers) <= 0):
                yield (
                    f"--{name.replace('_', '-')}: {len(numbers)} numbers; --rope-type longrope has "
                    f"{rotated // 2}, one above 0 for each rotary frequency "
                    "[longrope-factors-wrong]"
                )
        if rotated < 2 or rotated % 2:
            yield (
                f"--rotary-percent {f['rotary_percent']}: rotates {rotated} of the {self.head_dim} "
                "channels of a head; it must be an even number (see --kv-channels) "
                "[rotary-channels-odd]"
            )

    def _tensor_parallel(self, f: Rules) -> Iterator[str]:
        """Ranks share the heads; as many ranks must share each query group, and each needs a part
        of its rows."""
        tp = f["tensor_model_parallel_size"]
        if not f.ok("tensor_model_parallel_size", "num_attention_heads") or tp == 1:
            return
        flag = f.say("tensor_model_parallel_size")
        heads = f["num_attention_heads"]
        groups = self.model.query_groups
        code = "[tensor-parallel-does-not-divide-query-groups]"
        if heads % tp:
            yield (
                f"{flag}: --num-attention-heads {heads} is not a multiple of it; {fit(heads)} "
                "[tensor-parallel-does-not-divide-heads]"
            )
        elif not f.ok("num_query_groups") or heads % groups or groups % tp == 0:
            return
        elif tp % groups:
            yield (
                f"{flag}: neither it nor --num-query-groups {groups} is a multiple of the other; "
                f"{fit(groups)}, or other groups {code}"
            )
        elif self.model.qk_layernorm and self.model.qk_layernorm_all_heads:
            yield (
                f"{flag}: --qk-layernorm-all-heads needs at least as many key/value heads, and "
                f"--num-query-groups is {groups}; {fit(groups)} {code}"
            )
        elif f.ok("kv_channels", "hidden_size") and 2 * self.key % tp:
            yield (
                f"{flag}: {groups} keys and values of {self.head_dim} channels are not a "
                f"multiple of it; {fit(groups)} {code}"
            )

    def _exchanged_heads(self, f: Rules) -> Iterator[str]:
        """Context-parallel ranks that exchange heads share those of a tensor-parallel rank."""
        names = ("tensor_model_parallel_size", "context_parallel_size", "num_attention_heads")
        sizes = {"num_query_groups", "hierarchical_context_parallel_sizes"}
        if not f.ok(*names) or f.bad & sizes:
            return
        tp, cp, heads = (f[name] for name in names)
        own, groups = heads // tp, self.groups_of_rank(tp)
        ranks, _ = f.config.parallel.split_context(self.comm_type)

        def fit(n: int) -> bool:
            return not (own % n or groups % n and n % groups)

        if heads % tp or fit(ranks):
            return
        # a number of heads may be any; nobody has more ranks in a group than this
        fits = [n for n in range(1, min(own, 4096) + 1) if fit(n)]
        most = max(n for n in fits if cp % n == 0)
        levels = f", a2a+p2p with --hierarchical-context-parallel-sizes {most} {cp // most}"
        yield (
            f"{f.say('cp_comm_type')}: {own} query and {groups} key/value heads of a "
            f"tensor-parallel rank cannot be shared by {ranks} ranks, but by "
            f"{', '.join(map(str, fits))}; use another size{levels * (1 < most < cp)}, or p2p "
            "[context-parallel-does-not-divide-heads]"
        )

    def uneven(self, tp: int, etp: int) -> Iterator[tuple[str, int]]:
        """Query heads, and key/value heads unless as many ranks share each."""
        m = self.model
        groups = m.query_groups
        if m.kv_channels is None and m.hidden_size % m.num_attention_heads:
            yield "hidden size of all heads", m.hidden_size
        if self.model.num_attention_heads % tp:
            yield "attention heads", self.model.num_attention_heads
        if groups % tp and tp % groups:
            yield "key/value heads", groups

    def gemm_sizes(self, tp: int, etp: int) -> Iterator[tuple[int, str, str]]:
        """Of the projections before and after the core."""
        split = f" with --tensor-model-parallel-size {tp}" if tp > 1 else ""
        remedy = "change --kv-channels or the heads"
        yield self.query // tp, f"the width of a rank's query heads{split}", remedy
        yield self.projected // tp, f"the width of a rank's queries, keys and values{split}", remedy

    def parameters(self, prefix: str, draw: LayerScheme) -> list[ParameterSpec]:
        """Rows of linear_qkv by query group, as `parts` says."""
        m = self.model
        d = self.head_dim
        shape, parts = (self.projected, m.hidden_size), Matrices(parts=self.parts)
        table = column(prefix + "linear_qkv", shape, m.qkv_bias, draw("qkv"), parts)
        for name, width in (("q_layernorm", self.query), ("k_layernorm", self.key)):
            if m.qk_layernorm and m.qk_layernorm_all_heads:
                (weight,) = norm(m, prefix + name, width)
                table.append(replace(weight, splits=(("tp", 0),)))
            elif m.qk_layernorm:  # applied to the heads of one rank, so its gradient is partial
                table += norm(m, prefix + name, d, partial=("tp",))
        if m.softmax_type == "learnable":
            name = prefix + "core_attention.softmax_offset"
            heads = (m.num_attention_heads,)
            table.append(
                ParameterSpec(name, heads, (("tp", 0),), init="normal", std=m.init_method_std)
            )
        out = (m.hidden_size, self.query)
        draw_out = draw("attention_output")
        return table + row(prefix + "linear_proj", out, m.attention_output_bias, draw_out)

    def core_flops(self) -> int:
        """Of the whole square of positions, or its rows of a window."""
        length = self.model.seq_length
        return 4 * (self.window_in(length) or length) * self.query

    def saved(self, sizes: Sizes) -> int:
        """Queries, keys and values as the projection made them, where something keeps them, and as
        the core takes them; the core's result."""
        m = self.model
        d = self.head_dim
        query, key = self.query // sizes.tp, self.groups_of_rank(sizes.tp) * d
        heads, groups = query // d, key // d
        gates = self.gates // sizes.tp
        ranks = self.exchanging(sizes)
        rows = query + gates + 2 * key
        # with queries of all groups, made contiguous
        projected = rows + (query if groups > 1 and heads > groups else 0)
        widths = query + 2 * gates  # their sigmoid, and its product with the core's result
        if m.qk_layernorm and m.qk_layernorm_after_rope and self.rope is not None:
            widths += query + key + (0 if ranks > 1 else rows)  # rotated
        elif m.qk_layernorm:
            widths += projected
        elif ranks == 1:
            widths += projected if self.rope is None else rows
        if ranks > 1:
            widths += query + 2 * max(key, ranks * d)
        elif self.rope is not None or m.qk_layernorm:
            widths += query + key
        nbytes = sizes.tokens * sizes.itemsize * widths
        if m.qk_layernorm and m.qk_layernorm_all_heads:
            nbytes += sizes.tokens * 2 * sizes.wide
        elif m.qk_layernorm:
            statistics = sizes.norm(1, 0, sizes.itemsize)
            widened = sizes.norm(1, 1, sizes.itemsize) - statistics > sizes.itemsize
            nbytes += sizes.tokens * (
                statistics * (heads + groups) + (sizes.wide * (query + key) if widened else 0)
            )
        return nbytes + self._saved_by_core(sizes, heads)

    def _saved_by_core(self, sizes: Sizes, heads: int) -> int:
        """Probabilities, or the logarithms of the softmax's sums; nothing where chunks are computed
        again."""
        m = self.model
        config = sizes.config
        if "core_attn" in config.training.recomputed_modules:
            return 0
        backend = config.attention_backend
        chunked = (
            m.attention_dropout > 0
            or config.data.reset_attention_mask
            or config.precision.fp64
            or m.attn_logit_softcapping is not None
        )
        # kernels/cuda/torch_flash.py takes them on a CUDA device
        flash = (
            not sizes.on_cpu
            and sizes.itemsize == 2
            and self.head_dim % 8 == 0
            and self.head_dim <= 192
            and self.value_dim == self.head_dim
            and m.attn_logit_softcapping is None
        )
        chunked = chunked and not flash or backend in ("local", "unfused")
        exchanging, ring = config.parallel.split_context(self.comm_type)
        rows = sizes.tokens * heads * sizes.wide
        nbytes = 0
        if ring > 1 or not chunked or m.softmax_type != "vanilla":
            # and the result, if that is not what the next layer keeps
            nbytes = rows + (sizes.tokens * heads * self.value_dim * sizes.itemsize) * (
                exchanging > 1
            )
        if backend == "fused" and self.window_in(m.seq_length):
            nbytes += m.seq_length**2 * sizes.itemsize  # a mask
        if backend == "unfused":
            kept = (3 if m.attention_dropout else 1) + (m.attn_logit_softcapping is not None)
            nbytes += rows * (m.seq_length * kept + (m.softmax_type != "vanilla"))
        return nbytes

    def backward(self, sizes: Sizes) -> int:
        """Of the projection of queries, keys and values."""
        groups = 2 * self.groups_of_rank(sizes.tp) * self.head_dim
        local = (self.query + self.gates) // sizes.tp + groups
        stream = sizes.rows * sizes.hidden * sizes.itemsize
        return sizes.linear_backward(local, sizes.hidden) + stream

    def traffic(self, sizes: Sizes) -> Traffic:
        """Its two linear layers, means over all heads, the rows of a shared query group, and keys
        and values of other context-parallel ranks."""
        from megatron.model.blocks.attention.context_traffic import context_traffic

        m = self.model
        forward, backward = [], []
        if m.qk_layernorm and m.qk_layernorm_all_heads:
            # q and k of all heads are divided by one root mean square
            means = Transfer("tp", "all-reduce", 2, 2 * sizes.tokens * sizes.wide)
            forward.append(means)
            backward.append(means)
        if sizes.tp > m.query_groups:  # queries, keys and values of all ranks, and their gradients
            nbytes = sizes.tokens * self.projected * sizes.itemsize
            forward.append(Transfer("tp", "all-gather", 1, nbytes))
            backward.append(Transfer("tp", "reduce-scatter", 1, nbytes))
        keys, gradients, exchanged, recorded = context_traffic(self, sizes)
        unneeded = [*gathered_input(sizes), *forward, *exchanged, keys, *recorded]
        core_again = "core_attn" in sizes.config.training.recomputed_modules
        return Traffic(
            [*unneeded, *summed_result(sizes)],
            [*backward, *exchanged, keys, gradients, *column_to_row_backward(sizes)],
            unneeded,
            [keys, *recorded] if core_again else [],
        )

    def exchanging(self, sizes: Sizes) -> int:
        """Context-parallel ranks that exchange heads."""
        return sizes.config.parallel.split_context(self.comm_type)[0]

    def cache(self, tp: int) -> dict[str, tuple[int, ...]]:
        """Keys and values of a rank's heads."""
        shape = (self.groups_of_rank(tp), self.head_dim)
        return {"keys": shape, "values": shape}
