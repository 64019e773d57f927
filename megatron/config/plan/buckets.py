"""Layout of a rank's parameters in flat buckets, and which range of each bucket every
data-parallel rank owns, as integers."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from megatron.config.plan.parameter_spec import Matrices

ALIGN_BYTES = 64
# Megatron's max(40e6, 1e6 x ranks): smaller buckets are all latency on many ranks
DEFAULT_ELEMENTS = 40_000_000

Owners = tuple[tuple[int, int], ...]

UnitName = tuple[str, int]  # what has layers, and which of them

DECODER = "decoder"
EMBEDDING, HEAD = ("embedding", 0), ("head", 0)  # units beside those of layers


def unit_of(name: str) -> UnitName:
    """The unit of a parameter, whose weights are gathered and whose gradients are reduced together:
    the embedding (a tied output layer has its weight), a layer, or final norm and output layer."""
    container, layers, inside = name.partition(".layers.")
    if layers:
        return container, int(inside.partition(".")[0])
    return EMBEDDING if name.startswith("embedding.") else HEAD


@dataclass(frozen=True)
class Partition:
    """`order`: the parameters' numbers as they are walked; `owners`: of each, by its number,
    (elements, owner), or () where ranks share it in equal ranges. `apart`: those that share no
    bucket with others, since a rank's pieces of a bucket must be one range. `costs`: what Muon
    multiplies in a Newton-Schulz step, by rank, for weights that the same ranks share."""

    order: tuple[int, ...]
    owners: tuple[Owners, ...]
    apart: frozenset[int] = frozenset()
    costs: tuple[tuple[int, ...], ...] = ()

    @property
    def longest_share(self) -> float:
        """The most that a rank has to compute, over the mean of all; where other ranks share the
        experts, the most that it may have."""
        most = sum(max(each) for each in self.costs)
        return most / sum(sum(each) / len(each) for each in self.costs)


class Shared(NamedTuple):
    """A parameter that `shards` ranks share, its shapes on one rank and in the model. `experts`: do
    other ranks share it than what is not of experts? `matrices`: what Muon updates of it."""

    name: str
    local_shape: Sequence[int]
    shape: Sequence[int]
    shards: int
    experts: bool
    matrices: Matrices | None = None


Assign = Callable[[Sequence[Shared]], Partition]


@dataclass(frozen=True)
class Bucket:
    """Elements `start` to `stop` of the flat buffer: the parameters `members` (their numbers), then
    padding.

    `partial`: axes over which all of its gradients are summed before the ranks that saw other
    tokens sum theirs. `cuts`: where in the flat buffer the range of each shard begins, and where
    the last ends. `experts`: are they split over expert-parallel ranks, so that fewer ranks hold
    the same ones? `whole_params`: is the range of each shard whole parameters, halves of gated
    ones, or whole experts?
    """

    start: int
    stop: int
    members: tuple[int, ...]
    partial: tuple[str, ...]
    cuts: tuple[int, ...]
    experts: bool = False
    whole_params: bool = False

    @property
    def shards(self) -> int:
        """Number of ranks that share it."""
        return len(self.cuts) - 1

    def shard(self, rank: int) -> tuple[int, int]:
        """The range of the flat buffer that is rank `rank`'s."""
        return self.cuts[rank], self.cuts[rank + 1]


@dataclass(frozen=True)
class Layout:
    """`sizes` and `starts` (in the flat buffer of `size` elements) of each parameter, by its
    number, and the buckets."""

    sizes: tuple[int, ...]
    starts: tuple[int, ...]
    buckets: tuple[Bucket, ...]

    @property
    def size(self) -> int:
        """Elements of the flat buffer."""
        return max((bucket.stop for bucket in self.buckets), default=0)

    @property
    def shards(self) -> int:
        """Ranks whose shares of the optimizer's state differ. Each range of a bucket belongs to as
        many consecutive ones."""
        return math.lcm(*(bucket.shards for bucket in self.buckets))

    def spans(self, rank: int, expert_rank: int = 0) -> list[tuple[int, int]]:
        """By parameter, the range of its own elements that shard `rank`, of experts `expert_rank`,
        updates; (0, 0) for nothing of it."""
        return self._spans(expert_rank if bucket.experts else rank for bucket in self.buckets)

    def _spans(self, ranks: Iterable[int]) -> list[tuple[int, int]]:
        """`spans` with the rank in each bucket."""
        spans = [(0, 0)] * len(self.sizes)
        for bucket, rank in zip(self.buckets, ranks, strict=True):
            low, high = bucket.shard(rank)
            for number in bucket.members:
                start = max(low - self.starts[number], 0)
                stop = min(high - self.starts[number], self.sizes[number])
                if start < stop:
                    spans[number] = (start, stop)
        return spans

    def elements(self, members: Collection[int] | None = None) -> list[int]:
        """How many elements each shard updates: of all parameters, or of these numbers."""
        shards = self.shards
        counts = [0] * shards
        wanted = None if members is None else set(members)
        for bucket in self.buckets:
            cuts = bucket.cuts
            each = shards // bucket.shards
            for number in bucket.members if wanted is None else wanted.intersection(bucket.members):
                start = self.starts[number]
                stop = start + self.sizes[number]
                shard = bisect_right(cuts, start) - 1
                while start < stop and shard < bucket.shards:
                    end = min(stop, cuts[shard + 1])
                    for rank in range(shard * each, (shard + 1) * each):
                        counts[rank] += end - start
                    start = end
                    shard += 1
        return counts


def lay_out(
    sizes: Sequence[int],
    partial: Sequence[tuple[str, ...]],
    *,
    bucket_size: int | None,
    shards: int,
    itemsize: int,
    partition: Partition | None = None,
    experts: Sequence[bool] = (),
    expert_shards: int = 1,
    units: Sequence[UnitName] = (),
) -> Layout:
    """Buckets of parameters in reverse order. Backward runs from the last layer to the first, so
    the gradients of the first bucket are complete first: their sum overlaps the rest of backward.

    A bucket is full with `bucket_size` elements or more (None: never). Each parameter starts at a
    multiple of 64 bytes of elements of `itemsize` bytes, and so does each of the `shards` equal
    ranges of a bucket: a range cut out of a tensor is then updated bit for bit as in the whole
    tensor, whose vectors begin at the same elements. Parameters with `partial` axes come last,
    those of equal axes together, and share no bucket with others; after them come those that
    `experts` marks, which `expert_shards` ranks share. `units` has that of each
    parameter: parameters of two units share no bucket.

    With a `partition` the parameters are walked in its order, and those that it assigns have
    buckets of their own. What one rank owns must be one range, so in a bucket they lie in the order
    of their owners."""
    align = ALIGN_BYTES // itemsize
    padded = [_round_up(size, align) for size in sizes]
    walk = partition.order if partition else range(len(sizes))
    owners: Sequence[Owners] = partition.owners if partition else [()] * len(sizes)
    # What is summed over other ranks, or is whole on its owner, needs a bucket of its own: (of
    # experts?, shared in equal ranges?, apart?, partial axes). The sort is stable, so within a kind
    # the reverse order stays.
    apart = partition.apart if partition else frozenset()
    kinds = [
        (any(experts[number : number + 1]), not owners[number], number in apart, axes)
        for number, axes in enumerate(partial)
    ]
    order = sorted(reversed(walk), key=lambda number: kinds[number])
    # One layer after another: parameters of different kinds or units start a bucket of their own,
    # so a bucket can be sent when its layer is done.
    company = [(kind, *units[number : number + 1]) for number, kind in enumerate(kinds)]
    starts = [0] * len(sizes)
    buckets = []
    begin = 0
    for members in _cut(order, company, padded, bucket_size):
        of_experts, equal, _, axes = kinds[members[0]]
        ranks = expert_shards if of_experts else shards
        placed = members
        if not equal:
            # One after the other by the ranks that own their first and their last piece.
            placed = sorted(members, key=lambda n: (owners[n][0][1], owners[n][-1][1]))
        end = begin
        for number in placed:
            starts[number] = end
            end += padded[number]
        if equal:
            # As many aligned elements for each rank: the last ones are padding.
            # Equal shares let one reduce-scatter move the whole bucket.
            share = _round_up(end - begin, align * ranks) // ranks
            cuts = [begin + rank * share for rank in range(ranks + 1)]
        else:
            cuts = _cuts_by_owner([(starts[n], owners[n]) for n in placed], end, ranks)
        bucket = Bucket(begin, cuts[-1], tuple(members), axes, tuple(cuts), of_experts, not equal)
        buckets.append(bucket)
        begin = bucket.stop
    return Layout(tuple(sizes), tuple(starts), tuple(buckets))


def _cut(
    order: Iterable[int], company: Sequence[object], padded: Sequence[int], bucket_size: int | None
) -> Iterator[list[int]]:
    """The parameters of each bucket: neighbours in the order with the same company, until it is
    full."""
    for _, numbers in groupby(order, key=company.__getitem__):
        members: list[int] = []
        size = 0
        for number in numbers:
            members.append(number)
            size += padded[number]
            if bucket_size is not None and size >= bucket_size:
                yield members
                members = []
                size = 0
        if members:
            yield members


def _cuts_by_owner(placed: Sequence[tuple[int, Owners]], end: int, ranks: int) -> list[int]:
    """Where the range of each rank begins, and the `end` of the last: at the first piece that it or
    a later rank owns, so a rank that owns nothing has an empty range."""
    starts = []
    by_rank = []
    for start, pieces in placed:
        # Owners rise along the bucket, so a bisection finds where those of a rank begin.
        for size, owner in pieces:
            starts.append(start)
            by_rank.append(owner)
            start += size
    starts.append(end)
    return [starts[bisect_left(by_rank, rank)] for rank in range(ranks + 1)]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
