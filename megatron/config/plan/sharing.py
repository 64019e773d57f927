"""How the ranks of a stage share its parameters: their place in flat buffers, whose they are, and
what is whole at a time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from megatron.config.plan import buckets
from megatron.config.plan.buckets import Partition, Shared
from megatron.config.plan.parameter_spec import ParameterSpec
from megatron.config.plan.plan import (
    BYTES,
    Plan,
    assignment,
    bucket_size,
    embedding_stages,
    expert_shards,
    rank_axes,
    shards,
    shares_units,
)
from megatron.config.plan.units import Passes, Sharing, uses
from megatron.config.tree import Config


def whole_partition(config: Config, plan: Plan, stage: int = 0) -> Partition | None:
    """Which whole parameters the ranks own that share a stage's; None: all are cut evenly."""
    return _partition(config, _shared(config, plan, stage))


def _partition(config: Config, params: Sequence[Shared]) -> Partition | None:
    assign = assignment(config)
    return assign(params) if assign and any(param.shards > 1 for param in params) else None


def _shared(config: Config, plan: Plan, stage: int) -> list[Shared]:
    """The trained parameters of a stage, and how many ranks share each."""
    axes = _stage_axes(config)
    folds = config.parallel.folds_experts
    params = []
    for spec in plan.parameters_of(stage):
        if spec.trained:
            apart = folds and "ep" in dict(spec.splits)
            sharers = expert_shards(config, plan) if apart else shards(config, plan)
            shape = spec.local_shape(axes)
            params.append(Shared(spec.name, shape, spec.shape, sharers, apart, spec.matrices))
    return params


def _stage_axes(config: Config) -> dict[str, int]:
    return {**rank_axes(config), "ends": len(embedding_stages(config))}


def flat_layout(config: Config, plan: Plan, stage: int = 0) -> buckets.Layout:
    """The layout of the parameters of a rank of that stage in its flat buffers."""
    p = config.parallel
    axes = _stage_axes(config)

    def partial_of(spec: ParameterSpec) -> tuple[str, ...]:
        return tuple(axis for axis in spec.partial_axes(p.sequence_parallel) if axes[axis] > 1)

    params = _shared(config, plan, stage)
    itemsize = min(BYTES[config.precision.params_dtype], BYTES[config.precision.grad_dtype])
    return buckets.lay_out(
        [math.prod(param.local_shape) for param in params],
        [partial_of(spec) for spec in plan.parameters_of(stage) if spec.trained],
        bucket_size=bucket_size(config, plan, stage),
        shards=shards(config, plan),
        itemsize=itemsize,
        partition=_partition(config, params),
        experts=[param.experts for param in params],
        expert_shards=expert_shards(config, plan),
        units=[buckets.unit_of(param.name) for param in params]
        if shares_units(config, plan)
        else (),
    )


def passes(config: Config, plan: Plan, stage: int) -> list[Passes]:
    """A micro-batch through each chunk of a stage whose ranks share gradients."""
    layout = flat_layout(config, plan, stage)
    names = [spec.name for spec in plan.parameters_of(stage) if spec.trained]
    sizes: Counter[buckets.UnitName] = Counter()
    for bucket in layout.buckets:
        if bucket.shards > 1:
            sizes[buckets.unit_of(names[bucket.members[0]])] += bucket.stop - bucket.start
    p = config.parallel
    sharing = Sharing(p.shares_weights, p.overlap_param_gather, p.overlap_grad_reduce)
    precision = config.precision
    itemsizes = BYTES[precision.params_dtype], BYTES[precision.grad_dtype]
    chunks = plan.layers_per_stage[stage]
    depths = len(config.model.mtp_layers)
    by_chunk = [
        uses(chunk.calls(config.model.tied, depths), chunk.last) for chunk in plan.chunks(stage)
    ]
    carried = max((each[0].units[0] for each in by_chunk if each), key=lambda unit: sizes[unit])
    return [
        Passes(
            each,
            sizes,
            itemsizes,
            sharing,
            config.training.recomputed_runs(len(layers)),
            carried,
        )
        for each, layers in zip(by_chunk, chunks, strict=True)
    ]
