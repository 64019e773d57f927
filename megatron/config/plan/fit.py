"""Whether a run fits into memory: what the fullest rank holds by the plan, against a limit, and the
flags with which it would fit. Needs no torch."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from itertools import combinations, islice
from typing import Any

from megatron.arguments import config_from, flags_of, values_of
from megatron.config.checks import rules
from megatron.config.plan.costs import activations
from megatron.config.plan.plan import Plan, bytes_per_rank, make_plan
from megatron.config.tree import Config

GIB = 2**30
# Of a device's memory, what CUDA, NCCL and fragmentation may take beside the plan's tensors.
SPARE = 0.08
_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
_EXPERTS = "expert_model_parallel_size"
MOST_RANKS = 1 << 14  # up to which more ranks are tried


@dataclass(frozen=True)
class RankMemory:
    """Bytes by kind of what a rank of a pipeline stage holds at the peak of a step."""

    stage: int
    kinds: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.kinds.values())

    def largest(self, count: int = 3) -> str:
        """Its largest kinds, as text."""
        kinds = sorted(self.kinds.items(), key=lambda kind: -kind[1])[:count]
        return ", ".join(f"{kind} {gib(size)}" for kind, size in kinds if size)


def fullest(config: Config, plan: Plan) -> RankMemory:
    """The rank that holds most."""
    ranks = []
    for stage in range(len(plan.layers_per_stage)):
        state = bytes_per_rank(config, plan, stage)
        kinds = {
            "weights": state["weights"],
            "gradients": state["gradients"],
            "optimizer": state["main weights"] + state["optimizer moments"] + state["FP8 scales"],
            "activations": activations(config, plan, stage).total,
        }
        ranks.append(RankMemory(stage, kinds))
    return max(ranks, key=lambda rank: rank.total)


def host_copies(config: Config, plan: Plan) -> dict[str, int]:
    """Bytes of copies of the run that a rank keeps in host memory, by the flag that asks for
    them."""
    saved = max(
        sum(bytes_per_rank(config, plan, stage).values())
        - bytes_per_rank(config, plan, stage)["gradients"]
        for stage in range(len(plan.layers_per_stage))
    )
    return {
        user: count * saved
        for demands in config.demands
        for user, count in demands.host_copies.items()
    }


def gib(size: float) -> str:
    """Bytes as text."""
    return f"{size / GIB:.2f} GiB"


def verdict(config: Config, plan: Plan, limit: int) -> tuple[bool, str]:
    """Whether a device of `limit` bytes holds the fullest rank, and a line that says so: with the
    largest kinds and flags with which it would, if not."""
    rank = fullest(config, plan)
    usage = f"the fullest rank (stage {rank.stage}) has {gib(rank.total)} of {gib(limit)}"
    if rank.total > limit:
        return False, (
            f"does not fit: {usage}; largest: {rank.largest()}. {remedy(config, plan, limit)}"
        )
    spare = gib(limit - rank.total)
    if rank.total > (1 - SPARE) * limit:
        return True, (
            f"fits barely: {usage}, which leaves {spare} for CUDA, NCCL and fragmentation; "
            f"{remedy(config, plan, int((1 - SPARE) * limit))}"
        )
    return True, f"fits: {usage}, which leaves {spare} for CUDA, NCCL and fragmentation"


def remedy(config: Config, plan: Plan, limit: int) -> str:
    """Two changes of flags with which a rank would fit into `limit` bytes, each with what it would
    hold; or how many ranks would do."""
    ways = list(islice(_ways(config, plan, plan.world_size, limit), 2))
    if ways:
        return f"would fit: {', or '.join(ways)}"
    world = 2 * plan.world_size
    while world <= MOST_RANKS:
        for way in _ways(config, plan, world, limit):
            return f"would fit on {world} ranks of as much each: {way}"
        world *= 2
    return "no layout that was tried would fit; take a smaller model or shorter sequences"


def _ways(config: Config, plan: Plan, world_size: int, limit: int) -> Iterator[str]:
    """Changes that fit, with the bytes that a rank would have, those with the fewest flags
    first."""
    kinds = fullest(config, plan).kinds
    replicated = kinds["weights"] + kinds["gradients"]  # over the ranks of data parallelism
    values = values_of(config)
    flags = flags_of(type(config))
    fitting: list[dict[str, Any]] = []
    for change in _changes(config, world_size):
        if any(
            all(name in change and change[name] >= value for name, value in smaller.items())
            for smaller in fitting
        ):
            continue  # it fits without the rest
        ranks_of_change = math.prod(
            change[name] // values[name] for name in (*_SIZES, _EXPERTS) if name in change
        )
        if replicated > limit * ranks_of_change:
            continue
        changed = config_from(type(config), values | change)
        try:
            if rules.problems(changed, world_size):
                continue
            size = fullest(changed, make_plan(changed, world_size, plan.vocab_size)).total
        except ValueError:  # no plan
            continue
        if size <= limit:
            fitting.append(change)
            words = (
                flags[name].spelling + ("" if value is True else f" {value}")
                for name, value in change.items()
            )
            yield f"{' '.join(words)} ({gib(size)})"


def _changes(config: Config, world_size: int) -> Iterator[dict[str, Any]]:
    """What is tried: what costs little speed with the layout as it is; another layout; both."""
    p = config.parallel
    t = config.training
    full = {"recompute_granularity": "full", "recompute_method": "uniform"}
    tried: list[tuple[dict[str, Any], bool]] = [
        ({"use_distributed_optimizer": True}, not p.use_distributed_optimizer and world_size > 1),
        ({"sequence_parallel": True}, not p.sequence_parallel and p.tensor_model_parallel_size > 1),
        ({"micro_batch_size": 1}, t.micro_batch_size > 1),
        ({**full, "recompute_num_layers": 1}, t.recompute != "full"),
    ]
    cheap = [change for change, differs in tried if differs]
    for count in range(len(cheap)):
        for chosen in combinations(cheap, count + 1):
            yield reduce(operator.or_, chosen)
    layouts = list(_layouts(config, world_size))
    yield from layouts
    for layout in layouts:
        if "tensor_model_parallel_size" in layout:
            layout["sequence_parallel"] = True
        yield reduce(operator.or_, cheap, layout)


def _layouts(config: Config, world_size: int) -> Iterator[dict[str, Any]]:
    """Larger expert-, tensor- and pipeline-parallel sizes, those that cut the model in the fewest
    parts first."""
    sizes = [getattr(config.parallel, name) for name in _SIZES]
    most_ranks = world_size // math.prod(sizes)
    most = min(config.model.num_experts or 1, most_ranks)
    doubled = [config.parallel.expert_model_parallel_size << power for power in range(1, 31)]
    experts = [{_EXPERTS: size} for size in doubled if size <= most]
    yield from experts
    for together in range(1, most_ranks.bit_length()):
        for power in range(min(together, 3), -1, -1):  # tensor parallel within a host
            factors = (2**power, 2 ** (together - power))
            layout = {
                name: size * factor
                for name, size, factor in zip(_SIZES, sizes, factors, strict=True)
                if factor > 1
            }
            yield layout
            yield from (layout | largest for largest in experts[-1:])
