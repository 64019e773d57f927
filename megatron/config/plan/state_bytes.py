"""Bytes of a rank's weights, gradients and optimizer state."""

from __future__ import annotations

from megatron.config.plan.parameters import count_parameters
from megatron.config.plan.plan import (
    BYTES,
    Plan,
    by_muon,
    expert_shards,
    fp8_layers,
    parameters_per_rank,
    rank_axes,
    shards,
    shares_units,
)
from megatron.config.tree import Config


def moment_bytes(config: Config) -> int:
    """Bytes of the optimizer's moments of an element."""
    o = config.optimizer
    keys: tuple[str, ...] = ("exp_avg", "exp_avg_sq") if o.optimizer != "sgd" else ("momentum",)
    if o.optimizer == "sgd" and not o.sgd_momentum:
        keys = ()
    main = config.precision.main_dtype
    return sum(BYTES[o.moment_dtypes.get(key, main)] for key in keys)


def bytes_per_rank(
    config: Config, plan: Plan, stage: int = 0, shard: int | None = None
) -> dict[str, int]:
    """Bytes of weights, gradients, main weights, optimizer moments and FP8 scales on one rank of a
    pipeline stage.

    `shard`: which of the ranks that share the last two; without it that with the most. Activations
    are not counted, nor what aligns parameters and shards in flat buffers (less than 64 bytes
    each). Where ranks share gradients, "whole units" are the weights and gradients beside a rank's
    shards, at their peak. Averages of the main weights are among these unless the host has them.
    Models that features have beside it are by their names, with their activations.
    """
    precision = config.precision
    n = parameters_per_rank(config, plan, stage)
    low = precision.fp16 or precision.bf16
    table = [spec for spec in plan.parameters_of(stage) if spec.trained]
    owned = trained = count_parameters(table, rank_axes(config))
    of_muon = [number for number, spec in enumerate(table) if by_muon(config, spec)]
    fewer = 2 - config.muon.states  # than the moments of Adam
    matrices = count_parameters([table[number] for number in of_muon], rank_axes(config))
    if max(shards(config, plan), expert_shards(config, plan)) > 1:
        from megatron.config.plan.sharing import flat_layout, passes

        layout = flat_layout(config, plan, stage)
        elements = layout.elements()
        each = list(zip(elements, layout.elements(of_muon), strict=True))
        # Adam has three tensors of a main weight in 32 bits
        most = max(each, key=lambda counts: 3 * counts[0] - fewer * counts[1])
        owned, matrices = most if shard is None else each[shard % len(each)]
    history = precision.fp8_amax_history_len if precision.fp8_recipe == "delayed" else 0
    weights, gradients = n, trained
    of_units = {}
    if shares_units(config, plan):
        gradients = max(elements)
        if config.parallel.shares_weights:
            # what no optimizer updates is whole on every rank
            weights = n - sum(layout.sizes) + gradients
        peaks = [each.peak for each in passes(config, plan, stage)]
        of_units = {"whole units": max(map(sum, peaks))}
    main = BYTES[precision.main_dtype]
    averages = owned * main * sum(demands.averages for demands in config.demands)
    of_host = {}
    if any(demands.averages_on_host for demands in config.demands):
        of_host, averages = {"averages on the host": averages}, 0
    others = {name: size(plan, stage) for name, size in config.other_models.items()}
    return {
        "weights": weights * BYTES[precision.params_dtype],
        "gradients": gradients * BYTES[precision.grad_dtype],
        **of_units,
        **of_host,
        **others,
        "main weights": owned * main * low + averages,
        "optimizer moments": owned * moment_bytes(config) - fewer * matrices * main,
        # of each layer's input, weight and gradient (parallel/fp8.py): scale, maxima of the steps
        # before and of this one
        "FP8 scales": len(fp8_layers(config, plan, stage)) * 3 * (2 + history) * 4,
    }
