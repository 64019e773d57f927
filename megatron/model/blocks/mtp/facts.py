"""The parameters of multi-token prediction (DeepSeek-AI 2024, DeepSeek-V3), without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.config.plan.parameter_spec import ONE_MATRIX, ParameterSpec, Scheme, drawn, norm

if TYPE_CHECKING:
    from megatron.config.model import ModelConfig

PREFIX = "mtp.layers."


def parameters(model: ModelConfig, draw: Scheme) -> list[ParameterSpec]:
    """Of all modules, by Megatron's names: norms of the later token's embedding and of the hidden
    state, eh_proj [h, 2 h] of both, which is whole on each tensor-parallel rank, a layer, a
    norm."""
    h = model.hidden_size
    table: list[ParameterSpec] = []
    for depth, number in enumerate(model.mtp_layers):
        prefix = f"{PREFIX}{depth}."
        joined = drawn(draw("qkv", number))
        table += norm(model, f"{prefix}enorm", h) + norm(model, f"{prefix}hnorm", h)
        table.append(
            ParameterSpec(f"{prefix}eh_proj.weight", (h, 2 * h), **joined, matrices=ONE_MATRIX)
        )
        layer = model.layer(number)
        table += layer.parameters(model, f"{prefix}transformer_layer.", number, draw)
        table += norm(model, f"{prefix}final_layernorm", h)
    return table
