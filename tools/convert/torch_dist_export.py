"""megatron-export --ckpt-format torch_dist: our weights as the global tensors that megatron-core's
dist_checkpointing loads at any TP x PP."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.safetensors_file import Entry
from megatron.config.model import ModelConfig
from megatron.config.plan.parameters import LAYER_PREFIX, ParameterSpec
from tools.convert.torch_dist import COMMON, METADATA
from tools.convert.torch_files import Unpickler

_BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
# Megatron keeps norms with the matrix behind them.
_FUSED_INPUT = (r"^input_layernorm\.", "self_attention.linear_qkv.layer_norm_")
_FUSED_MLP = (r"^pre_mlp_layernorm\.", "mlp.linear_fc1.layer_norm_")
_EXPERTS = (r"^mlp\.experts\.", "mlp.experts.experts.")
_MATRICES = ("linear_fc1", "linear_fc2")
Exported = tuple[ParameterSpec, torch.dtype, tuple[int, ...], Callable[[], torch.Tensor]]


def _renamed(model: ModelConfig, impl: str) -> list[tuple[str, str]]:
    """What their names have instead of ours. The norm before experts has a name of its own in
    Transformer Engine's layers, and in local ones that of a dense MLP."""
    alone = model.num_experts is not None and impl == "transformer_engine"
    return [_FUSED_INPUT, _EXPERTS] + [_FUSED_MLP] * (not alone)


def _location(
    spec: ParameterSpec, shape: Sequence[int], layers: int, renamed: Sequence[tuple[str, str]]
) -> tuple[str, list, list, list]:
    """(key, shape, offsets, sizes) of a tensor of ours, which is all of theirs or its part of one
    layer: those of all layers are one tensor."""
    if spec.layer is None:
        return spec.name, list(shape), [0] * len(shape), list(shape)
    tail = spec.name.removeprefix(f"{LAYER_PREFIX}{spec.layer}.")
    for pattern, megatron_name in renamed:
        tail = re.sub(pattern, megatron_name, tail)
    offsets = [spec.layer] + [0] * len(shape)
    return LAYER_PREFIX + tail, [layers, *shape], offsets, [1, *shape]


def _extra_states(model: ModelConfig) -> list[str]:
    """Keys of the extra states of all modules, which are empty without FP8."""
    layers, experts = model.num_layers, model.num_experts
    modules = ["self_attention.linear_qkv", "self_attention.linear_proj"]
    if experts is None:
        modules += [f"mlp.{matrix}" for matrix in _MATRICES]
    elif model.moe_shared_expert_intermediate_size is not None:
        modules += [f"mlp.shared_experts.{matrix}" for matrix in _MATRICES]
    keys = []
    for layer in range(layers):
        keys += [f"{module}._extra_state/shard_{layer}_{layers}" for module in modules]
        keys += [
            f"mlp.experts.experts.{matrix}._extra_state/shard_{layer}.{expert}_{layers}.{experts}"
            for expert in range(experts or 0)
            for matrix in _MATRICES
        ]
    return [LAYER_PREFIX + key for key in keys]


def write_torch_dist(
    folder: Path,
    exported: Sequence[Exported],
    model: ModelConfig,
    args: dict[str, Any],
    unpickler: Unpickler,
) -> None:
    """Write a checkpoint's folder: `exported` are (ours, dtype, their shape, a function that
    makes it); the arguments say whose layers will load it."""
    renamed = _renamed(model, args["transformer_impl"])
    tensors: dict[str, Any] = {}
    entries = []
    for spec, dtype, shape, make in exported:
        key, full_shape, offsets, sizes = _location(spec, shape, model.num_layers, renamed)
        entry = tensors.setdefault(key, {"shape": full_shape, "chunks": []})
        entry["chunks"].append({"name": spec.name, "offsets": offsets, "sizes": sizes})
        entries.append(Entry(spec.name, dtype, tuple(shape), make))
    values = {"checkpoint_version": 3.0, "iteration": 0}
    unpickler.write(folder / COMMON, [], {}, values, args)
    unpickler.write_sharded(folder, entries, {"tensors": tensors, "objects": _extra_states(model)})
    (folder / METADATA).write_text(json.dumps(_BACKENDS), encoding="utf-8")
