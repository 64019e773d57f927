"""Rules of the shape of the model, its dtypes and activation recomputation."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.checks.facts import Facts
from megatron.config.moe import parse_layer_pattern


def shape(f: Facts) -> Iterator[str]:
    """Sizes of the model that do not fit each other."""
    yield from _heads(f)
    if f.ok("hidden_size") and not f.bad & {"ffn_hidden_size", "ffn_multiple_of"}:
        experts_alone = f["num_experts"] is not None and f["moe_layer_freq"] == "1"
        if f.config.model.ffn < 1 and not experts_alone:
            yield (
                f"--ffn-hidden-size is missing: 8/3 x {f.say('hidden_size')} rounded down to a "
                "multiple of 64 is 0; give it [flag-missing]"
            )
    yield from _query_groups(f)
    yield from _positions(f)
    yield from _rope_pattern(f)


def _heads(f: Facts) -> Iterator[str]:
    if f.ok("hidden_size", "num_attention_heads") and f["kv_channels"] is None:
        hidden = f["hidden_size"]
        heads = f["num_attention_heads"]
        if hidden % heads:
            near = sorted({max(heads, hidden // heads * heads), (hidden // heads + 1) * heads})
            yield (
                f"--hidden-size {hidden}: not a multiple of --num-attention-heads {heads}; use "
                f"{' or '.join(map(str, near))}, another number of heads, or give --kv-channels "
                "[hidden-size-not-divisible-by-heads]"
            )


def _query_groups(f: Facts) -> Iterator[str]:
    if f.ok("num_attention_heads", "num_query_groups"):
        heads = f["num_attention_heads"]
        groups = f["num_query_groups"]
        if f["group_query_attention"] and heads % groups:
            fit = [str(n) for n in range(1, heads + 1) if heads % n == 0]
            yield (
                f"--num-query-groups {groups}: --num-attention-heads {heads} is not a multiple of "
                f"it; use {', '.join(fit[:12])} [heads-not-divisible-by-query-groups]"
            )
        if (
            "num_query_groups" in f.typed
            and not f["group_query_attention"]
            and groups not in (1, heads)
        ):
            yield (
                f"--num-query-groups {groups}: needs --group-query-attention; add that, or omit "
                "it [flag-needs-other-flag]"
            )


def _positions(f: Facts) -> Iterator[str]:
    if (
        f.ok("seq_length", "max_position_embeddings")
        and f["max_position_embeddings"] < f["seq_length"]
    ):
        yield (
            f"--max-position-embeddings {f['max_position_embeddings']}: less than --seq-length "
            f"{f['seq_length']}; use {f['seq_length']} or more "
            "[position-embeddings-shorter-than-sequence]"
        )
    if (
        f.ok("hidden_size", "num_attention_heads", "rotary_percent")
        and f.config.model.positions == "rope"
    ):
        width = f.config.model.head_dim
        rotated = int(width * f["rotary_percent"])
        if rotated < 2 or rotated % 2:
            yield (
                f"--rotary-percent {f['rotary_percent']}: rotates {rotated} of the {width} "
                "channels of a head; it must be an even number (see --kv-channels) "
                "[rotary-channels-odd]"
            )
    if f["use_rotary_position_embeddings"] and f["position_embedding_type"] == "none":
        yield (
            "--position-embedding-type none: --use-rotary-position-embeddings means rope; omit "
            "one of them [flags-exclude-each-other]"
        )


def _rope_pattern(f: Facts) -> Iterator[str]:
    text = f["no_rope_freq"]
    if text is None or not f.ok("num_layers"):
        return
    layers = f["num_layers"]
    try:
        fits = int(text) > 0 if text.isdigit() else len(parse_layer_pattern(text)) == layers
    except ValueError:
        fits = False
    if not fits:
        f.bad.add("no_rope_freq")
        yield (
            f"--no-rope-freq {text}: must be a number of at least 1, or a pattern of "
            f"--num-layers {layers} times 0 or 1 such as [0]*3+[1]*1 [value-out-of-range]"
        )


def precision(f: Facts) -> Iterator[str]:
    """Dtypes that exclude each other."""
    if f["tf32"] and (f["fp16"] or f["bf16"] or f["fp64"] or f["device"] == "cpu"):
        yield (
            "--tf32: has an effect on fp32 GEMMs on CUDA only; omit it [tf32-without-fp32-on-cuda]"
        )
    if (
        f["fp16"]
        and f.ok("initial_loss_scale", "max_loss_scale")
        and f["initial_loss_scale"] > f["max_loss_scale"]
    ):
        yield (
            f"{f.say('initial_loss_scale')}: greater than {f.say('max_loss_scale')}; use at most "
            "that [initial-loss-scale-out-of-bounds]"
        )
    if (
        f["fp16"]
        and f.ok("initial_loss_scale", "min_loss_scale")
        and f["initial_loss_scale"] < f["min_loss_scale"]
    ):
        yield (
            f"{f.say('initial_loss_scale')}: less than {f.say('min_loss_scale')}; use at least "
            "that [initial-loss-scale-out-of-bounds]"
        )


_RECOMPUTE = (
    "recompute_activations",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
)


def recompute(f: Facts) -> Iterator[str]:
    """Activation recomputation."""
    flags = [f.say(name) for name in _RECOMPUTE if f[name]]
    if f["recompute_fraction"] is not None:
        if flags:
            yield (
                f"{f.say('recompute_fraction')}: sets recompute completely; omit "
                f"{', '.join(flags)} [flags-exclude-each-other]"
            )
    elif f["recompute_activations"] and f["recompute_granularity"] == "full":
        yield (
            "--recompute-granularity full: --recompute-activations means selective; omit one of "
            "them [flags-exclude-each-other]"
        )
    elif f["moe_layer_recompute"] and f["recompute_granularity"] == "full":
        yield (
            "--moe-layer-recompute: --recompute-granularity full recomputes whole layers; omit one "
            "of the two [flags-exclude-each-other]"
        )
    elif f["recompute_granularity"] == "full":
        yield from _full_recompute(f)
    elif f["recompute_activations"] or f["recompute_granularity"]:
        for name in ("recompute_method", "recompute_num_layers"):
            if f[name] is not None:
                yield (
                    f"{f.say(name)}: needs --recompute-granularity full; add that, or omit it "
                    "[flag-needs-other-flag]"
                )


def _full_recompute(f: Facts) -> Iterator[str]:
    layers = f["recompute_num_layers"]
    if f["recompute_method"] is None:
        yield (
            "--recompute-method is missing: --recompute-granularity full needs uniform or "
            "block [flag-missing]"
        )
    if layers is None:
        yield (
            "--recompute-num-layers is missing: --recompute-granularity full needs it, 1 is "
            "usual [flag-missing]"
        )
    elif f.ok("num_layers", "recompute_num_layers") and layers > f["num_layers"]:
        yield (
            f"--recompute-num-layers {layers}: there are only {f['num_layers']} layers; use "
            "at most that [recompute-layers-above-num-layers]"
        )
