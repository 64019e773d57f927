"""The rank grid: Megatron's order, every axis a partition, the same groups in the same order on
every rank."""

import itertools
from datetime import timedelta

import pytest

from megatron.config.parallel import ParallelConfig
from megatron.parallel import context
from megatron.parallel.context import Axis, ParallelContext
from tests.forkrun import run_ranks

AXES = ("tp", "cp", "dp", "pp", "dp_cp", "model", "ends", "world")


@pytest.fixture
def made(monkeypatch) -> list[tuple[int, ...]]:
    """Groups that would have been made, in order; a group is its tuple of ranks."""
    groups: list[tuple[int, ...]] = []

    def new_group(ranks, timeout):
        assert timeout == timedelta(minutes=10)
        groups.append(tuple(ranks))
        return tuple(ranks)

    monkeypatch.setattr(context.dist, "new_group", new_group)
    return groups


def grid(world: int, tp: int = 1, pp: int = 1, cp: int = 1, **more) -> list[ParallelContext]:
    config = ParallelConfig(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        **more,
    )
    return [ParallelContext(config, world, rank) for rank in range(world)]


def groups_of(contexts: list[ParallelContext], name: str) -> list[tuple[int, ...]]:
    return sorted({c.axis(name).ranks for c in contexts})


def test_every_axis_of_instances_ascends_in_either_order(made):
    for mapping in (False, True):
        ranks = grid(
            16,
            tp=2,
            pp=2,
            use_tp_pp_dp_mapping=mapping,
            use_distributed_optimizer=True,
            num_distributed_optimizer_instances=2,
        )
        for c in ranks:
            for name in (*AXES, "shard", "instances", "optimizer"):
                axis = c.axis(name)
                assert list(axis.ranks) == sorted(axis.ranks)
            assert (c.shard.size, c.instances.size, c.optimizer.size) == (2, 2, 8)


@pytest.mark.parametrize(
    "tp, cp, dp, pp", [*itertools.product((1, 2), (1, 2), (1, 3), (1, 2)), (4, 1, 2, 3)]
)
def test_every_grid(made, tp, cp, dp, pp):
    """rank = tp + TP (cp + CP (dp + DP pp)); each axis cuts the world into equal groups, the same
    on all ranks."""
    world = tp * cp * dp * pp
    each = []
    config = ParallelConfig(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, context_parallel_size=cp
    )
    for rank in range(world):
        made.clear()
        c = ParallelContext(config, world, rank)
        each.append(list(made))
        assert rank == c.tp.rank + tp * (c.cp.rank + cp * (c.dp.rank + dp * c.pp.rank))
        assert (c.tp.size, c.cp.size, c.dp.size, c.pp.size, c.world.size) == (tp, cp, dp, pp, world)
        assert (c.dp_cp.size, c.model.size) == (dp * cp, tp * pp)
        for axis in map(c.axis, AXES):
            if axis.name != "ends" or rank in axis.ranks:
                assert axis.ranks[axis.rank] == rank and len(axis.ranks) == axis.size
            assert axis.group == (axis.ranks if axis.size > 1 else None)
    assert all(groups == each[0] for groups in each)
    for name in set(AXES) - {"ends"}:
        found = groups_of(grid(world, tp, pp, cp), name)
        assert sorted(itertools.chain(*found)) == list(range(world))


def test_one_process_needs_no_process_group():
    c = ParallelContext(ParallelConfig())
    assert [c.axis(name) for name in AXES] == [
        Axis(name) for name in AXES
    ] and not c.sequence_parallel


def test_context_parallel_ranks_in_two_levels(made):
    """As megatron-core makes them: neighbours exchange heads, and every second is in one ring."""
    ranks = grid(16, tp=2, cp=4, hierarchical_context_parallel_sizes=(2, 2))
    assert groups_of(ranks, "cp")[0] == (0, 2, 4, 6)
    assert groups_of(ranks, "cp_heads")[:2] == [(0, 2), (1, 3)]
    assert groups_of(ranks, "cp_ring")[:2] == [(0, 4), (1, 5)]
    for c in ranks:
        assert c.cp.rank == c.cp_heads.rank + 2 * c.cp_ring.rank
        exchanging, ring = c.attention_axes("a2a")
        assert (exchanging, ring.size) == (c.cp, 1)
        exchanging, ring = c.attention_axes("all_gather")
        assert (exchanging.size, ring) == (1, c.cp)


def test_sequence_parallel_is_off_without_tensor_parallel(made):
    on = ParallelContext(ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True), 2, 0)
    off = ParallelContext(ParallelConfig(sequence_parallel=True), 2, 0)
    assert on.sequence_parallel and not off.sequence_parallel


def sums(rank: int, world: int) -> dict[str, float]:
    import torch

    from megatron.parallel.collectives import all_reduce

    c = ParallelContext(ParallelConfig(tensor_model_parallel_size=2), world, rank)
    return {name: all_reduce(torch.tensor(10.0**rank), c.axis(name)).item() for name in AXES}


def test_real_groups_reach_their_own_ranks_only():
    """Four ranks, TP 2 and DP 2: a rank's share of a sum is the digit at its place."""
    found = run_ranks(4, sums)
    assert [f["tp"] for f in found] == [11.0, 11.0, 1100.0, 1100.0]
    assert [f["dp"] for f in found] == [101.0, 1010.0, 101.0, 1010.0]
    assert [f["dp_cp"] for f in found] == [f["dp"] for f in found]
    assert [f["model"] for f in found] == [f["tp"] for f in found]
    assert [f["pp"] for f in found] == [1.0, 10.0, 100.0, 1000.0] and {
        f["world"] for f in found
    } == {1111.0}
