"""megatron-export --ckpt-format torch_dist: our weights as the global tensors that megatron-core's
dist_checkpointing loads at any TP x PP."""

from __future__ import annotations

import json
import os
import re
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as dcp  # noqa: TID251
from torch.distributed.checkpoint.filesystem import _StorageInfo  # noqa: TID251
from torch.distributed.checkpoint.storage import WriteResult  # noqa: TID251

from megatron.config.model import ModelConfig
from megatron.config.plan.parameters import LAYER_PREFIX, MTP_PREFIX, ParameterSpec

from .links import ConversionError
from .torch_dist import COMMON, METADATA

_BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_DATA = "__0_0.distcp"  # the file of torch.distributed.checkpoint's first rank
# Megatron keeps norms with the matrix behind them.
_FUSED_INPUT = (r"^input_layernorm\.", "self_attention.linear_qkv.layer_norm_")
_FUSED_MLP = (r"^pre_mlp_layernorm\.", "mlp.linear_fc1.layer_norm_")
_FUSED_LATENTS = (
    r"^self_attention\.(q|kv)_layernorm\.",
    r"self_attention.linear_\1_up_proj.layer_norm_",
)
_OF_EXPERTS = "mlp.experts.experts."
_EXPERTS = (r"^mlp\.experts\.", _OF_EXPERTS)
_MATRICES = ("linear_fc1", "linear_fc2")
_IN_LAYER = re.compile(r"(decoder\.layers\.\d+\.|mtp\.layers\.\d+\.transformer_layer\.|)(.+)")
Exported = tuple[ParameterSpec, torch.dtype, tuple[int, ...], Callable[[], torch.Tensor]]


def _renamed(model: ModelConfig, impl: str) -> list[tuple[str, str]]:
    """What their names have instead of ours. The norm before experts has a name of its own in
    Transformer Engine's layers, and in local ones that of a dense MLP; local layers with latent
    attention have all norms by themselves."""
    fused = impl == "transformer_engine"
    if model.multi_latent_attention:
        dense = model.num_experts is None
        return [_EXPERTS, *[_FUSED_LATENTS] * fused, *[_FUSED_MLP] * (fused and dense)]
    alone = model.num_experts is not None and fused
    return [_FUSED_INPUT, _EXPERTS] + [_FUSED_MLP] * (not alone)


def _location(
    spec: ParameterSpec, shape: Sequence[int], layers: int, renamed: Sequence[tuple[str, str]]
) -> tuple[str, list, list, list]:
    """(key, shape, offsets, sizes) of a tensor of ours, which is all of theirs or its part of one
    layer: those of all layers of the decoder are one tensor."""
    match = _IN_LAYER.fullmatch(spec.name)
    assert match, spec.name
    prefix, tail = match.groups()
    for pattern, megatron_name in renamed if prefix else ():
        tail = re.sub(pattern, megatron_name, tail)
    if spec.layer is None:
        return prefix + tail, list(shape), [0] * len(shape), list(shape)
    offsets = [spec.layer] + [0] * len(shape)
    return LAYER_PREFIX + tail, [layers, *shape], offsets, [1, *shape]


def _extra_states(model: ModelConfig, names: Iterable[str]) -> list[str]:
    """Keys of the extra states of all modules, which are empty without FP8; `names` of tensors."""
    layers, experts = model.num_layers, model.num_experts
    of_first = re.compile(rf"{re.escape(LAYER_PREFIX)}0\.(self_attention\.linear_\w+)\.weight")
    modules = [match[1] for name in names if (match := of_first.fullmatch(name))]
    if experts is None:
        modules += [f"mlp.{matrix}" for matrix in _MATRICES]
    elif model.moe_shared_expert_intermediate_size is not None:
        modules += [f"mlp.shared_experts.{matrix}" for matrix in _MATRICES]
    keys = []
    for layer in range(layers):
        keys += [f"{LAYER_PREFIX}{m}._extra_state/shard_{layer}_{layers}" for m in modules]
        keys += [
            f"{LAYER_PREFIX}{_OF_EXPERTS}{matrix}._extra_state"
            f"/shard_{layer}.{expert}_{layers}.{experts}"
            for expert in range(experts or 0)
            for matrix in _MATRICES
        ]
    for depth in range(len(model.mtp_layers)):
        prefix = f"{MTP_PREFIX}{depth}.transformer_layer."
        keys.append(f"{MTP_PREFIX}{depth}.eh_proj._extra_state/shard_0_1")
        keys += [f"{prefix}{m}._extra_state/shard_0_1" for m in modules]
        keys += [
            f"{prefix}{_OF_EXPERTS}{matrix}._extra_state/shard_{expert}_{experts}"
            for expert in range(experts or 0)
            for matrix in _MATRICES
        ]
    return keys


def save(tensors: dict[str, Any], args: dict[str, Any], file: Path) -> None:
    """Write a file of torch.save: nested `tensors`, and the arguments as a Namespace."""
    counters = {"checkpoint_version": 3.0, "iteration": 0}
    with _disk_errors(file):
        torch.save({"args": Namespace(**args), **counters, **tensors}, file)  # noqa: TID251


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """What torch's writers raise where the disk does becomes a ConversionError."""
    try:
        yield
    except RuntimeError as error:  # torch closes the file that it could not write
        reason = " ".join(str(error.__context__ or error).split())
        raise ConversionError(f"{path}: cannot be written ({reason[:300]})") from None


def write_torch_dist(
    folder: Path, exported: Sequence[Exported], model: ModelConfig, args: dict[str, Any]
) -> None:
    """Write a checkpoint's folder: `exported` are (ours, dtype, their shape, a function that
    makes it); the arguments say whose layers will load it. One tensor is in memory at a time."""
    renamed = _renamed(model, args["transformer_impl"])
    entries: dict[str, Any] = {}
    written: list[WriteResult] = []
    save({}, args, folder / COMMON)
    with _disk_errors(folder), open(folder / _DATA, "wb") as data:

        def add(value: Any, key: str, offsets: Sequence[int] | None = None) -> None:
            start = data.tell()
            torch.save(value, data)  # noqa: TID251
            length = data.tell() - start
            stored = _StorageInfo(_DATA, start, length)
            written.append(WriteResult(dcp.metadata.MetadataIndex(key, offsets), length, stored))

        for spec, dtype, shape, make in exported:
            key, full_shape, offsets, sizes = _location(spec, shape, model.num_layers, renamed)
            add(make().reshape(sizes).contiguous(), key, offsets)
            properties = dcp.metadata.TensorProperties(dtype=dtype)
            entry = dcp.TensorStorageMetadata(properties, torch.Size(full_shape), [])
            chunk = dcp.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            entries.setdefault(key, entry).chunks.append(chunk)
        for key in _extra_states(model, [spec.name for spec, *_ in exported]):
            add([None], key)
            entries[key] = dcp.BytesStorageMetadata()
        data.flush()
        os.fsync(data.fileno())
    dcp.FileSystemWriter(folder).finish(dcp.Metadata(entries), [written])
    (folder / METADATA).write_text(json.dumps(_BACKENDS), encoding="utf-8")
