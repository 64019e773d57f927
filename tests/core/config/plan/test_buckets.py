"""Where parameters lie in flat buckets, by brute force over every element."""

import math
import random

import pytest

from megatron.config.muon import MuonConfig
from megatron.config.plan.buckets import Layout, lay_out
from megatron.config.plan.muon_matrices import stacks
from megatron.config.plan.parameter_spec import Matrices
from megatron.config.plan.zero_partition import Shared, whole_matrices, whole_parameters

PARTIAL = [(), (), (), ("tp",), ("ends",), ("tp", "ends")]


def random_layout(
    seed: int,
) -> tuple[Layout, list[int], list[tuple[str, ...]], int, int, int | None]:
    """(layout, sizes, partial, shards, itemsize, bucket size)"""
    rng = random.Random(seed)
    count = rng.randint(1, 30)
    sizes = [rng.choice([1, 7, 16, 33, 64, 100, 1000]) for _ in range(count)]
    partial = [rng.choice(PARTIAL) for _ in range(count)]
    shards = rng.choice([1, 2, 3, 4, 8])
    itemsize = rng.choice([2, 4, 8])
    size = rng.choice([None, 1, 50, 300, 10**6])
    layout = lay_out(sizes, partial, bucket_size=size, shards=shards, itemsize=itemsize)
    return layout, sizes, partial, shards, itemsize, size


@pytest.mark.parametrize("seed", range(60))
def test_every_element_lies_once_and_belongs_to_one_shard(seed):
    layout, sizes, partial, shards, itemsize, bucket_size = random_layout(seed)
    align = 64 // itemsize
    owner = [None] * layout.size
    assert [n for bucket in layout.buckets for n in bucket.members] == sorted(
        range(len(sizes)), key=lambda n: (partial[n], -n)
    )
    end = 0
    for bucket in layout.buckets:
        assert bucket.start == end and (bucket.stop - bucket.start) % (align * shards) == 0
        assert {partial[n] for n in bucket.members} == {bucket.partial}
        end = bucket.stop
        used = 0
        for n in bucket.members:
            assert layout.starts[n] == bucket.start + used and layout.starts[n] % align == 0
            assert bucket_size is None or used < bucket_size, "it was full before this one"
            used += -(-sizes[n] // align) * align
        assert 0 <= bucket.stop - bucket.start - used < align * shards, "no more padding than that"
        ranges = [bucket.shard(rank) for rank in range(shards)]
        assert [ranges[0][0], *(stop for _, stop in ranges)] == [
            *(start for start, _ in ranges),
            bucket.stop,
        ]
        for rank, (start, stop) in enumerate(ranges):
            assert start % align == 0 and stop - start == (bucket.stop - bucket.start) // shards
            owner[start:stop] = [rank] * (stop - start)
    assert end == layout.size and None not in owner
    for rank in range(shards):
        for n, (start, stop) in enumerate(layout.spans(rank)):
            mine = [i for i in range(sizes[n]) if owner[layout.starts[n] + i] == rank]
            assert mine == list(range(start, stop))


@pytest.mark.parametrize("seed", range(40))
def test_no_bucket_spans_two_units(seed):
    """Cut by layer, a bucket has parameters of one unit, and where the size does not cut it either,
    all of that kind; one unit for all changes nothing."""
    rng = random.Random(seed)
    units = sorted(rng.choices(range(5), k=rng.randint(1, 30)))
    sizes = [rng.choice([1, 16, 33, 100]) for _ in units]
    partial = [rng.choice(PARTIAL) for _ in units]
    options = {"bucket_size": rng.choice([None, 50, 300]), "shards": 2, "itemsize": 4}
    layout = lay_out(sizes, partial, units=units, **options)
    kinds = [(units[bucket.members[0]], bucket.partial) for bucket in layout.buckets]
    for (unit, axes), bucket in zip(kinds, layout.buckets, strict=True):
        assert {(units[n], partial[n]) for n in bucket.members} == {(unit, axes)}
    if options["bucket_size"] is None:
        assert len(set(kinds)) == len(kinds)
    assert sorted(n for bucket in layout.buckets for n in bucket.members) == list(range(len(units)))
    same = lay_out(sizes, partial, units=[7] * len(units), **options)
    assert same == lay_out(sizes, partial, **options)


@pytest.mark.parametrize("seed", range(40))
def test_whole_parameters_belong_to_one_rank_each(seed):
    """As InternLM walks and gives them out, in flat buckets of any size: the two halves of a gated
    matrix by themselves."""
    rng = random.Random(seed)
    block = (
        "input_layernorm.weight",
        "qkv.weight",
        "proj.weight",
        "pre_mlp_layernorm.weight",
        "fc1.weight",
        "fc2.weight",
    )
    names = [
        "embedding",
        *(f"layers.{n}.{name}" for n in range(rng.randint(1, 5)) for name in block),
        "head",
    ]
    shapes = [
        (2, rng.randint(1, 50), 3) if "fc1" in name else (rng.randint(1, 200),) for name in names
    ]
    partial = [("tp",) if "layernorm" in name and seed % 2 else () for name in names]
    ranks = rng.choice([2, 3, 4, 8])
    itemsize = rng.choice([2, 4, 8])
    partition = whole_parameters(names, shapes, ranks)
    sizes = [math.prod(shape) for shape in shapes]
    size = rng.choice([None, 1, 100, 10**6])
    layout = lay_out(
        sizes, partial, bucket_size=size, shards=ranks, itemsize=itemsize, partition=partition
    )
    walked = sorted(
        names,
        key=lambda name: (names.index(name.replace("input_lay", "pre_mlp_lay")), "pre_mlp" in name),
    )
    assert [names[n] for n in partition.order] == walked
    owned = [
        [sum(size for size, owner in pieces if owner == rank) for pieces in partition.owners]
        for rank in range(ranks)
    ]
    assert [[stop - start for start, stop in layout.spans(rank)] for rank in range(ranks)] == owned
    assert layout.elements() == list(map(sum, owned)) and sum(layout.elements()) == sum(sizes)
    for pieces, shape in zip(partition.owners, shapes, strict=True):
        assert [size for size, _ in pieces] == (
            [3 * shape[1]] * 2 if len(shape) == 3 else [shape[0]]
        )
    places = sorted((start, start + size) for start, size in zip(layout.starts, sizes, strict=True))
    assert all(stop <= after for (_, stop), (after, _) in zip(places, places[1:], strict=False))
    assert all(start % (64 // itemsize) == 0 for start in layout.starts)
    assert [bucket.stop for bucket in layout.buckets[:-1]] == [
        bucket.start for bucket in layout.buckets[1:]
    ]
    assert layout.buckets[0].start == 0 and layout.size == layout.buckets[-1].stop
    for bucket in layout.buckets:
        assert (
            bucket.cuts[0] == bucket.start
            and bucket.cuts[-1] == bucket.stop
            and list(bucket.cuts) == sorted(bucket.cuts)
        )


@pytest.mark.parametrize("seed", range(40))
def test_matrices_belong_to_one_rank_each(seed):
    """As Muon's are given out, in flat buckets of any size: each expert by itself, whether experts
    are shared by as many ranks as the rest or by fewer."""
    rng = random.Random(seed)
    number = rng.choice([1, 2, 8, 9])
    block = {
        "self_attention.linear_qkv.weight": (12, 4),
        "input_layernorm.weight": (rng.randint(1, 50),),
        "mlp.experts.linear_fc1.weight": (number, 2, rng.randint(1, 9), 4),
        "mlp.experts.linear_fc2.weight": (number, 4, rng.randint(1, 9)),
    }
    shapes = {
        f"decoder.layers.{layer}.{name}": shape
        for layer in range(rng.randint(1, 6))
        for name, shape in block.items()
    }
    apart = bool(seed % 2)
    ranks = {False: rng.choice([2, 4, 8])}
    ranks[True] = ranks[False] // rng.choice([1, 2])
    experts = [apart and ".experts." in name for name in shapes]
    params = [
        Shared(
            name,
            shape,
            shape,
            ranks[one],
            one,
            Matrices(".experts." in name) if len(shape) > 1 else None,
        )
        for (name, shape), one in zip(shapes.items(), experts, strict=True)
    ]
    spans = {
        False: lambda rank: layout.spans(rank, 0),
        True: lambda rank: layout.spans(0, rank),
    }
    partition = whole_matrices(MuonConfig(), params)
    layout = lay_out(
        [math.prod(shape) for shape in shapes.values()],
        [()] * len(shapes),
        bucket_size=rng.choice([None, 1, 100, 10**6]),
        shards=ranks[False],
        itemsize=rng.choice([2, 4, 8]),
        partition=partition,
        experts=experts,
        expert_shards=ranks[True],
    )
    loads: dict[bool, list[int]] = {one: [0] * n for one, n in ranks.items()}
    costs = []
    for place, (param, pieces) in enumerate(zip(params, partition.owners, strict=True)):
        assert bool(pieces) == (len(param.shape) > 1)
        done = 0
        one = math.prod(param.shape[1:]) if ".experts." in param.name else math.prod(param.shape)
        for size, owner in pieces:
            assert size > 0 and size % one == 0
            assert spans[param.experts](owner)[place] == (done, done + size)
            [stack] = stacks(MuonConfig(), param.matrices, param.shape)
            costs.append(stack.cost // stack.number)
            loads[param.experts][owner] += size // one * costs[-1]
            done += size
        assert done == (math.prod(param.shape) if pieces else 0)
        for rank in {*range(ranks[param.experts])} - {owner for _, owner in pieces}:
            assert not pieces or spans[param.experts](rank)[place] == (0, 0)
    for load in loads.values():
        assert max(load) <= sum(load) / len(load) + max(costs)


def test_a_bucket_of_everything_and_buckets_of_one():
    sizes = [10, 20, 30]
    partial = [()] * 3
    whole = lay_out(sizes, partial, bucket_size=None, shards=1, itemsize=4)
    assert (
        [b.members for b in whole.buckets] == [(2, 1, 0)]
        and whole.starts == (64, 32, 0)
        and whole.size == 80
    )
    each = lay_out(sizes, partial, bucket_size=1, shards=1, itemsize=4)
    assert [b.members for b in each.buckets] == [(2,), (1,), (0,)] and each.starts == whole.starts


def test_what_is_summed_over_other_axes_first_comes_last():
    layout = lay_out(
        [16] * 5, [("tp",), (), ("ends",), ("tp",), ()], bucket_size=None, shards=2, itemsize=4
    )
    assert [(b.members, b.partial) for b in layout.buckets] == [
        ((4, 1), ()),
        ((2,), ("ends",)),
        ((3, 0), ("tp",)),
    ]
