"""Where parameters lie in flat buckets, by brute force over every element."""
from __future__ import annotations

import random

import pytest

from megatron.config.buckets import Layout, lay_out

PARTIAL = [(), (), (), ("tp",), ("ends",), ("tp", "ends")]


def random_layout(seed: int) -> tuple[Layout, list[int], list[tuple[str, ...]], int, int, int | None]:
    """(layout, sizes, partial, shards, itemsize, bucket size)"""
    rng = random.Random(seed)
    count = rng.randint(1, 30)
    sizes = [rng.choice([1, 7, 16, 33, 64, 100, 1000]) for _ in range(count)]
    partial = [rng.choice(PARTIAL) for _ in range(count)]
    shards, itemsize = rng.choice([1, 2, 3, 4, 8]), rng.choice([2, 4, 8])
    size = rng.choice([None, 1, 50, 300, 10**6])
    layout = lay_out(sizes, partial, bucket_size=size, shards=shards, itemsize=itemsize)
    return layout, sizes, partial, shards, itemsize, size


@pytest.mark.parametrize("seed", range(60))
def test_every_element_lies_once_and_belongs_to_one_shard(seed):
    layout, sizes, partial, shards, itemsize, bucket_size = random_layout(seed)
    align, owner = 64 // itemsize, [None] * layout.size
    assert [n for bucket in layout.buckets for n in bucket.members] == sorted(
        range(len(sizes)), key=lambda n: (partial[n], -n))
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
        ranges = [bucket.shard(rank, shards) for rank in range(shards)]
        assert [ranges[0][0], *(stop for _, stop in ranges)] == [*(start for start, _ in ranges), bucket.stop]
        for rank, (start, stop) in enumerate(ranges):
            assert start % align == 0 and stop - start == (bucket.stop - bucket.start) // shards
            owner[start:stop] = [rank] * (stop - start)
    assert end == layout.size and None not in owner
    for rank in range(shards):
        for n, (start, stop) in enumerate(layout.spans(rank, shards)):
            mine = [i for i in range(sizes[n]) if owner[layout.starts[n] + i] == rank]
            assert mine == list(range(start, stop))


def test_a_bucket_of_everything_and_buckets_of_one():
    sizes, partial = [10, 20, 30], [()] * 3
    whole = lay_out(sizes, partial, bucket_size=None, shards=1, itemsize=4)
    assert [b.members for b in whole.buckets] == [(2, 1, 0)] and whole.starts == (64, 32, 0) and whole.size == 80
    each = lay_out(sizes, partial, bucket_size=1, shards=1, itemsize=4)
    assert [b.members for b in each.buckets] == [(2,), (1,), (0,)] and each.starts == whole.starts


def test_what_is_summed_over_other_axes_first_comes_last():
    layout = lay_out([16] * 5, [("tp",), (), ("ends",), ("tp",), ()], bucket_size=None, shards=2, itemsize=4)
    assert [(b.members, b.partial) for b in layout.buckets] == [((4, 1), ()), ((2,), ("ends",)), ((3, 0), ("tp",))]
