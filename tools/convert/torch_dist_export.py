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
_FUSED = (
    (r"^input_layernorm\.", "self_attention.linear_qkv.layer_norm_"),
    (r"^pre_mlp_layernorm\.", "mlp.linear_fc1.layer_norm_"),
)
# modules of a layer that have an extra state, which is empty without FP8
_EXTRA_STATES = (
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
Part = tuple[ParameterSpec, torch.dtype, tuple[int, ...], Callable[[], torch.Tensor]]


def _place(spec: ParameterSpec, shape: Sequence[int], layers: int) -> tuple[str, list, list, list]:
    """(key, shape, offsets, sizes) of a tensor of ours, which is all of theirs or its part of one
    layer: those of all layers are one tensor."""
    if spec.layer is None:
        return spec.name, list(shape), [0] * len(shape), list(shape)
    tail = spec.name.removeprefix(f"{LAYER_PREFIX}{spec.layer}.")
    for pattern, theirs in _FUSED:
        tail = re.sub(pattern, theirs, tail)
    offsets = [spec.layer] + [0] * len(shape)
    return LAYER_PREFIX + tail, [layers, *shape], offsets, [1, *shape]


def write_torch_dist(
    folder: Path, parts: Sequence[Part], layers: int, args: dict[str, Any], unpickler: Unpickler
) -> None:
    """Write a checkpoint's folder: `parts` are (ours, dtype, their shape, a function that
    makes it)."""
    tensors: dict[str, Any] = {}
    entries = []
    for spec, dtype, shape, make in parts:
        key, whole, offsets, sizes = _place(spec, shape, layers)
        entry = tensors.setdefault(key, {"shape": whole, "chunks": []})
        entry["chunks"].append({"name": spec.name, "offsets": offsets, "sizes": sizes})
        entries.append(Entry(spec.name, dtype, tuple(shape), make))
    objects = [
        f"{LAYER_PREFIX}{module}._extra_state/shard_{layer}_{layers}"
        for layer in range(layers)
        for module in _EXTRA_STATES
    ]
    values = {"checkpoint_version": 3.0, "iteration": 0}
    unpickler.write(folder / COMMON, [], {}, values, args)
    unpickler.write_sharded(folder, entries, {"tensors": tensors, "objects": objects})
    (folder / METADATA).write_text(json.dumps(_BACKENDS), encoding="utf-8")
