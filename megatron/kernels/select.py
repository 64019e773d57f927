"""Kernel selection: which implementation runs each operation on a device, and why the others are
unavailable."""

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from megatron.config.tree import Config
from megatron.device import has_fp8
from megatron.kernels import libraries, linear_implementations, norms
from megatron.kernels.activations import implementations
from megatron.kernels.attention import CHUNKS_ON_CPU, IMPLEMENTATIONS, no_flash, select
from megatron.kernels.attention_spec import AttentionSpec
from megatron.kernels.cross_entropy import CROSS_ENTROPY
from megatron.kernels.dropout import DROPOUT
from megatron.kernels.implementation import Implementation, Spec, choose, lacking, reasons
from megatron.kernels.kernels import KernelRow, Kernels
from megatron.kernels.linear import compute_dtype
from megatron.kernels.linear_implementations import LinearSpec
from megatron.kernels.rows import COMPILED, spec_of
from megatron.kernels.weight_grads import WEIGHT_GRADS, GradSpec

ATTENTION = {
    "fused": "sdpa",
    "local": "chunked",
    "unfused": "plain",
    "flash": "flash",
    "auto": "auto",
}
TRANSFORMER_ENGINE = "Transformer Engine"
LAYERS = "linear of transformer layers"
TRANSFORMER_ENGINE_ATTENTION = {
    "flash": "NVTE_FLASH_ATTN",
    "fused": "NVTE_FUSED_ATTN",
    "unfused": "NVTE_UNFUSED_ATTN",
}


def choose_kernels(device: torch.device, dtype: torch.dtype, config: Config) -> Kernels:
    """The kernels of this configuration on `device` with parameters of `dtype`.

    `auto` selects the fastest one that is available. Raises ValueError, with what to install, if a
    kernel requested by name is unavailable.
    """
    check_requested(device, dtype, config)
    fp8_rows(device, config)
    k = config.kernels
    engine = None
    attention = ATTENTION[config.attention_backend]
    if k.transformer_impl == "transformer_engine":
        from megatron.kernels.transformer_engine import build

        engine = build(k.gradient_accumulation_fusion, config.precision)
    if (
        attention == "auto"
        and _documents(config)
        and not config.training.torch_compile  # torch's flash kernel goes into the graph
        and None not in _newer_kernels(device, dtype, config).values()
        and _flash_unavailable_reason(device, dtype, config) is None
    ):
        attention = "flash"
    if engine is not None and _te_attention_unavailable_reason(dtype, config) is None:
        attention = "transformer_engine"
        _set_transformer_engine_environment(config.attention_backend)
    return Kernels(
        attention,
        k.bias_swiglu_fusion,
        k.apply_rope_fusion,
        k.gradient_accumulation_fusion,
        engine,
        config.training.torch_compile,
    )


def _documents(config: Config) -> bool:
    """Whether attention uses document masks."""
    return config.data.reset_attention_mask or config.packed


def _flash_unavailable_reason(
    device: torch.device, dtype: torch.dtype, config: Config, requested: bool = False
) -> str | None:
    """Why flash-attn is unavailable. `requested`: by name; the command line's rules have then
    checked the other flags."""
    why_not = no_flash(device, dtype, _asked(config)["head_dim"])
    return why_not or (None if requested else _library_attention_unavailable_reason(config))


def _newer_kernels(
    device: torch.device, dtype: torch.dtype, config: Config
) -> dict[str, str | None]:
    """Why attention inside documents is not that of FlashAttention-3 or 4; None for the one that it
    is, once it is."""
    from megatron.kernels.cuda.torch_flash import NEWER, newer_kernels, unavailable_reason

    asked = _asked(config, config.parallel.tensor_model_parallel_size)
    if config.attention_backend != "auto":
        why_not: str | None = "not selected"
    elif config.training.deterministic_mode:
        why_not = "not used with --deterministic-mode"
    else:
        why_not = libraries.cuda_only(device) or _library_attention_unavailable_reason(config)
        why_not = why_not or unavailable_reason(device, dtype, asked["head_dim"])
    if why_not:
        return {title: why_not for title, _ in NEWER.values()}
    return newer_kernels(device, dtype, asked["heads"], asked["groups"], asked["head_dim"])


def _library_attention_unavailable_reason(config: Config) -> str | None:
    """Why attention needs this suite's own kernels."""
    if config.has_rings:
        return "context parallelism uses the built-in ring attention"
    # their own dropout RNG is not reproducible on resume
    dropout = config.model.attention_dropout
    spec = _spec(torch.device("meta"), torch.float32, config, dropout, _asked(config))
    return lacking(spec, frozenset({"documents", "window"}))


def check_requested(device: torch.device, dtype: torch.dtype, config: Config) -> None:
    """Raise ValueError if a kernel requested by name is unavailable; loads no library and starts no
    device."""
    k = config.kernels
    if k.transformer_impl == "transformer_engine":
        why_not = libraries.transformer_engine_unavailable_reason(device, dtype)
        if why_not is not None:
            raise ValueError(
                f"--transformer-impl transformer_engine: {why_not}; or use --transformer-impl "
                "local [kernel-not-available]"
            )
    if config.attention_backend == "flash":
        why_not = _flash_unavailable_reason(device, dtype, config, requested=True)
        if why_not is not None:
            flag = "--use-flash-attn" if k.use_flash_attn else "--attention-backend flash"
            raise ValueError(
                f"{flag}: {why_not}; or use --attention-backend auto [kernel-not-available]"
            )


def _te_attention_unavailable_reason(dtype: torch.dtype, config: Config) -> str | None:
    """Why --transformer-impl transformer_engine does not use Transformer Engine's attention; None
    if it does."""
    if config.attention_backend == "local":
        return "not selected"
    why_not = None if dtype in (torch.float16, torch.bfloat16) else "needs fp16 or bf16"
    return why_not or _library_attention_unavailable_reason(config)


def _set_transformer_engine_environment(backend: str) -> None:
    """Transformer Engine reads its attention backend from environment variables before the first
    call."""
    if backend in TRANSFORMER_ENGINE_ATTENTION:
        os.environ |= {
            name: str(int(key == backend)) for key, name in TRANSFORMER_ENGINE_ATTENTION.items()
        }


def kernel_table(device: torch.device, dtype: torch.dtype, config: Config) -> list[KernelRow]:
    """The implementations of every operation that this configuration can use on `device` with
    parameters of `dtype`.

    One row of each operation is selected. Nothing is timed: the selection depends on the kind of
    device, the capabilities of torch, the installed libraries (of which Triton, FlashAttention-3
    and 4 are tried by small kernels) and the configuration, so a resumed run selects the same
    kernels. Raises ValueError as `choose_kernels`.
    """
    kernels = choose_kernels(device, dtype, config)
    return [
        *_linear_rows(device, dtype, config, kernels),
        *_accumulation_rows(device, dtype, config, kernels),
        *_attention_rows(device, dtype, config, kernels),
        *_row_tables(device, dtype, config, kernels),
    ]


def listed(
    operation: str, implementations: Sequence[Implementation[Any, Any]], spec: Spec
) -> list[KernelRow]:
    """The row of the implementation that computes `spec`, and those of the others."""
    choice = choose(implementations, spec)
    chosen = choice.implementation
    # one row for all of a title
    off = dict(reasons(implementations, spec, chosen))
    off.pop(chosen.title, None)
    return [
        KernelRow(operation, chosen.title, True, choice.why),
        *(KernelRow(operation, title, False, reason) for title, reason in off.items()),
    ]


def _linear_rows(
    device: torch.device, dtype: torch.dtype, config: Config, kernels: Kernels
) -> list[KernelRow]:
    plain = LinearSpec(device, dtype)
    of_layers = _linear_spec(device, dtype, config, kernels.transformer_engine is not None)
    if of_layers == plain:
        return _linear("linear", plain)
    return [*_linear(LAYERS, of_layers), *_linear("output layer", plain)]


def _linear_spec(
    device: torch.device, dtype: torch.dtype, config: Config, engine: bool
) -> LinearSpec:
    """What a linear layer in a transformer layer asks for."""
    return LinearSpec(device, dtype, config.precision.fp8, engine, config.training.torch_compile)


def _linear(operation: str, spec: LinearSpec) -> list[KernelRow]:
    words = {
        "dtype": str(spec.dtype).removeprefix("torch."),
        "fp8": spec.fp8 or "e4m3 or hybrid",
    }
    rows = listed(operation, linear_implementations.IMPLEMENTATIONS, spec)
    return [replace(row, implementation=row.implementation.format(**words)) for row in rows]


def _accumulation_rows(
    device: torch.device, dtype: torch.dtype, config: Config, kernels: Kernels
) -> list[KernelRow]:
    operation = "weight gradients"
    by_autograd = "autograd, then added"
    if not kernels.accumulation:
        off = (KernelRow(operation, row.title, False, "disabled") for row in WEIGHT_GRADS)
        return [KernelRow(operation, by_autograd, True, "--no-gradient-accumulation-fusion"), *off]
    if kernels.transformer_engine is not None:
        return [KernelRow(operation, "accumulated in backward", True, TRANSFORMER_ENGINE)]
    main = getattr(torch, config.precision.grad_dtype)
    spec = GradSpec(device, compute_dtype(torch.empty(0, dtype=dtype, device=device)), main)
    rounds = "rounds to the parameter dtype"
    return [
        *listed(operation, WEIGHT_GRADS, spec),
        KernelRow(operation, by_autograd, False, rounds),
    ]


def fp8_rows(device: torch.device, config: Config) -> list[KernelRow]:
    """The rows of --fp8-format on `device`, none without it. Raises ValueError if the device has no
    FP8 support."""
    if config.precision.fp8 is None:
        return []
    if device.type != "cpu" and not has_fp8(device):
        raise ValueError(
            f"--fp8-format {config.precision.fp8}: this device has no FP8 support (needs compute "
            "capability 8.9 or newer); omit it [fp8-not-supported]"
        )
    engine = config.kernels.transformer_impl == "transformer_engine"
    dtype = getattr(torch, config.precision.params_dtype)
    return _linear(LAYERS, _linear_spec(device, dtype, config, engine))


def _attention_rows(
    device: torch.device, dtype: torch.dtype, config: Config, kernels: Kernels
) -> list[KernelRow]:
    rows = []
    dropout = config.model.attention_dropout
    uses = (
        {"attention (training)": dropout, "attention (evaluation)": 0.0}
        if dropout
        else {"attention": 0.0}
    )
    for asked, ring in _all_asked(config):
        others = ", whole sequences" if config.has_rings and not ring else ""
        window = f", window of {asked['window']}" if asked.get("window") else ""
        for name, p in uses.items():
            operation = f"{name}{window}{others}"
            spec = _spec(device, dtype, config, p, asked)
            if ring:
                from megatron.kernels import block_implementations

                rows += listed(operation, block_implementations.IMPLEMENTATIONS, spec)
            else:
                rows += _plain_attention_rows(operation, device, dtype, config, kernels, spec)
    return rows


def _plain_attention_rows(
    operation: str,
    device: torch.device,
    dtype: torch.dtype,
    config: Config,
    kernels: Kernels,
    spec: AttentionSpec,
) -> list[KernelRow]:
    """The rows of attention without context parallelism."""
    backend = config.attention_backend
    if kernels.attention == "transformer_engine":
        return [
            KernelRow(
                operation,
                TRANSFORMER_ENGINE,
                True,
                "requested" + f", {backend} backend" * (backend != "auto"),
            )
        ]
    choice = select(spec, kernels.attention)
    chosen = choice.implementation
    why = choice.why
    title = chosen.title
    off = dict(reasons(IMPLEMENTATIONS, spec, chosen))
    if chosen.name == "flash" and backend == "auto":
        why = "computes only inside documents"
    if chosen.name != "flash":
        not_flash = _flash_unavailable_reason(device, dtype, config)
        off["flash-attn"] = not_flash or "no benefit on this device"
    if config.training.torch_compile:
        off |= {each.title: COMPILED for each in IMPLEMENTATIONS if each.name.startswith("cpp")}
    if _documents(config):
        for newer, why_not in _newer_kernels(device, dtype, config).items():
            if chosen.name == "torch_flash" and why_not is None:
                off = {chosen.title: "slower"} | off
                title = newer
            else:
                off[newer] = why_not or "not selected"
    if kernels.transformer_engine is not None:
        off[TRANSFORMER_ENGINE] = _te_attention_unavailable_reason(dtype, config) or "not selected"
    return [
        KernelRow(operation, title, True, why),
        *(KernelRow(operation, name, False, reason) for name, reason in off.items()),
    ]


def _spec(
    device: torch.device,
    dtype: torch.dtype,
    config: Config,
    dropout: float,
    asked: dict[str, Any],
) -> AttentionSpec:
    """What a layer asks for. In a graph on a CPU the C++ takes no such heads."""
    if config.training.torch_compile and device.type == "cpu":
        asked |= {"head_dim": 1, "value_dim": 1}
    return AttentionSpec(
        device,
        dtype,
        config.model.seq_length or CHUNKS_ON_CPU.start,
        dropout=dropout,
        documents=_documents(config),
        **asked,
    )


def _asked(config: Config, tp: int = 1) -> dict[str, Any]:
    """What the first layer with attention asks for."""
    return _all_asked(config, tp)[0][0]


def _all_asked(config: Config, tp: int = 1) -> list[tuple[dict[str, Any], bool]]:
    """What layers with attention ask for, and whether in a ring, each once; without a model, the
    least there can be."""
    every: list[tuple[dict[str, Any], bool]] = []
    if config.model.num_layers is not None:
        for spec in config.model.layer_counts():
            if spec.mixer is not None:
                heads, ring = config.parallel.split_context(spec.mixer.comm_type)
                asked = spec.mixer.attention(tp * heads), ring > 1
                every += [asked] * (asked[0] != {} and asked not in every)
    least = {"heads": 1, "groups": 1, "head_dim": 1, "value_dim": 1, "scale": 1.0}
    return every or [(least, config.has_rings)]


def _row_tables(
    device: torch.device, dtype: torch.dtype, config: Config, kernels: Kernels
) -> list[KernelRow]:
    """Norms, activation, rotary positions, loss and dropout, which the model chooses alike."""
    model = config.model
    weight = torch.empty(0, dtype=dtype, device=device)
    norm = kernels.in_layers(weight, zero_centered=model.apply_layernorm_1p)
    if kernels.transformer_engine is not None:
        rows = [KernelRow(model.normalization, TRANSFORMER_ENGINE, True, "requested")]
    else:
        rows = listed(model.normalization, norms.implementations(model.normalization), norm)
    activation = kernels.activation(model.activation, weight)
    rows += listed(model.activation, implementations(model)[0], activation)
    if model.rotates:
        from megatron.kernels.rotary import ROTARY

        ropes = map(model.rope, range(model.num_layers or 0))
        neighbours = any(rope.interleaved for rope in ropes if rope is not None)
        rows += listed("rotary", ROTARY, kernels.rotary(weight, neighbours))
    if model.num_layers and model.delta_layers:
        from megatron.kernels.delta_rule import DELTA_RULES

        rows += listed("gated delta rule", DELTA_RULES, kernels.in_layers(weight))
    maths = config.precision.fp16_lm_cross_entropy
    capped = model.final_logit_softcapping is not None
    loss = spec_of(weight, other_maths=maths, capped=capped)
    rows += listed("cross entropy", CROSS_ENTROPY, loss)
    if model.hidden_dropout or model.attention_dropout:
        rows += listed("dropout", DROPOUT, kernels.in_layers(weight))
    return rows
