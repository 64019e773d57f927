"""Rules of the choices between kernels that follow from the command line alone."""

from collections.abc import Iterator

from megatron.config.checks.facts import Facts


def rule(f: Facts) -> Iterator[str]:
    """One line for each request that no machine can meet."""
    flag = "--use-flash-attn" if f["use_flash_attn"] else f.say("attention_backend")
    backend = f.config.kernels.attention
    if f["use_flash_attn"] and f["attention_backend"] not in ("auto", "flash"):
        yield (
            f"--use-flash-attn and {f.say('attention_backend')}: two kinds of attention; omit "
            "one of them [flags-exclude-each-other]"
        )
    elif not f["masked_softmax_fusion"] and backend == "local":
        yield (
            f"--no-masked-softmax-fusion and {flag}: two kinds of attention; omit one of them "
            "[flags-exclude-each-other]"
        )
    elif f.config.attention_backend in ("flash", "fused"):
        yield from _fused(f, flag, backend)
    if f["transformer_impl"] == "transformer_engine":
        yield from _transformer_engine(f)
    if f.config.kernels.cuda_graphs:
        yield from _cuda_graphs(f)


def _fused(f: Facts, flag: str, backend: str) -> Iterator[str]:
    """What one fused kernel over the whole sequence cannot do."""
    if backend == "flash" and not (f["fp16"] or f["bf16"]):
        yield f"{flag}: computes in fp16 and bf16 only; add --bf16 [flash-attention-needs-16-bit]"
    if backend == "flash" and f["device"] == "cpu":
        yield f"{flag}: needs a CUDA device, and --device is cpu; omit it [cuda-device-needed]"
    lacking = (
        ("softmax_type",) if backend == "flash" else ("softmax_type", "attn_logit_softcapping")
    )
    for name in lacking:
        if f[name] not in (None, "vanilla"):
            yield (
                f"{flag}: does not compute {f.say(name)}; use auto, or omit that "
                "[flags-exclude-each-other]"
            )
    if backend == "fused" and f["transformer_impl"] == "local":
        if f["fp64"]:
            yield f"{flag}: has no fp64; use auto [fused-attention-has-no-fp64]"
        if f["reset_attention_mask"] or f.config.packed:
            yield (
                f"{flag}: torch's fused attention cannot mask documents without storing all "
                "scores; use auto, or flash [fused-attention-has-no-document-masks]"
            )


def _transformer_engine(f: Facts) -> Iterator[str]:
    """What Transformer Engine's modules cannot be asked for."""
    flag = f.say("transformer_impl")
    for name, why in (
        ("fp64", "it has no fp64"),
        ("torch_compile", "its modules cannot be compiled"),
        ("fp32_residual_connection", "its norms follow the parameter dtype"),
    ):
        if f[name]:
            yield (
                f"{flag}: {why}; omit it or {f.flags[name].spelling} "
                "[flag-not-with-transformer-engine]"
            )
    if f["device"] == "cpu":
        yield f"{flag}: needs a CUDA device, and --device is cpu; omit it [cuda-device-needed]"
    recomputes = f["recompute_granularity"] == "full" or f["recompute_fraction"]
    if recomputes and f["fp8"] is not None and f["fp8_recipe"] == "delayed":
        yield (
            f"{flag}: its delayed scales would differ in a recomputed layer; add --fp8-recipe "
            "tensorwise, or recompute less [fp8-delayed-scaling-with-recompute]"
        )


def _cuda_graphs(f: Facts) -> Iterator[str]:
    """What no recorded micro-batch repeats."""
    flag = f.say("enable_cuda_graph" if f["enable_cuda_graph"] else "cuda_graph_impl")
    if f["device"] == "cpu":
        yield f"{flag}: needs a CUDA device, and --device is cpu; omit it [cuda-device-needed]"
    counts = "the host reads how many tokens an expert has"
    seed = "its random numbers take their seed from the host"
    between_ranks = f["tensor_model_parallel_size"] * f["context_parallel_size"] > 1
    balancing = f["moe_router_load_balancing_type"]
    for name, refused, why in (
        ("reset_attention_mask", True, "each micro-batch has documents of other lengths"),
        ("attention_dropout", True, seed),
        ("moe_input_jitter_eps", True, seed),
        ("moe_router_force_load_balancing", True, seed),
        ("moe_router_load_balancing_type", "sinkhorn" in balancing, "the host ends its iterations"),
        (
            "moe_router_load_balancing_type",
            "global_aux_loss" in balancing,
            "a micro-batch depends on those before",
        ),
        ("expert_model_parallel_size", f["expert_model_parallel_size"] > 1, counts),
        ("num_experts", not f["bf16"], f"without --bf16 {counts}"),
        (
            "pipeline_model_parallel_size",
            f["pipeline_model_parallel_size"] > 1,
            "a micro-batch waits for other stages between forward and backward",
        ),
        (
            "distributed_backend",
            f["distributed_backend"] == "gloo" and between_ranks,
            "it sums tensors of a layer on the host",
        ),
        ("overlap_grad_reduce", True, "the host starts sums in the middle of a backward"),
        ("fp8", True, "the first micro-batch of an iteration casts weights for the others"),
        ("torch_compile", True, "operations in compiled layers cannot be checked"),
        (
            "transformer_impl",
            f["transformer_impl"] != "local",
            "operations in its modules cannot be checked",
        ),
    ):
        if f[name] and refused:
            yield f"{flag} and {f.say(name)}: {why}; change one of them [cuda-graph-cannot-hold]"


def notes(f: Facts) -> Iterator[str]:
    """Warnings about settings that no rule forbids."""
    if f.config.kernels.attention != f.config.attention_backend:
        name = "attention_backend"
        if f["use_flash_attn"]:
            name = "use_flash_attn"
        elif f[name] == "auto":
            name = "masked_softmax_fusion"
        if f.config.has_rings:
            yield (
                f"{f.say(name)}: no effect with --context-parallel-size "
                f"{f['context_parallel_size']} and {f.say('cp_comm_type')}, whose attention over "
                "blocks of keys has its own kernels and the same results; --cp-comm-type a2a takes "
                "it [attention-backend-with-context-parallel]"
            )
        else:
            yield (
                f"{f.say(name)}: no effect with {f.say('attention_dropout')}: its dropout masks "
                "could not be repeated by a resumed run; the kernel of --attention-backend auto is "
                "used (or give --attention-dropout 0) [fused-attention-with-dropout]"
            )
    if (
        f["transformer_impl"] == "transformer_engine"
        and f["fp8"] is not None
        and f["fp8_recipe"] == "delayed"
    ):
        yield (
            "--fp8-recipe delayed: Transformer Engine's amax history is not saved, so a resume "
            "resets it and is not bit-exact; with --fp8-recipe tensorwise it is "
            "[fp8-history-not-saved]"
        )
