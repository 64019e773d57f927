"""Which iterations the user skips: `--train-range-to-skip`, `--iterations-to-skip` and the records
of `skips.jsonl`.

Rules: closed intervals, 1-based, the number printed on the log line; docs/spikes.md
(bad input).
"""

import hashlib
import operator
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, islice
from typing import NamedTuple

RANGE_FLAG = "--train-range-to-skip"
SINGLE_FLAG = "--iterations-to-skip"
SHOWN = 20  # problems or ranges listed one by one before the rest is only counted
LARGE_SHARE = 20  # warn when more than 1 / 20 of the training is skipped

_PAIR = re.compile(r"\s*([0-9]+)\s*(?:-|\.\.|:|,|/)\s*([0-9]+)\s*")
_SUFFIXES = {"k": 10**3, "m": 10**6}
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")

Range = tuple[int, int]


class ParsedSkips(NamedTuple):
    """What `SkipRanges.parse` gives: the ranges, and lines to print as warnings and as
    information."""

    ranges: "SkipRanges"
    warnings: list[str]
    infos: list[str]


class SkipRanges:
    """A set of iterations as sorted closed intervals that neither overlap nor touch; look-ups are a
    bisection."""

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        self.ranges: tuple[Range, ...] = tuple(ranges)
        self._firsts = [first for first, _ in self.ranges]
        self._before = list(
            accumulate((last - first + 1 for first, last in self.ranges), initial=0)
        )

    @classmethod
    def parse(
        cls,
        train_range_to_skip: Sequence[int | str] | None,
        train_iters: int | None = None,
        *,
        iterations_to_skip: Sequence[int | str] | None = None,
        completed: int = 0,
        samples_in: Callable[["SkipRanges"], int] | None = None,
        seq_length: int | None = None,
    ) -> ParsedSkips:
        """The union of --train-range-to-skip a b [c d ...] and --iterations-to-skip n ...,
        normalised.

        `train_iters` (when known) bounds it, `completed` iterations of a resumed run are behind us,
        and `samples_in(ranges)` with `seq_length` say what they cost. Raises ValueError with ALL
        problems, one a line.
        """
        typed = (
            None if one is None else tuple(one) for one in (train_range_to_skip, iterations_to_skip)
        )
        merged, *said = _read(*typed, train_iters)
        problems, warnings = map(list, said)
        if not problems and train_iters and merged.nothing_to_train(completed, train_iters):
            left = (
                f"iterations {completed + 1} to {train_iters}"
                if completed
                else f"all {train_iters} iterations"
            )
            problems.append(
                f"{RANGE_FLAG}: nothing to train, {left} are skipped; narrow the ranges "
                "[skip-leaves-nothing-to-train]"
            )
        if problems:
            raise ValueError("\n".join(shorten(problems)))
        infos = [merged.describe()] if merged.ranges else []
        if train_iters and LARGE_SHARE * merged.count_in(1, train_iters) > train_iters:
            warnings.append(merged._large_share(train_iters, samples_in, seq_length))
        return ParsedSkips(merged, shorten(warnings), infos)

    def is_skipped(self, iteration: int) -> bool:
        """Whether iteration n (1-based, the number on its log line) is skipped."""
        return self.containing(iteration) is not None

    def containing(self, iteration: int) -> Range | None:
        """The range (first, last) that holds `iteration`, or None."""
        at = bisect_right(self._firsts, iteration) - 1
        return self.ranges[at] if at >= 0 and iteration <= self.ranges[at][1] else None

    def __len__(self) -> int:
        """How many iterations these are."""
        return self._before[-1]

    def count_in(self, first: int, last: int) -> int:
        """How many iterations of [first, last] are skipped."""
        return max(0, self._count_to(last) - self._count_to(first - 1))

    def joined(self, ranges: Iterable[Range]) -> "SkipRanges":
        """These and others; nothing is said of overlaps."""
        given = [*ranges]
        if not given or tuple(given) == self.ranges:
            return self
        return SkipRanges(
            given
            if not self.ranges and _normal(given, None)
            else _merge([*self.ranges, *given], [])
        )

    def cut(self, last: int) -> "SkipRanges":
        """These without the iterations after `last`."""
        if not self.ranges or self.ranges[-1][1] <= last:
            return self
        return SkipRanges((start, min(end, last)) for start, end in self.ranges if start <= last)

    def nothing_to_train(self, completed: int, train_iters: int) -> bool:
        """Whether iterations are left after `completed` ones and every one of them is skipped."""
        left = train_iters - completed
        return left > 0 and self.count_in(completed + 1, train_iters) == left

    def hash(self) -> str:
        """64 hexadecimal digits that depend on the normalised ranges only: all ranks must have the
        same."""
        return hashlib.sha256(
            ",".join(f"{first}-{last}" for first, last in self.ranges).encode()
        ).hexdigest()

    def describe(self) -> str:
        """One line: the flag with the normalised ranges (ready to copy while they are few) and
        their total."""
        shown = " ".join(f"{first} {last}" for first, last in self.ranges[:SHOWN])
        more = f" ... ({len(self.ranges)} ranges)" if len(self.ranges) > SHOWN else ""
        return f"skipping {len(self)} iterations: {RANGE_FLAG} {shown}{more}"

    def _count_to(self, iteration: int) -> int:
        at = bisect_right(self._firsts, iteration) - 1
        if at < 0:
            return 0
        first, last = self.ranges[at]
        return self._before[at] + min(iteration, last) - first + 1

    def _large_share(
        self,
        train_iters: int,
        samples_in: Callable[["SkipRanges"], int] | None,
        seq_length: int | None,
    ) -> str:
        count = len(self)
        text = (
            f"{RANGE_FLAG} skips {count} of {train_iters} iterations "
            f"({100 * count / train_iters:.1f} %)"
        )
        if samples_in is not None:
            samples = samples_in(self)
            text += f", {samples} samples" + (
                f" = {samples * seq_length} tokens" if seq_length else ""
            )
        return text + " that will not be trained on [skip-large-share]"


# rules, notes and plan of one command line ask for the same, and there may be 1e5 ranges
@lru_cache(maxsize=1)
def _read(
    pairs: tuple[int | str, ...] | None,
    singles: tuple[int | str, ...] | None,
    train_iters: int | None,
) -> tuple[SkipRanges, tuple[str, ...], tuple[str, ...]]:
    """The ranges that the values of the two flags are, problems and warnings."""
    problems: list[str] = []
    warnings: list[str] = []
    values = _integers(RANGE_FLAG, pairs, problems)
    alone = _integers(SINGLE_FLAG, singles, problems)
    given = _pairs(values, problems) + [(n, n) for n in alone]
    if problems or not _normal(given, train_iters):
        flags = [RANGE_FLAG] * (len(given) - len(alone)) + [SINGLE_FLAG] * len(alone)
        given = _merge(_check_bounds(given, flags, train_iters, problems, warnings), warnings)
    return SkipRanges(given), tuple(problems), tuple(warnings)


def _integers(flag: str, values: Sequence[int | str] | None, problems: list[str]) -> list[int]:
    """The values as integers; each that is none becomes a problem, and then the list is unusable
    (empty)."""
    if values is None:
        return []
    if not values:
        problems.append(
            f"{flag} has no value; give "
            + ("first and last" if flag == RANGE_FLAG else "the iterations")
            + " [value-missing]"
        )
    texts = list(map(str, values))
    digits = "".join(texts)
    if all(texts) and digits.isascii() and digits.isdecimal() and len(max(texts, key=len)) < 19:
        return list(map(int, texts))  # the ordinary case, quick
    found = []
    bad = []
    for value in texts:
        if _INTEGER.fullmatch(value):
            found.append(int(value))
        else:
            bad.append(f"{flag} {value}: not an integer{_hint(value)} [value-malformed]")
    problems.extend(bad)
    return [] if bad else found


def _hint(text: str) -> str:
    """What the user may have meant by a value that is no integer."""
    pair = _PAIR.fullmatch(text)
    if pair:
        return f"; write {RANGE_FLAG} {int(pair[1])} {int(pair[2])}"
    plain = text.strip().replace("_", "").lower()
    factor = _SUFFIXES.get(plain[-1:], 1)
    try:
        number = float(plain[:-1] if factor > 1 else plain) * factor
    except ValueError:
        return ""
    return f"; write {int(number)}" if abs(number) < 1e15 and number == int(number) else ""


def _pairs(values: list[int], problems: list[str]) -> list[Range]:
    """1st with 2nd, 3rd with 4th, ..."""
    if len(values) % 2:
        problems.append(
            f"{RANGE_FLAG} has {len(values)} numbers: the last one, {values[-1]}, has no partner; "
            f"write {values[-1]} {values[-1]} to skip that iteration alone [skip-range-incomplete]"
        )
    return list(zip(values[::2], values[1::2], strict=False))


def _normal(given: list[Range], train_iters: int | None) -> bool:
    """Whether ranges stand as `SkipRanges` keeps them, within the training: quick, since there may
    be 1e5 of them."""
    if not given:
        return True
    firsts = [first for first, _ in given]
    ends = [last + 1 for _, last in given]
    return (
        firsts[0] >= 1
        and (train_iters is None or ends[-1] <= train_iters + 1)
        and all(map(operator.lt, firsts, ends))
        and all(map(operator.lt, ends, islice(firsts, 1, None)))
    )


def _check_bounds(
    given: list[Range],
    flags: list[str],
    train_iters: int | None,
    problems: list[str],
    warnings: list[str],
) -> list[Range]:
    """The ranges that can happen, cut at the end of training; the others become problems."""
    usable = []
    limit = float("inf") if train_iters is None else train_iters
    for (first, last), flag in zip(given, flags, strict=True):
        if 1 <= first <= last <= limit:
            usable.append((first, last))
            continue
        shown = f"{flag} {first}" if flag == SINGLE_FLAG else f"{flag} {first} {last}"
        if first > last:
            problems.append(
                f"{shown}: the first iteration is after the last; did you mean {last} {first}? "
                "[skip-range-reversed]"
            )
        elif first < 1:
            problems.append(
                f"{shown}: iterations start at 1"
                + (f"; write 1 {last}" if last >= 1 else "")
                + " [skip-before-first-iteration]"
            )
        elif first > limit:
            problems.append(
                f"{shown}: never reached, training ends with iteration {train_iters} "
                "(--train-iters) [skip-after-last-iteration]"
            )
        else:
            warnings.append(
                f"{shown}: cut to {first} {train_iters}, the end of training (--train-iters) "
                "[skip-range-cut]"
            )
            usable.append((first, train_iters))
    return usable


def _merge(ranges: list[Range], warnings: list[str]) -> list[Range]:
    """Sorted, and joined where they overlap (with a warning), repeat or touch."""
    merged: list[Range] = []
    start = 0
    end = -1  # of the range that grows
    # the given range before this one, and the one that `end` comes from
    newest = reaching = (0, -1)
    for given in sorted(ranges):
        first, last = given
        if first > end + 1:
            if start:
                merged.append((start, end))
            start = first
            end = last
            reaching = given
        elif given != newest:
            if first <= end:
                warnings.append(
                    f"{RANGE_FLAG}: {reaching[0]} {reaching[1]} and {first} {last} overlap; "
                    "merged [skip-ranges-overlap]"
                )
            if last > end:
                end = last
                reaching = given
        newest = given
    return [*merged, (start, end)] if start else merged


def shorten(lines: list[str]) -> list[str]:
    """At most SHOWN lines, and how many more there are."""
    return (
        lines
        if len(lines) <= SHOWN
        else [*lines[:SHOWN], f"... and {len(lines) - SHOWN} more of these"]
    )
