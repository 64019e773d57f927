"""--torch-compile: each transformer layer is a graph, but for what a graph cannot hold."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from megatron.kernels.cuda.availability import fused_ops
from megatron.kernels.cuda.torch_flash import unavailable_reason as torch_flash_unavailable_reason
from megatron.model.attention import SelfAttention
from megatron.model.layer import TransformerLayer


def compile_layers(layers: Iterable[TransformerLayer], **options: Any) -> None:
    """Compile each of the layers with these `options` of torch.compile, when it is first called."""
    # each batch has another number of documents
    torch.compiler.config.dynamic_sources = "L['inputs'].document_ids.cu_seqlens"
    for layer in layers:
        for module, method in _outside(layer):
            setattr(module, method, torch.compiler.disable(getattr(module, method)))
        layer.compile(**options)


def _outside(layer: TransformerLayer) -> list[tuple[nn.Module, str]]:
    """The methods that stay outside of the layer's graph. Dropout and attention with masks do where
    they are no single operation: in chunks they would be unrolled into thousands, anew for each
    seed."""
    attention = layer.self_attention
    weight = attention.linear_qkv.weight
    outside: list[tuple[nn.Module, str]] = []
    if fused_ops(weight.device, weight.dtype) is None:
        outside.append((layer, "masked"))
    if not _masks_are_one_operation(attention):
        outside.append((attention, "masked_core"))
    if attention.cp.size > 1:
        outside.append((attention, "attend"))
    return outside


def _masks_are_one_operation(attention: SelfAttention) -> bool:
    weight = attention.linear_qkv.weight
    unfit = torch_flash_unavailable_reason(weight.device, weight.dtype, attention.head_dim)
    return unfit is None and attention.requested == "auto"
