"""Rules of the shape of the model, its dtypes and activation recomputation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from megatron.config.checks.facts import Facts
from megatron.config.moe import parse_layer_pattern

# flags that say something of each layer
PATTERNS = {
    "moe_layer_freq",
    "no_rope_freq",
    "window_attn_skip_freq",
    "linear_attention_freq",
    "hybrid_layer_pattern",
}


def shape(f: Facts) -> Iterator[str]:
    """Sizes of the model that do not fit each other."""
    for problem in _hybrid(f):
        f.bad.add("hybrid_layer_pattern")
        yield f"{f.say('hybrid_layer_pattern')}: {problem} [hybrid-layer-pattern-wrong]"
    yield from _patterns(f)
    yield from _blocks(f)
    yield from _positions(f)


def _blocks(f: Facts) -> Iterator[str]:
    """What the blocks of the layers refuse. Where number or pattern of the layers is wrong, one
    layer stands for all."""
    model = f.config.model
    if not f.ok("num_layers") or f.bad & (PATTERNS | {"mtp_num_layers"}):
        model = replace(
            model,
            num_layers=1,
            mtp_num_layers=None,
            hybrid_layer_pattern=None,
            moe_layer_freq="1",
            no_rope_freq=None,
            window_attn_skip_freq=None,
            linear_attention_freq=None,
        )
    if not f.ok("hidden_size", "num_attention_heads", "rotary_percent"):
        model = replace(model, position_embedding_type="none", use_rotary_position_embeddings=False)
    for block in model.blocks:
        yield from block.refuses(f)


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
    if f["use_rotary_position_embeddings"] and f["position_embedding_type"] == "none":
        yield (
            "--position-embedding-type none: --use-rotary-position-embeddings means rope; omit "
            "one of them [flags-exclude-each-other]"
        )
    kind = "position_embedding_type" if f["rope_type"] in (None, "rope") else "rope_type"
    for name in ("use_rope_scaling", "rotary_seq_len_interpolation_factor"):
        if f[name] and f[kind] in ("yarn", "longrope"):
            yield (
                f"{f.say(name)}: another scaling than that of {f.say(kind)}; omit one of the two "
                "[flags-exclude-each-other]"
            )


def _hybrid(f: Facts) -> Iterator[str]:
    """What is wrong with the pattern of layers of one block."""
    if f["hybrid_layer_pattern"] is None:
        return
    main, *depths = f.config.model.pattern_parts
    unknown = "".join(dict.fromkeys(re.sub(r"[*GE-]", "", main)))
    if unknown:
        mamba = "; there are no Mamba layers (M)" * ("M" in unknown)
        yield f"no layer is called {unknown!r}: letters are *, G, - and E, and | and /{mamba}"
    for name, number in (("num_layers", len(main)), ("mtp_num_layers", len(depths))):
        if number != (f[name] or 0):
            yield f"{f.say(name)} are not its {number}; omit {f.flags[name].spelling}"
    if len(set(depths)) > 1 or not all(re.fullmatch(r"[*G]?[E-]|[*G]", each) for each in depths):
        yield (
            "behind each / the same: one module of multi-token prediction, of *, G, - or E, or of "
            "one of the first two and one of the others, such as *E"
        )
    experts = "E" in "".join((main, *depths))
    if experts != (f["num_experts"] is not None):
        yield (
            "E is a layer of experts, which needs --num-experts"
            if experts
            else f"no layer of experts (E) for {f.say('num_experts')}"
        )


def _patterns(f: Facts) -> Iterator[str]:
    """PATTERNS that do not have a digit for each layer."""
    for name in ("no_rope_freq", "window_attn_skip_freq", "linear_attention_freq"):
        text = f[name]
        if text is not None and not _fits(f, text):
            f.bad.add(name)
            yield (
                f"{f.say(name)}: must be a number of at least 1, or a pattern of --num-layers "
                f"{f['num_layers']} times 0 or 1 such as [0]*3+[1]*1 [value-out-of-range]"
            )
    text = f["moe_layer_freq"]
    if f["num_experts"] is not None and not _fits(f, text):
        f.bad.add("moe_layer_freq")
        yield (
            f"--moe-layer-freq {text}: must be a number of at least 1, or a pattern of "
            f"--num-layers {f['num_layers']} times 0 or 1 such as [0]*1+[1]*26 "
            "[moe-layer-pattern-wrong]"
        )


def _fits(f: Facts, text: str) -> bool:
    """Is it a number of layers, or has it one digit for each?"""
    try:
        if text.isdecimal():
            return int(text) > 0
        return len(parse_layer_pattern(text)) == f["num_layers"] or not f.ok("num_layers")
    except ValueError:
        return False


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


def notes(f: Facts) -> Iterator[str]:
    """What is taken of two that contradict each other."""
    other = f["position_embedding_type"] not in ("rope", "yarn", "none")
    if f["use_rotary_position_embeddings"] and other and "position_embedding_type" in f.typed:
        yield (
            f"{f.say('position_embedding_type')}: --use-rotary-position-embeddings counts, as in "
            "Megatron-LM, so positions are rope; give one of the two [positions-given-twice]"
        )
