"""Rules of --fp8-format and the flags that go with it."""

from collections.abc import Iterator

from megatron.config.checks.facts import Facts
from megatron.config.checks.model import PATTERNS

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
        "num_layers",
        *PATTERNS,
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
    etp = f.config.parallel.expert_tensor_parallel
    if m.seq_length % cp or any(list(block.uneven(tp, etp)) for block in m.blocks):
        return
    chunk = f" with --context-parallel-size {cp}" if cp > 1 else ""
    yield m.hidden_size, "the width of a layer", "change --hidden-size"
    for block in m.blocks:
        yield from block.gemm_sizes(tp, etp)
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
