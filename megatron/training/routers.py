"""What the routers of a step add to it: losses and loads for the log, and the expert bias."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from megatron.config.model import ModelConfig
from megatron.config.moe import PER_LAYER, ROUTER_SUMS
from megatron.model.blocks.module import RouterStep
from megatron.parallel.sharding import sharding_of
from megatron.training.run import Chunks
from megatron.training.step_sums import StepSums, Totals


class LayerSums(NamedTuple):
    """Of one MoE layer, over all tokens that train: the ROUTER_SUMS by name, and the number of
    tokens of each expert."""

    layer: int
    sums: dict[str, float]
    counts: list[float]

    @property
    def max_load(self) -> float:
        """The most tokens that an expert has, relative to equal shares."""
        return max(self.counts) * len(self.counts) / max(1.0, sum(self.counts))


def add(m: ModelConfig, sums: StepSums, step: RouterStep, layers: Sequence[int]) -> None:
    """Add the numbers of the MoE layers that have just computed a micro-batch. Raises ValueError
    where `forward_step` did not hand `step` to the model."""
    order = m.moe_layers
    rows = sums.routers.view(len(order), -1)
    for layer in layers:
        if layer not in step.sums:
            raise ValueError(
                "this model has experts: forward_step must pass **batch.extras to it "
                "[extras-missing]"
            )
        rows[order.index(layer)] += step.sums[layer]


def metrics(m: ModelConfig, totals: Totals) -> dict[str, float]:
    """The losses that are trained on, without their coefficients (means over tokens and layers),
    with a capacity the share of selections of experts that is dropped, and the largest load of an
    expert of a layer. With --moe-per-layer-logging, also those of each layer and the mean entropy
    of its router."""
    layers = _layers(m, totals)
    tokens = max(1.0, totals.tokens)
    together = [_losses(m, layer, tokens) for layer in layers]
    means = {
        name: sum(losses[name] for losses in together) / len(layers) for name in together[0]
    } | {"max_expert_load": max(layer.max_load for layer in layers)}
    if m.moe_per_layer_logging:
        for layer, losses in zip(layers, together, strict=True):
            entropy = layer.sums["router_entropy"] / tokens
            of_layer = {"max_expert_load": layer.max_load, "router_entropy": entropy}
            for name, value in (losses | of_layer).items():
                means[f"{PER_LAYER}{name}_layer_{layer.layer}"] = value
    return means


def _losses(m: ModelConfig, layer: LayerSums, tokens: float) -> dict[str, float]:
    losses = {name: layer.sums[name] / tokens for name in m.router_losses}
    if m.moe_expert_capacity_factor:
        losses["dropped_share"] = 1 - sum(layer.counts) / (tokens * m.moe_router_topk)
    return losses


def update_bias(m: ModelConfig, model: Chunks, totals: Totals) -> None:
    """Raise the bias of experts with fewer tokens than the mean, lower that of the others (Wang et
    al. 2024)."""
    held = {
        layer: chunk.layer(layer).get_parameter("mlp.router.expert_bias")
        for chunk in model
        for layer in chunk.moe_layers
    }
    rate = m.moe_router_bias_update_rate
    for layer, _, counts in _layers(m, totals):
        if layer in held and not sharding_of(held[layer]).frozen:
            tokens = torch.tensor(counts, dtype=torch.float64)
            step = rate * torch.sign(tokens.mean() - tokens)
            held[layer].data += step.to(held[layer])


def _layers(m: ModelConfig, totals: Totals) -> list[LayerSums]:
    names = len(ROUTER_SUMS)
    size = names + (m.num_experts or 0)
    layers = []
    for number, layer in enumerate(m.moe_layers):
        row = totals.routers[number * size : (number + 1) * size]
        layers.append(LayerSums(layer, dict(zip(ROUTER_SUMS, row, strict=False)), row[names:]))
    return layers
