"""Which implementation of each kernel runs on a device and why each other one is off; knows no
model and no rank."""

import os
from dataclasses import dataclass

import torch

from megatron.config.precision import PrecisionConfig
from megatron.config.tree import Config
from megatron.device import multiplies_fp8
from megatron.kernels import apex, flash_attention, transformer_engine
from megatron.kernels.attention import select_attention
from megatron.kernels.block_attention import flash
from megatron.kernels.cpu import bf16_attention, fp32_attention, native
from megatron.kernels.cpu.blocking import pays_off
from megatron.kernels.kernels import Kernels
from megatron.kernels.linear import compute_dtype

ATTENTION = {
    "fused": "sdpa",
    "local": "chunked",
    "unfused": "plain",
    "flash": "flash",
    "auto": "auto",
}
NAMES = {
    "sdpa": "torch's fused attention",
    "chunked": "blocks of query rows",
    "plain": "one matrix of scores",
    "tiles": "C++ kernel in bf16",
    "vectors": "C++ kernel in fp32",
    "flash": "flash-attn",
    "engine": "Transformer Engine",
}
NATIVE = "one pass in C++"
COMPILED = "--torch-compile fuses by itself"
ENGINE_ATTENTION = {
    "flash": "NVTE_FLASH_ATTN",
    "fused": "NVTE_FUSED_ATTN",
    "unfused": "NVTE_UNFUSED_ATTN",
}


@dataclass(frozen=True)
class KernelRow:
    """One line of the table: an implementation of an operation, whether it is on, and why or why
    not."""

    operation: str
    implementation: str
    on: bool
    reason: str


def choose_kernels(device: torch.device, dtype: torch.dtype, config: Config) -> Kernels:
    """What the layers of this configuration compute with on `device` with weights of `dtype`.

    `auto` takes the best that works. Raises ValueError, with what to install, where something asked
    for by name is not possible here.
    """
    check_wishes(device, dtype, config)
    k = config.kernels
    engine = None
    attention = ATTENTION[config.attention_backend]
    if k.transformer_impl == "transformer_engine":
        transformer_engine.load()
        engine = transformer_engine.Engine(k.gradient_accumulation_fusion, _fp8(config.precision))
    if (
        attention == "auto"
        and _documents(config)
        and _flash_obstacle(device, dtype, config) is None
    ):
        attention = "flash"
    if engine is not None and _engine_attention_obstacle(dtype, config) is None:
        attention = "engine"
        _tell_engine(config.attention_backend)
    return Kernels(
        attention,
        k.bias_swiglu_fusion,
        k.apply_rope_fusion,
        k.gradient_accumulation_fusion,
        engine is None and _apex_obstacle(device, dtype, config) is None,
        engine,
    )


def _documents(config: Config) -> bool:
    """Does attention stay inside documents?"""
    return config.data.reset_attention_mask or config.data.packed_samples


def _flash_obstacle(
    device: torch.device, dtype: torch.dtype, config: Config, asked: bool = False
) -> str | None:
    """Why flash-attn does not run; `asked`: the command line's rules have spoken of what is not the
    library's."""
    why_not = flash_attention.obstacle(device, dtype, config.model.head_dim)
    return why_not or (None if asked else _foreign_attention_obstacle(config))


def _foreign_attention_obstacle(config: Config) -> str | None:
    """Why attention stays with this suite's own kernels, whatever library there is."""
    if config.parallel.context_parallel_size > 1:
        return "blocks of keys come round this suite's ring"
    if config.model.attention_dropout:
        return "drops by a generator of its own, whose masks a resumed run does not repeat"
    return None


def _apex_obstacle(device: torch.device, dtype: torch.dtype, config: Config) -> str | None:
    if config.training.torch_compile or config.model.apply_layernorm_1p:
        return (
            "--torch-compile fuses norms itself"
            if config.training.torch_compile
            else "would round 1 + weight (--apply-layernorm-1p)"
        )
    return apex.obstacle(device, dtype)


def _fp8(p: PrecisionConfig) -> transformer_engine.Fp8 | None:
    if p.fp8 is None:
        return None
    return transformer_engine.Fp8(
        p.fp8, p.fp8_recipe, p.fp8_margin, p.fp8_amax_history_len, p.fp8_amax_compute_algo
    )


def check_wishes(device: torch.device, dtype: torch.dtype, config: Config) -> None:
    """Raise ValueError where something asked for by name is missing here; loads no library and
    starts no device."""
    k = config.kernels
    if k.transformer_impl == "transformer_engine":
        if (why_not := transformer_engine.obstacle(device, dtype)) is not None:
            raise ValueError(
                f"--transformer-impl transformer_engine: {why_not}; or use --transformer-impl "
                "local [kernel-not-available]"
            )
    if config.attention_backend == "flash":
        if (why_not := _flash_obstacle(device, dtype, config, asked=True)) is not None:
            asked = "--use-flash-attn" if k.use_flash_attn else "--attention-backend flash"
            raise ValueError(
                f"{asked}: {why_not}; or use --attention-backend auto [kernel-not-available]"
            )


def _engine_attention_obstacle(dtype: torch.dtype, config: Config) -> str | None:
    """Why attention stays with this suite under --transformer-impl transformer_engine; None if it
    does not."""
    if config.attention_backend == "local":
        return "not asked for"
    why_not = None if dtype in (torch.float16, torch.bfloat16) else "needs fp16 or bf16"
    return why_not or _foreign_attention_obstacle(config)


def _tell_engine(backend: str) -> None:
    """Transformer Engine reads its choice of attention from the environment, before the first
    call."""
    if backend in ENGINE_ATTENTION:
        os.environ |= {name: str(int(key == backend)) for key, name in ENGINE_ATTENTION.items()}


def kernel_table(device: torch.device, dtype: torch.dtype, config: Config) -> list[KernelRow]:
    """The implementations of every operation that this configuration can use on `device` with
    weights of `dtype`.

    One row of each operation is on. Nothing is run or timed: the choice follows from the kind of
    device, the capabilities of torch, the libraries there and the configuration, so that a resumed
    run chooses alike. Raises ValueError as `choose_kernels`.
    """
    kernels = choose_kernels(device, dtype, config)
    return [
        *_linear_rows(device, dtype, kernels),
        *fp8_rows(device, config),
        *_accumulation_rows(device, dtype, config, kernels),
        *_attention_rows(device, dtype, config, kernels),
        *_elementwise_rows(device, dtype, config, kernels),
    ]


def _pair(
    operation: str, names: tuple[str, str], first: bool, reasons: tuple[str, str]
) -> list[KernelRow]:
    """Two rivals of which one is on: `reasons` if the first is on, why the first is and why the
    second is not."""
    chosen = 0 if first else 1
    why, why_not = reasons
    return [
        KernelRow(operation, names[chosen], True, why),
        KernelRow(operation, names[1 - chosen], False, why_not),
    ]


def _off(operation: str, name: str, why_not: str | None) -> list[KernelRow]:
    """The row of an optional library that an operation does without; `why_not` None: it would work,
    and is not asked for."""
    return [KernelRow(operation, name, False, why_not or "not asked for")]


def _linear_rows(device: torch.device, dtype: torch.dtype, kernels: Kernels) -> list[KernelRow]:
    compute = compute_dtype(torch.empty(0, dtype=dtype, device=device))
    name = str(dtype).removeprefix("torch.")
    why_not = transformer_engine.obstacle(device, dtype)
    if kernels.engine is not None:
        return [
            KernelRow("linear of transformer layers", "Transformer Engine", True, "asked for"),
            KernelRow("output layer", f"{name} products", True, "the weights' own format"),
        ]
    rows = _off("linear", "Transformer Engine", why_not)
    if dtype not in (torch.bfloat16, torch.float16):
        return [KernelRow("linear", f"{name} products", True, "the weights' own format"), *rows]
    native = compute == dtype
    reasons = (
        (f"this {device.type} has instructions for {name}", "not needed")
        if native
        else (
            f"{name} is emulated on this {device.type}; fp32 is several times faster and rounds "
            "once",
            f"no instructions for {name}",
        )
    )
    return (
        _pair("linear", (f"{name} products", "fp32 products, rounded once"), native, reasons) + rows
    )


def _accumulation_rows(
    device: torch.device, dtype: torch.dtype, config: Config, kernels: Kernels
) -> list[KernelRow]:
    operation = "weight gradients"
    main = getattr(torch, config.precision.grad_dtype)
    names = ("the layer itself", "autograd, then a sum")
    if not kernels.accumulation:
        return _pair(operation, names, False, ("--no-gradient-accumulation-fusion", "switched off"))
    why_not = apex.gradient_obstacle(device, dtype, main)
    rows = _pair(
        operation, names, True, ("no second copy of them", "rounds them to the weights' format")
    )
    if why_not is None and kernels.engine is None:
        return [
            KernelRow(operation, "apex's product", True, "one pass over memory less"),
            *(KernelRow(row.operation, row.implementation, False, "slower") for row in rows),
        ]
    return rows + _off(operation, "apex", why_not)


def fp8_rows(device: torch.device, config: Config) -> list[KernelRow]:
    """How --fp8-format multiplies on `device`, none without it; ValueError where it cannot be
    met."""
    operation = "linear in transformer layers"
    kind = config.precision.fp8
    if kind is None:
        return []
    if device.type != "cpu" and not multiplies_fp8(device):
        raise ValueError(
            f"--fp8-format {kind}: this device cannot multiply numbers of 8 bits (Ada, Hopper and "
            "later can); leave it out [fp8-not-supported]"
        )
    if config.kernels.transformer_impl == "transformer_engine":
        return _pair(
            operation,
            (f"Transformer Engine's products in 8 bits ({kind})", f"products in 8 bits ({kind})"),
            True,
            (
                f"--fp8-recipe {config.precision.fp8_recipe}",
                "--transformer-impl transformer_engine",
            ),
        )
    native = device.type != "cpu"
    return _pair(
        operation,
        (f"products in 8 bits ({kind})", f"casts to 8 bits ({kind}), products in fp32"),
        native,
        (
            f"this {device.type} has instructions for them"
            if native
            else f"EMULATED: a {device.type} has no products in 8 bits; the same casts, slower "
            "than without --fp8-format",
            "not needed" if native else f"no instructions for them on this {device.type}",
        ),
    )


def _attention_rows(
    device: torch.device, dtype: torch.dtype, config: Config, kernels: Kernels
) -> list[KernelRow]:
    rows = []
    dropout = config.model.attention_dropout
    documents = _documents(config)
    uses = (
        {"attention (training)": dropout, "attention (evaluation)": 0.0}
        if dropout
        else {"attention": 0.0}
    )
    for operation, p in uses.items():
        if config.parallel.context_parallel_size > 1:
            on = flash(device.type, dtype, config.model.head_dim, p, documents)
            rows += _pair(
                operation,
                ("torch's flash kernel, block by block", "rows of queries, block by block"),
                on,
                (
                    "blocks of keys come round the ring",
                    "rows of queries need more passes over memory"
                    if on
                    else "needs CUDA, fp16 or bf16, no attention dropout and no document masks",
                ),
            )
            continue
        rows += _plain_attention_rows(operation, device, dtype, config, kernels, p)
    return rows


def _plain_attention_rows(
    operation: str,
    device: torch.device,
    dtype: torch.dtype,
    config: Config,
    kernels: Kernels,
    dropout: float,
) -> list[KernelRow]:
    """Attention of whole sequences on one rank."""
    backend = config.attention_backend
    if kernels.attention == "engine":
        return [
            KernelRow(
                operation,
                NAMES["engine"],
                True,
                "asked for" + f", its {backend} one" * (backend != "auto"),
            )
        ]
    length = {} if config.model.seq_length is None else {"seq_length": config.model.seq_length}
    compiled = config.training.torch_compile
    length["head_dim"] = 1 if compiled else config.model.head_dim or 1
    chosen, why, why_not = select_attention(
        device, dtype, dropout, _documents(config), kernels.attention, **length
    )
    if chosen == "flash" and backend == "auto":
        why = "documents of any length, and nothing outside them"
        why_not = "computes what document masks hide"
    off = {"sdpa": why_not, "chunked": why_not, "plain": "holds an s x s tensor"}
    no_tiles = bf16_attention.obstacle(
        device, dtype, length["head_dim"], length.get("seq_length", 1)
    )
    off["tiles"] = COMPILED if compiled else no_tiles or "not asked for"
    no_vectors = fp32_attention.obstacle(
        device, dtype, length["head_dim"], length.get("seq_length", 1)
    )
    off["vectors"] = COMPILED if compiled else no_vectors or why_not
    off["flash"] = _flash_obstacle(device, dtype, config) or "no better here"
    if kernels.engine is not None:
        off["engine"] = _engine_attention_obstacle(dtype, config)
    return [
        KernelRow(operation, NAMES[chosen], True, why),
        *(
            KernelRow(operation, NAMES[name], False, reason)
            for name, reason in off.items()
            if name != chosen
        ),
    ]


def _elementwise_rows(
    device: torch.device, dtype: torch.dtype, config: Config, kernels: Kernels
) -> list[KernelRow]:
    model = config.model
    rows = _norm_rows(device, dtype, config, kernels)
    fused = {
        "swiglu": (kernels.fused_swiglu, "--no-bias-swiglu-fusion"),
        "rotary": (kernels.fused_rotary, "--no-rope-fusion"),
    }
    for operation in (model.activation, *["rotary"] * (model.positions == "rope")):
        wanted, flag = fused.get(operation, (True, ""))
        why_not = (
            "pairs (2 i, 2 i + 1)" if operation == "rotary" and model.rotary_interleaved else None
        )
        why_not = COMPILED if config.training.torch_compile else why_not
        if operation in ("geglu", "swiglu", "gelu (tanh)", "rotary"):
            rows += _row_rivals(operation, device, dtype, None if wanted else flag, why_not)
        else:
            rows.append(KernelRow(operation, "torch", True, "there is no other one here"))
    why_not = (
        "--fp16-lm-cross-entropy"
        if config.precision.fp16_lm_cross_entropy
        else native.obstacle(device, dtype)
    )
    rows += _pair(
        "cross entropy",
        (NATIVE, "runs of rows"),
        why_not is None,
        (
            "never holds a second copy of the logits",
            "more passes over the cache" if why_not is None else why_not,
        ),
    )
    rows.append(KernelRow("cross entropy", "torch", False, "holds two more copies of the logits"))
    if model.hidden_dropout or model.attention_dropout:
        rows.append(
            KernelRow(
                "dropout", "mask from a seed", True, "recompute and resume repeat it without state"
            )
        )
        rows.append(
            KernelRow(
                "dropout", "torch", False, "takes no generator: its mask depends on what ran before"
            )
        )
    return rows


def _row_rivals(
    operation: str,
    device: torch.device,
    dtype: torch.dtype,
    flag: str | None = None,
    why_not: str | None = None,
) -> list[KernelRow]:
    """This suite's C++, formulas in runs of rows, and torch. `flag`: switches the first two off;
    `why_not`: why the C++ cannot."""
    if flag is not None:
        rest = [
            KernelRow(operation, name, False, "switched off") for name in (NATIVE, "runs of rows")
        ]
        return [KernelRow(operation, "torch", True, flag), *rest]
    on_cpu = pays_off(torch.empty(0, device=device))
    why_not = why_not or (
        native.obstacle(device, dtype) if on_cpu else f"for a CPU, and this is a {device.type}"
    )
    if why_not is None:
        return [
            KernelRow(operation, NATIVE, True, "one trip to memory"),
            KernelRow(operation, "runs of rows", False, "each operation is a pass over the cache"),
            KernelRow(operation, "torch", False, "more trips to memory"),
        ]
    rows = [KernelRow(operation, NATIVE, False, why_not)]
    return (
        _pair(
            operation,
            ("runs of rows", "torch"),
            on_cpu,
            ("passes over runs of rows stay in the cache", "a trip to memory for every operation")
            if on_cpu
            else ("torch's own kernels are fused on this device", "every operation is a launch"),
        )
        + rows
    )


def _norm_rows(
    device: torch.device, dtype: torch.dtype, config: Config, kernels: Kernels
) -> list[KernelRow]:
    norm = config.model.normalization
    if kernels.engine is not None:
        return [KernelRow(norm, "Transformer Engine", True, "asked for")]
    if kernels.apex_norms:
        return [
            KernelRow(norm, "apex", True, "fused with its gradients"),
            *_off(norm, "torch", "apex is there"),
        ]
    rows = _off(norm, "apex", _apex_obstacle(device, dtype, config))
    if norm == "LayerNorm":
        return [KernelRow(norm, "torch", True, "there is no other one here"), *rows]
    return (
        _row_rivals(
            norm, device, dtype, why_not=COMPILED if config.training.torch_compile else None
        )
        + rows
    )
