"""Process groups and rank coordinates along each parallel axis. An axis of size 1 has no group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist  # noqa: TID251

from megatron.config.parallel import ParallelConfig


@dataclass(frozen=True)
class Axis:
    """An axis of the grid of ranks: this rank's coordinate, among the ranks that differ from it
    along this axis only."""

    name: str
    size: int = 1
    rank: int = 0
    ranks: tuple[int, ...] = (0,)
    group: Any = None


class Replicas(NamedTuple):
    """The ranks that hold the same weights: all of them, those of one instance of the distributed
    optimizer, and those with the same share in each instance."""

    data: Axis
    shard: Axis
    instances: Axis


class ParallelContext:
    """The grid pp x dp x cp x tp in Megatron's order: rank = tp + TP * (cp + CP * (dp + DP * pp)),
    or with --use-tp-pp-dp-mapping tp + TP * (cp + CP * (pp + PP * dp)). Ranks of an axis ascend.

    Axes: tp, cp, dp, pp; pp_gradients (the ranks of pp in a group of their own); dp_cp (ranks that
    see other tokens and hold the same weights), ends (the pipeline stages `embeds`, by default the
    first and the last: those that may hold the word embedding), model (tp x pp: the shards of one
    replica), world. World size 1 needs no process group at all.

    The distributed optimizer cuts dp_cp into instances of consecutive ranks: shard (ranks of one
    instance, which share one copy of the optimizer's state), instances (ranks with the same share
    in each), optimizer (tp x pp x shard: the ranks that together hold one whole state). Without it
    every rank is an instance of its own.

    With --hierarchical-context-parallel-sizes cp is cut into cp_heads (neighbours, which exchange
    heads) and cp_ring.

    Experts are split over ep and, by width, over etp. All ranks of a pipeline stage are folded once
    more for them: rank in the stage = etp + ETP * (ep + EP * replica). The ranks that hold the same
    experts are `experts`, Replicas as `dense` is of all other weights. Where the two are not the
    same (EP above 1, or ETP not TP) the optimizer's axis is the world.
    """

    def __init__(
        self,
        config: ParallelConfig,
        world_size: int = 1,
        rank: int = 0,
        embeds: Sequence[int] | None = None,
    ):
        tp = config.tensor_model_parallel_size
        cp = config.context_parallel_size
        pp = config.pipeline_model_parallel_size
        assert world_size % (tp * cp * pp) == 0, "config/checks/layout.py refuses this"
        self.rank = rank
        self._alone: Any = None
        self._timeout = timedelta(minutes=config.distributed_timeout_minutes)
        self.sequence_parallel = config.sequence_parallel and tp > 1
        if config.use_tp_pp_dp_mapping:
            grid = torch.arange(world_size).view(-1, pp, cp, tp).transpose(0, 1)
        else:
            grid = torch.arange(world_size).view(pp, -1, cp, tp)
        self.tp = self._axis("tp", grid, 3)
        self.cp = self._axis("cp", grid, 2)
        self.cp_heads = self.cp_ring = Axis("alone", ranks=(rank,))
        if config.hierarchical_context_parallel_sizes and cp > 1:
            heads, ring = config.hierarchical_context_parallel_sizes
            assert heads * ring == cp, "config/checks/layout.py refuses this"
            levels = grid.unflatten(2, (ring, heads))
            self.cp_heads = self._axis("cp_heads", levels, 3)
            self.cp_ring = self._axis("cp_ring", levels, 2)
        self.dp = self._axis("dp", grid, 1)
        self.pp = self._axis("pp", grid, 0)
        self.pp_gradients = self._axis("pp_gradients", grid, 0)
        self.dp_cp = self._axis("dp_cp", grid.flatten(1, 2), 1)
        self.model = self._axis("model", grid.permute(1, 2, 0, 3).flatten(2), 2)
        self.ends = self._axis("ends", grid[list(embeds or sorted({0, pp - 1}))], 0)
        self.world = self._axis("world", grid.flatten(), 0)
        self._cut_into_instances(grid.flatten(1, 2), config)
        self._split_experts(grid.flatten(1), config)
        self.shares_weights = config.shares_weights

    def _split_experts(self, grid: torch.Tensor, config: ParallelConfig) -> None:
        """etp, ep and the replicas of experts, of a grid [pp, dp x cp x tp]."""
        ep = config.expert_model_parallel_size
        etp = config.expert_tensor_parallel
        self.dense = self.experts = Replicas(self.dp_cp, self.shard, self.instances)
        self.ep = Axis("ep", ranks=(self.rank,))
        self.etp = self.tp
        if not config.folds_experts:
            return
        assert grid.shape[1] % (etp * ep) == 0, "the rules of experts refuse this"
        grid = grid.unflatten(1, (-1, ep, etp))
        if etp != self.tp.size:
            self.etp = self._axis("etp", grid, 3)
        self.ep = self._axis("ep", grid, 2)
        data = self._axis("experts", grid, 1)
        self.experts = Replicas(data, Axis("alone", ranks=(self.rank,)), data)
        optimizer_instances = config.num_distributed_optimizer_instances
        if config.shares_optimizer and data.size > optimizer_instances:
            cut = grid.unflatten(1, (optimizer_instances, -1))
            shard = self._axis("expert_shard", cut, 2)
            self.experts = Replicas(data, shard, self._axis("expert_instances", cut, 1))
        self.optimizer = replace(self.world, name="optimizer")

    def attention_axes(self, comm_type: str) -> tuple[Axis, Axis]:
        """Of `cp` the ranks that exchange heads, and those of a ring, by --cp-comm-type."""
        if comm_type == "a2a+p2p":
            return self.cp_heads, self.cp_ring
        alone = Axis("alone", ranks=(self.rank,))
        return (self.cp, alone) if comm_type == "a2a" else (alone, self.cp)

    def replicas(self, name: str) -> Replicas:
        """`dense` or `experts`."""
        return getattr(self, name)

    def _cut_into_instances(self, grid: torch.Tensor, config: ParallelConfig) -> None:
        """shard, instances and optimizer of a grid [pp, dp x cp, tp]; axes of equal ranks share
        their group."""
        ranks = grid.shape[1]
        instances = config.num_distributed_optimizer_instances
        assert ranks % instances == 0, "config/checks/layout.py refuses this"
        alone = Axis("alone", ranks=(self.rank,))
        if not config.shares_optimizer or instances == ranks:
            shard = alone
            between = self.dp_cp
            optimizer = self.model
        elif instances == 1:
            shard = self.dp_cp
            between = alone
            optimizer = self.world
        else:
            grid = grid.unflatten(1, (instances, -1))
            shard = self._axis("shard", grid, 2)
            between = self._axis("instances", grid, 1)
            optimizer = self._axis("optimizer", grid.transpose(0, 1).flatten(1), 1)
        self.shard = replace(shard, name="shard")
        self.instances = replace(between, name="instances")
        self.optimizer = replace(optimizer, name="optimizer")

    def _axis(self, name: str, grid: torch.Tensor, dim: int) -> Axis:
        """Every rank makes every group of the axis, in the same order, and keeps its own."""
        own_axis = Axis(name, ranks=(self.rank,))
        for ranks in grid.movedim(dim, -1).reshape(-1, grid.shape[dim]).tolist():
            if len(ranks) == 1:
                continue
            ranks.sort()
            # torch's own default is half an hour
            group = dist.new_group(ranks, timeout=self._timeout)
            if self.rank in ranks:
                own_axis = Axis(name, len(ranks), ranks.index(self.rank), tuple(ranks), group)
        return own_axis

    def group(self, axis: Axis) -> Any:
        """torch's process group of an axis, for code that is not of the suite: of this rank alone
        where the size is 1, made when it is first asked for."""
        if axis.group is not None:
            return axis.group
        if self._alone is None:
            if not dist.is_initialized():  # a single process
                dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
            self._alone = dist.new_group([self.rank], use_local_synchronization=True)
        return self._alone

    def axis(self, name: str) -> Axis:
        """The axis of that name."""
        return getattr(self, name)
