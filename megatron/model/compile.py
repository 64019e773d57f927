"""--torch-compile: each transformer layer is a graph, but for what a graph cannot hold."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from megatron.kernels.cuda.availability import fused_ops
from megatron.model.layer import TransformerLayer


def compile_layers(layers: Iterable[TransformerLayer], **options: Any) -> None:
    """Compile each of the layers with these `options` of torch.compile, when it is first called."""
    # each batch has another number of documents
    torch.compiler.config.dynamic_sources = "L['inputs'].document_ids.cu_seqlens"
    for layer in layers:
        for module, method in outside_graph(layer):
            setattr(module, method, torch.compiler.disable(getattr(module, method)))
        layer.compile(**options)


def outside_graph(layer: TransformerLayer) -> list[tuple[nn.Module, str]]:
    """The methods that stay outside of the layer's graph. Dropout does where it is no single
    operation: in chunks it would be unrolled into thousands, anew for each seed."""
    weight = next(layer.parameters())
    outside: list[tuple[nn.Module, str]] = []
    if fused_ops(weight.device, weight.dtype) is None:
        outside.append((layer, "masked"))
    return outside + [method for block in layer.blocks() for method in block.outside_graph()]
