"""What the routers of a step add to it: losses and loads for the log, and the expert bias."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from megatron.config.moe import ROUTER_LOSSES
from megatron.model.moe import RouterStep
from megatron.training.run import Run
from megatron.training.step_sums import StepSums, Totals


def add(run: Run, sums: StepSums, step: RouterStep, layers: Sequence[int]) -> None:
    """Add the numbers of the MoE layers that have just computed a micro-batch. Raises ValueError
    where `forward_step` did not hand `step` to the model."""
    m = run.config.model
    losses = len(ROUTER_LOSSES)
    for layer in layers:
        if layer not in step.sums:
            raise ValueError(
                "this model has experts: forward_step must pass router_step=batch.router_step to "
                "it [router-step-missing]"
            )
        found = step.sums.pop(layer)
        first = losses + m.moe_layers.index(layer) * m.num_experts
        sums.routers[:losses] += found[:losses]
        sums.routers[first : first + m.num_experts] += found[losses:]


def metrics(run: Run, totals: Totals) -> dict[str, float]:
    """The losses that are trained on, without their coefficients (means over tokens and layers),
    with a capacity the share of selections of experts that is dropped, and the largest share of a
    layer's tokens that an expert has, times the number of experts."""
    m = run.config.model
    tokens = len(m.moe_layers) * max(1.0, totals.tokens)
    losses = dict(zip(ROUTER_LOSSES, totals.routers, strict=False))
    found = {name: losses[name] / tokens for name in m.router_losses}
    loads = [
        max(counts) * len(counts) / max(1.0, sum(counts)) for _, counts in _counts(run, totals)
    ]
    if m.moe_expert_capacity_factor:
        computed = sum(totals.routers[len(ROUTER_LOSSES) :])
        found["dropped_share"] = 1 - computed / (tokens * m.moe_router_topk)
    return found | {"max_expert_load": max(loads, default=1.0)}


def update_bias(run: Run, totals: Totals) -> None:
    """Raise the bias of experts with fewer tokens than the mean, lower that of the others (Wang et
    al. 2024)."""
    held = {
        layer: chunk.decoder.layers[str(layer)].mlp.router.expert_bias
        for chunk in run.model
        for layer in chunk.decoder.moe_layers
    }
    rate = run.config.model.moe_router_bias_update_rate
    for layer, counts in _counts(run, totals):
        if layer in held:
            tokens = torch.tensor(counts, dtype=torch.float64)
            step = rate * torch.sign(tokens.mean() - tokens)
            held[layer].data += step.to(held[layer])


def _counts(run: Run, totals: Totals) -> Iterator[tuple[int, list[float]]]:
    """(layer, tokens of each expert) of the MoE layers."""
    m = run.config.model
    for number, layer in enumerate(m.moe_layers):
        first = len(ROUTER_LOSSES) + number * m.num_experts
        yield layer, totals.routers[first : first + m.num_experts]
