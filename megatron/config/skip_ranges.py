"""Iterations that a run skips, by flags (skip_flags.py) and by the records of `skips.jsonl`:
closed intervals, 1-based, the number printed on the log line."""

import hashlib
import operator
from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate, islice

RANGE_FLAG = "--train-range-to-skip"
FILE_NAME = "skips.jsonl"  # in the directory of --save

Range = tuple[int, int]


class SkipRanges:
    """A set of iterations as sorted closed intervals that neither overlap nor touch; look-ups are a
    bisection."""

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        self.ranges: tuple[Range, ...] = tuple(ranges)
        self._firsts = [first for first, _ in self.ranges]
        self._before = list(
            accumulate((last - first + 1 for first, last in self.ranges), initial=0)
        )

    def is_skipped(self, iteration: int) -> bool:
        """Whether iteration n (1-based, the number on its log line) is skipped."""
        return self.containing(iteration) is not None

    def containing(self, iteration: int) -> Range | None:
        """The range (first, last) that holds `iteration`, or None."""
        index = bisect_right(self._firsts, iteration) - 1
        return self.ranges[index] if index >= 0 and iteration <= self.ranges[index][1] else None

    def __len__(self) -> int:
        """How many iterations these are."""
        return self._before[-1]

    def count_in(self, first: int, last: int) -> int:
        """How many iterations of [first, last] are skipped."""
        return max(0, self._count_to(last) - self._count_to(first - 1))

    def joined(self, ranges: Iterable[Range]) -> "SkipRanges":
        """These and others; nothing is said of overlaps."""
        added = [*ranges]
        if not added or tuple(added) == self.ranges:
            return self
        return SkipRanges(
            added
            if not self.ranges and is_normal(added, None)
            else merge([*self.ranges, *added], [])
        )

    def cut(self, last: int) -> "SkipRanges":
        """These without the iterations after `last`."""
        if not self.ranges or self.ranges[-1][1] <= last:
            return self
        return SkipRanges((start, min(end, last)) for start, end in self.ranges if start <= last)

    def nothing_to_train(self, completed: int, train_iters: int) -> bool:
        """Whether iterations are left after `completed` ones and every one of them is skipped."""
        remaining = train_iters - completed
        return remaining > 0 and self.count_in(completed + 1, train_iters) == remaining

    def hash(self) -> str:
        """64 hexadecimal digits that depend on the normalised ranges only: all ranks must have the
        same."""
        return hashlib.sha256(
            ",".join(f"{first}-{last}" for first, last in self.ranges).encode()
        ).hexdigest()

    def _count_to(self, iteration: int) -> int:
        index = bisect_right(self._firsts, iteration) - 1
        if index < 0:
            return 0
        first, last = self.ranges[index]
        return self._before[index] + min(iteration, last) - first + 1


def is_normal(ranges: list[Range], train_iters: int | None) -> bool:
    """Whether ranges stand as `SkipRanges` keeps them, within the training: quick, since there may
    be 1e5 of them."""
    if not ranges:
        return True
    firsts = [first for first, _ in ranges]
    ends = [last + 1 for _, last in ranges]
    return (
        firsts[0] >= 1
        and (train_iters is None or ends[-1] <= train_iters + 1)
        and all(map(operator.lt, firsts, ends))
        and all(map(operator.lt, ends, islice(firsts, 1, None)))
    )


def merge(ranges: list[Range], warnings: list[str]) -> list[Range]:
    """Sorted, and joined where they overlap (with a warning), repeat or touch."""
    merged: list[Range] = []
    start = 0
    end = -1  # of the range that grows
    # the given range before this one, and the one that `end` comes from
    newest = reaching = (0, -1)
    for current in sorted(ranges):
        first, last = current
        if first > end + 1:
            if start:
                merged.append((start, end))
            start = first
            end = last
            reaching = current
        elif current != newest:
            if first <= end:
                warnings.append(
                    f"{RANGE_FLAG}: {reaching[0]} {reaching[1]} and {first} {last} overlap; "
                    "merged [skip-ranges-overlap]"
                )
            if last > end:
                end = last
                reaching = current
        newest = current
    return [*merged, (start, end)] if start else merged
