"""How a rank's parameters lie in flat buckets and which range of each is whose: integers only. Knows no torch, no name."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGN_BYTES = 64
DEFAULT_ELEMENTS = 40_000_000       # Megatron's max(40e6, 1e6 x ranks): smaller buckets are all latency on many ranks


@dataclass(frozen=True)
class Bucket:
    """Elements `start` to `stop` of the flat buffer: the parameters `members` (their numbers), then padding.

    `partial`: axes over which all of its gradients are summed before the ranks that saw other tokens sum theirs.
    """
    start: int
    stop: int
    members: tuple[int, ...]
    partial: tuple[str, ...]

    def shard(self, rank: int, shards: int) -> tuple[int, int]:
        """The range of the flat buffer that is rank `rank`'s of `shards`: all are of one size."""
        size = (self.stop - self.start) // shards
        return self.start + rank * size, self.start + (rank + 1) * size


@dataclass(frozen=True)
class Layout:
    """`sizes` and `starts` (in the flat buffer of `size` elements) of each parameter, by its number, and the buckets."""
    sizes: tuple[int, ...]
    starts: tuple[int, ...]
    buckets: tuple[Bucket, ...]

    @property
    def size(self) -> int:
        """Elements of the flat buffer."""
        return self.buckets[-1].stop if self.buckets else 0

    def spans(self, rank: int, shards: int) -> list[tuple[int, int]]:
        """By parameter, the range of its own elements that rank `rank` of `shards` updates; (0, 0) for nothing of it."""
        found = [(0, 0)] * len(self.sizes)
        for bucket in self.buckets:
            low, high = bucket.shard(rank, shards)
            for number in bucket.members:
                start = max(low - self.starts[number], 0)
                stop = min(high - self.starts[number], self.sizes[number])
                if start < stop:
                    found[number] = (start, stop)
        return found


def lay_out(sizes: Sequence[int], partial: Sequence[tuple[str, ...]], *, bucket_size: int | None, shards: int,
            itemsize: int) -> Layout:
    """Buckets of parameters in reverse order, about the order in which their gradients are ready.

    A bucket is full with `bucket_size` elements or more (None: never). Each parameter starts at a multiple of 64 bytes of
    elements of `itemsize` bytes, and so does each of the `shards` equal ranges of a bucket: a range cut out of a tensor
    is then updated bit for bit as in the whole tensor, whose vectors begin at the same elements. Parameters with
    `partial` axes come last, those of equal axes together, and share no bucket with others.
    """
    align = ALIGN_BYTES // itemsize
    order = sorted(reversed(range(len(sizes))), key=lambda number: partial[number])
    starts, buckets, members, begin, end = [0] * len(sizes), [], [], 0, 0

    def close() -> None:
        nonlocal begin, end
        end = begin + _round_up(end - begin, align * shards)
        buckets.append(Bucket(begin, end, tuple(members), partial[members[0]]))
        members.clear()
        begin = end

    for number in order:
        if members and partial[members[0]] != partial[number]:
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
