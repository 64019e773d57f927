"""Layout of a rank's parameters in flat buckets, and which range of each bucket every
data-parallel rank owns, as integers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.config.plan.zero_partition import Partition


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
    the same ones?
    """

    start: int
    stop: int
    members: tuple[int, ...]
    partial: tuple[str, ...]
    cuts: tuple[int, ...]
    experts: bool = False

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

    def elements(self) -> list[int]:
        """How many elements each shard updates."""
        counts = []
        for rank in range(self.shards):
            ranks = (rank * bucket.shards // self.shards for bucket in self.buckets)
            counts.append(sum(stop - start for start, stop in self._spans(ranks)))
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

    With a `partition` the ranges are its whole parameters, which differ in size. What one rank owns
    must be one range, so parameters are stored in the partition's order then, and the first bucket
    has the last of them."""
    if partition is not None:
        return _by_owner(sizes, partial, bucket_size, ALIGN_BYTES // itemsize, shards, partition)
    align = ALIGN_BYTES // itemsize
    # What is summed over other ranks needs a bucket of its own: (of experts?, partial axes). The
    # sort is stable, so within a kind the reverse order stays.
    kinds = [(any(experts[number : number + 1]), axes) for number, axes in enumerate(partial)]
    order = sorted(reversed(range(len(sizes))), key=lambda number: kinds[number])
    starts = [0] * len(sizes)
    buckets = []
    members: list[int] = []
    begin = 0
    end = 0

    def close() -> None:
        nonlocal begin, end
        of_experts, axes = kinds[members[0]]
        parts = expert_shards if of_experts else shards
        end = begin + _round_up(end - begin, align * parts)
        size = (end - begin) // parts
        buckets.append(
            Bucket(
                begin,
                end,
                tuple(members),
                axes,
                tuple(begin + rank * size for rank in range(parts + 1)),
                of_experts,
            )
        )
        members.clear()
        begin = end

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


def _by_owner(
    sizes: Sequence[int],
    partial: Sequence[tuple[str, ...]],
    bucket_size: int | None,
    align: int,
    shards: int,
    partition: Partition,
) -> Layout:
    """`lay_out` with a partition."""
    order = sorted(reversed(partition.order), key=lambda number: partial[number])
    groups: list[list[int]] = []
    elements = 0  # of the last group
    for number in order:
        full = bucket_size is not None and elements >= bucket_size
        if not groups or full or partial[groups[-1][0]] != partial[number]:
            groups.append([])
            elements = 0
        groups[-1].append(number)
        elements += _round_up(sizes[number], align)
    starts = [0] * len(sizes)
    buckets = []
    end = 0
    for group in reversed(groups):
        begin = end
        # cuts[rank]: where the range of `rank` begins. Owners come in rising order; a rank that
        # owns nothing gets an empty range, where the next one's begins.
        cuts: list[int] = []
        for number in reversed(group):
            starts[number] = offset = end
            for size, owner in partition.pieces[number]:
                cuts += [offset if cuts else begin] * (owner + 1 - len(cuts))
                offset += size
            end += _round_up(sizes[number], align)
        buckets.append(
            Bucket(
                begin,
                end,
                tuple(group),
                partial[group[0]],
                (*cuts, *[end] * (shards + 1 - len(cuts))),
            )
        )
    return Layout(tuple(sizes), tuple(starts), tuple(reversed(buckets)))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
