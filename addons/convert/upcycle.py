"""upcycle: makes a mixture of experts of a dense checkpoint (Komatsuzaki et al. 2022). Every expert
begins as a copy of its layer's MLP or of a part of its width (He et al. 2024), the router with
initial values."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.safetensors_file import Entry
from megatron.config.model import ModelConfig
from megatron.config.moe import parse_layer_pattern
from megatron.config.parallel import ParallelConfig
from megatron.config.plan.parameters import WORD_EMBEDDING, ParameterSpec, parameter_table
from megatron.parallel.context import ParallelContext
from megatron.parallel.sharding import draw_values, parameter

from .hf_files import new_folder
from .links import ConversionError
from .native import NativeCheckpoint, write_checkpoint

_EXPERTS = ".mlp.experts."


def _copies(native: NativeCheckpoint, name: str, count: int, parts: int) -> torch.Tensor:
    """The matrices of all experts of a layer: of so many parts of the MLP's width expert e has part
    e modulo `parts`. The parts of a copy have one probability, a share of its own, for which their
    outputs make up."""
    dense = native.reader.read(name)
    inward = "linear_fc2" in name
    of_widths = torch.stack(dense.chunk(parts, -1 if inward else -2))
    if inward:
        of_widths = of_widths * parts
    return of_widths.repeat(count // parts, *[1] * dense.dim())


def _drawn(spec: ParameterSpec, seed: int, dtype: torch.dtype, repeat: int) -> torch.Tensor:
    """The initial values of a parameter; rows come `repeat` at a time."""
    ctx = ParallelContext(ParallelConfig())
    sharding = parameter(spec, ctx, torch.float32, "meta").sharding
    values = draw_values(sharding, seed).to(dtype)
    return values[::repeat].repeat_interleave(repeat, 0)


def _with_experts(model: ModelConfig, source: Path, parts: int, **flags: Any) -> ModelConfig:
    """The architecture with experts. Raises ConversionError where it cannot be."""
    experts, topk = flags["num_experts"], flags["moe_router_topk"]
    problems = []
    if model.num_experts is not None:
        problems.append(f"{source}: has experts already; give a dense checkpoint")
    if model.mlp_bias:
        problems.append(f"{source}: its MLPs have biases, which upcycling does not copy")
    if experts < 2:
        problems.append(f"--num-experts {experts}: must be at least 2 [value-out-of-range]")
    if not 2 <= topk <= experts:
        problems.append(
            f"--moe-router-topk {topk}: must be from 2 to --num-experts {experts}; the softmax "
            "over one selected expert is always 1, and the router would not learn "
            "[value-out-of-range]"
        )
    if parts < 1 or experts % parts or topk % parts or model.ffn % parts:
        problems.append(
            f"--moe-upcycling-granularity {parts}: must divide --num-experts {experts}, "
            f"--moe-router-topk {topk} and the width of the MLPs, {model.ffn}"
        )
    frequency = flags["moe_layer_freq"]
    try:
        layers = model.num_layers
        if not (frequency.isdigit() and int(frequency)):
            layers = len(parse_layer_pattern(frequency))
        if layers != model.num_layers:
            problems.append(
                f"--moe-layer-freq {frequency}: names {layers} layers, the model has "
                f"{model.num_layers} "
                "[moe-layer-pattern-wrong]"
            )
    except ValueError as error:
        problems.append(
            f"--moe-layer-freq {frequency}: {error}; write for example [0]*1+[1]*26 "
            "[moe-layer-pattern-wrong]"
        )
    if problems:
        raise ConversionError("\n".join(problems))
    width = model.ffn // parts if parts > 1 else None
    changed = replace(model, **flags, moe_ffn_hidden_size=width)
    if not changed.moe_layers:
        raise ConversionError(
            f"--moe-layer-freq {frequency}: no layer has experts [moe-layer-pattern-wrong]"
        )
    return changed


def upcycle(
    source: Path, target: Path, *, step: int | None = None, parts: int = 1, **flags: Any
) -> str:
    """Make a run directory of a dense checkpoint with experts, each a `parts`-th of an MLP: `flags`
    are num_experts, moe_router_topk and moe_layer_freq. Returns what to say of it."""
    new_folder(target)
    with NativeCheckpoint(source, step) as native:
        model = _with_experts(native.model, source, parts, **flags)
        rows = native.reader.shape(WORD_EMBEDDING)[0]
        dtype = native.reader.dtype(WORD_EMBEDDING)
        weights = []
        dense_names = set(native.weights())
        for spec in parameter_table(model, rows, rows):
            name = spec.name.replace(_EXPERTS, ".mlp.")
            if name in dense_names:
                copies = partial(_copies, native, name, flags["num_experts"], parts)
                make = copies if _EXPERTS in spec.name else partial(native.reader.read, name)
                weights.append(Entry(spec.name, native.reader.dtype(name), spec.shape, make))
            else:
                repeat = parts if ".router." in spec.name else 1
                drawn = partial(_drawn, spec, native.config.training.seed, dtype, repeat)
                weights.append(Entry(spec.name, dtype, spec.shape, drawn))
        tokenizer, files = native.kept_tokenizer()
        family = native.base.get("model_type", "")
        written = write_checkpoint(target, model, weights, rows, family, files, flags=tokenizer)
        count = sum(torch.Size(weight.shape).numel() for weight in weights)
    return (
        f"{written}: {model.num_experts} experts in {len(model.moe_layers)} of {model.num_layers} "
        f"layers, top {model.moe_router_topk}, {count:,} parameters; iteration 0, without "
        "optimizer state"
    )
