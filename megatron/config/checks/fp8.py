"""Rules of --fp8-format and the flags that go with it."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.checks.facts import Facts

MULTIPLE = 16  # of both inner dimensions of an FP8 GEMM


def rule(f: Facts) -> Iterator[str]:
    """One line for each size of a rank's GEMMs that 16 does not divide, and for what fp8 cannot
    go with."""
    if f["torch_compile"] and f["fp8_recipe"] == "delayed":
        yield (
            "--torch-compile: cannot follow delayed scales, which change every step; use "
            "--fp8-recipe tensorwise [fp8-delayed-scaling-with-torch-compile]"
        )
    sizes = (
        "hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "seq_length",
        "micro_batch_size",
        "tensor_model_parallel_size",
        "context_parallel_size",
    )
    if not f.ok(*sizes) or f.bad & {
        "kv_channels",
        "ffn_hidden_size",
        "ffn_multiple_of",
        "eval_micro_batch_size",
    }:
        return  # said already
    for size, description, remedy in _gemm_sizes(f):
        if size % MULTIPLE:
            yield (
                f"{f.say('fp8')}: {description} is {size}, and FP8 GEMMs need a multiple of "
                f"{MULTIPLE}; {remedy}, or omit --fp8-format [fp8-size-not-multiple-of-16]"
            )


def _gemm_sizes(f: Facts) -> Iterator[tuple[int, str, str]]:
    """(inner dimension, what it is, what changes it) of a rank's GEMMs; nothing where it is no
    whole number, which other rules say."""
    m = f.config.model
    tp = f["tensor_model_parallel_size"]
    cp = f["context_parallel_size"]
    heads = m.num_attention_heads
    groups = m.query_groups
    if (
        heads % tp
        or (groups % tp and tp % groups)
        or m.ffn % tp
        or m.seq_length % cp
        or m.kv_channels is None
        and m.hidden_size % heads
    ):
        return
    split = f" with --tensor-model-parallel-size {tp}" if tp > 1 else ""
    chunk = f" with --context-parallel-size {cp}" if cp > 1 else ""
    if m.num_experts:
        etp = f.config.parallel.expert_tensor_parallel
        shared = m.moe_shared_expert_intermediate_size or 0
        yield m.expert_ffn // etp, "a rank's width of an expert", "change --moe-ffn-hidden-size"
        yield (
            shared // tp,
            f"a rank's width of the shared expert{split}",
            "change --moe-shared-expert-intermediate-size",
        )
    yield m.hidden_size, "the width of a layer", "change --hidden-size"
    yield (
        heads * m.head_dim // tp,
        f"the width of a rank's query heads{split}",
        "change --kv-channels or the heads",
    )
    yield (
        (heads + 2 * groups) * m.head_dim // tp,
        f"the width of a rank's queries, keys and values{split}",
        "change --kv-channels or the heads",
    )
    yield m.ffn // tp, f"the width of a rank's MLP{split}", "change --ffn-hidden-size"
    yield (
        m.seq_length // cp * f["micro_batch_size"],
        f"the number of tokens in a rank's micro-batch{chunk}",
        "change --seq-length or --micro-batch-size",
    )
    yield (
        m.seq_length // cp * (f["eval_micro_batch_size"] or MULTIPLE),
        f"the number of tokens in a rank's validation micro-batch{chunk}",
        "change --seq-length or --eval-micro-batch-size",
    )
