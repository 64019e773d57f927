"""Sets of iterations, which a run skips: closed intervals, 1-based, the number printed on the log
line."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path

from megatron.config.checkpoint import CheckpointConfig

RANGE_FLAG = "--train-range-to-skip"
FILE_NAME = "skips.jsonl"  # in the directory of --save
SHOWN = 20  # problems or ranges listed one by one before the rest is only counted

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

    def joined(self, ranges: Iterable[Range]) -> SkipRanges:
        """These and others; nothing is said of overlaps."""
        return SkipRanges(merge([*self.ranges, *ranges], []))

    def cut(self, last: int) -> SkipRanges:
        """These without the iterations after `last`."""
        return SkipRanges((start, min(end, last)) for start, end in self.ranges if start <= last)

    def nothing_to_train(self, completed: int, train_iters: int) -> bool:
        """Whether iterations are left after `completed` ones and every one of them is skipped."""
        remaining = train_iters - completed
        return remaining > 0 and self.count_in(completed + 1, train_iters) == remaining

    def _count_to(self, iteration: int) -> int:
        index = bisect_right(self._firsts, iteration) - 1
        if index < 0:
            return 0
        first, last = self.ranges[index]
        return self._before[index] + min(iteration, last) - first + 1


def merge(ranges: Iterable[Range], warnings: list[str]) -> list[Range]:
    """Sorted, and joined where they overlap (with a warning), repeat or touch."""
    merged: list[Range] = []
    # the range before this one, and the one that reaches as far as the last of `merged`
    newest = reaching = (0, -1)
    for current in sorted(ranges):
        first, last = current
        end = reaching[1]
        if first > end + 1 or not merged:
            merged.append(current)
            reaching = current
        elif current != newest:
            if first <= end:
                warnings.append(
                    f"{RANGE_FLAG}: {reaching[0]} {reaching[1]} and {first} {last} overlap; "
                    "merged [skip-ranges-overlap]"
                )
            if last > end:
                merged[-1] = (merged[-1][0], last)
                reaching = current
        newest = current
    return merged


def may_skip(c: CheckpointConfig, typed: SkipRanges) -> bool:
    """Can there be anything to skip: by flags, in the checkpoint of --load, or in a file of
    --save?"""
    recorded = c.save is not None and Path(c.save, FILE_NAME).exists()
    return bool(typed or c.load or recorded)


def shorten(lines: list[str]) -> list[str]:
    """At most SHOWN lines, and how many more there are."""
    more = len(lines) - SHOWN
    return [*lines[:SHOWN], f"... and {more} more of these"] if more > 0 else lines
