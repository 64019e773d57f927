"""Layout of a rank's parameters in flat buckets, and which range of each bucket every
data-parallel rank owns, as integers."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.config.plan.zero_partition import Owners, Partition


ALIGN_BYTES = 64
# Megatron's max(40e6, 1e6 x ranks): smaller buckets are all latency on many ranks
DEFAULT_ELEMENTS = 40_000_000


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
        counts = []
        for rank in range(self.shards):
            ranks = (rank * bucket.shards // self.shards for bucket in self.buckets)
            spans = self._spans(ranks)
            if members is not None:
                spans = [spans[number] for number in members]
            counts.append(sum(stop - start for start, stop in spans))
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
) -> Layout:
    """Buckets of parameters in reverse order. Backward runs from the last layer to the first, so
    the gradients of the first bucket are complete first: their sum overlaps the rest of backward.

    A bucket is full with `bucket_size` elements or more (None: never). Each parameter starts at a
    multiple of 64 bytes of elements of `itemsize` bytes, and so does each of the `shards` equal
    ranges of a bucket: a range cut out of a tensor is then updated bit for bit as in the whole
    tensor, whose vectors begin at the same elements. Parameters with `partial` axes come last,
    those of equal axes together, and share no bucket with others; after them come those that
    `experts` marks, which `expert_shards` ranks share.

    With a `partition` the parameters are walked in its order, and those that it assigns have
    buckets of their own. What one rank owns must be one range, so in a bucket they lie in the order
    of their owners."""
    align = ALIGN_BYTES // itemsize
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
    starts = [0] * len(sizes)
    buckets = []
    members: list[int] = []
    begin = 0
    end = 0

    def close() -> None:
        nonlocal begin, end
        of_experts, equal, _, axes = kinds[members[0]]
        ranks = expert_shards if of_experts else shards
        if equal:
            end = begin + _round_up(end - begin, align * ranks)
            size = (end - begin) // ranks
            cuts = [begin + rank * size for rank in range(ranks + 1)]
        else:
            cuts = by_owner()
            cuts += [end] * (ranks + 1 - len(cuts))
        buckets.append(Bucket(begin, end, tuple(members), axes, tuple(cuts), of_experts, not equal))
        members.clear()
        begin = end

    def by_owner() -> list[int]:
        """Move the members into the order of their owners; where the range of each owner begins. A
        rank that owns nothing gets an empty range, where the next one's begins."""
        cuts: list[int] = []
        start = begin
        for number in sorted(members, key=lambda n: (owners[n][0][1], owners[n][-1][1])):
            starts[number] = offset = start
            for size, owner in owners[number]:
                cuts += [offset if cuts else begin] * (owner + 1 - len(cuts))
                offset += size
            start += _round_up(sizes[number], align)
        return cuts

    for number in order:
        if members and kinds[members[0]] != kinds[number]:
            close()
        starts[number] = end
        end += _round_up(sizes[number], align)
        members.append(number)
        if bucket_size is not None and end - begin >= bucket_size:
            close()
    if members:
        close()
    return Layout(tuple(sizes), tuple(starts), tuple(buckets))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
