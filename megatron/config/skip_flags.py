"""The ranges of `--train-range-to-skip` and `--iterations-to-skip`, and what is wrong with them:
docs/skipping.md (bad input)."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from megatron.config.skip_ranges import RANGE_FLAG, Range, SkipRanges, is_normal, merge

SINGLE_FLAG = "--iterations-to-skip"
SHOWN = 20  # problems or ranges listed one by one before the rest is only counted
LARGE_SHARE = 20  # warn when more than 1 / 20 of the training is skipped

_PAIR = re.compile(r"\s*([0-9]+)\s*(?:-|\.\.|:|,|/)\s*([0-9]+)\s*")
_SUFFIXES = {"k": 10**3, "m": 10**6}
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")


class ParsedSkips(NamedTuple):
    """What `parse_skips` gives: the ranges, and lines to print as warnings and as
    information."""

    ranges: SkipRanges
    warnings: list[str]
    infos: list[str]


def parse_skips(
    train_range_to_skip: Sequence[int | str] | None,
    train_iters: int | None = None,
    *,
    iterations_to_skip: Sequence[int | str] | None = None,
    samples_in: Callable[[SkipRanges], int] | None = None,
    seq_length: int | None = None,
) -> ParsedSkips:
    """The union of --train-range-to-skip a b [c d ...] and --iterations-to-skip n ...,
    normalised.

    `train_iters` (when known) bounds it, and `samples_in(ranges)` with `seq_length` say what they
    cost. Raises ValueError with ALL
    problems, one per line.
    """
    typed = (
        None if values is None else tuple(values)
        for values in (train_range_to_skip, iterations_to_skip)
    )
    merged, *messages = _read(*typed, train_iters)
    problems, warnings = map(list, messages)
    if not problems and train_iters and merged.nothing_to_train(0, train_iters):
        problems.append(
            f"{RANGE_FLAG}: nothing to train, all {train_iters} iterations are skipped; narrow the "
            "ranges [skip-leaves-nothing-to-train]"
        )
    if problems:
        raise ValueError("\n".join(shorten(problems)))
    infos = [describe(merged)] if merged.ranges else []
    if train_iters and LARGE_SHARE * merged.count_in(1, train_iters) > train_iters:
        warnings.append(_large_share(merged, train_iters, samples_in, seq_length))
    return ParsedSkips(merged, shorten(warnings), infos)


def describe(skips: SkipRanges) -> str:
    """One line: the flag with the normalised ranges (ready to copy while they are few) and
    their total."""
    shown = " ".join(f"{first} {last}" for first, last in skips.ranges[:SHOWN])
    number = f" ... ({len(skips.ranges)} ranges)" if len(skips.ranges) > SHOWN else ""
    return f"skipping {len(skips)} iteration{'s' * (len(skips) != 1)}: {RANGE_FLAG} {shown}{number}"


def _large_share(
    skips: SkipRanges,
    train_iters: int,
    samples_in: Callable[[SkipRanges], int] | None,
    seq_length: int | None,
) -> str:
    count = len(skips)
    text = (
        f"{RANGE_FLAG} skips {count} of {train_iters} iterations "
        f"({100 * count / train_iters:.1f} %)"
    )
    if samples_in is not None:
        samples = samples_in(skips)
        text += f", {samples} samples" + (f" = {samples * seq_length} tokens" if seq_length else "")
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
    ranges = _pairs(values, problems) + [(n, n) for n in alone]
    if problems or not is_normal(ranges, train_iters):
        flags = [RANGE_FLAG] * (len(ranges) - len(alone)) + [SINGLE_FLAG] * len(alone)
        ranges = merge(_check_bounds(ranges, flags, train_iters, problems, warnings), warnings)
    return SkipRanges(ranges), tuple(problems), tuple(warnings)


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
    integers = []
    bad = []
    for value in texts:
        if _INTEGER.fullmatch(value):
            integers.append(int(value))
        else:
            shown = " ".join(value.split())  # problems are lines
            bad.append(f"{flag} {shown}: not an integer{_hint(value)} [value-malformed]")
    problems.extend(bad)
    return [] if bad else integers


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
            f"{RANGE_FLAG}: takes pairs FIRST LAST, and {values[-1]} is a FIRST without a LAST; "
            f"write {values[-1]} {values[-1]} to skip that iteration alone [skip-range-incomplete]"
        )
    return list(zip(values[::2], values[1::2], strict=False))


def _check_bounds(
    ranges: list[Range],
    flags: list[str],
    train_iters: int | None,
    problems: list[str],
    warnings: list[str],
) -> list[Range]:
    """The ranges that can happen, cut at the end of training; the others become problems."""
    usable = []
    limit = float("inf") if train_iters is None else train_iters
    for (first, last), flag in zip(ranges, flags, strict=True):
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
                f"{shown}: never reached, training ends with iteration {train_iters}; give "
                "iterations of the run, or omit it [skip-after-last-iteration]"
            )
        elif train_iters is not None:  # it is less than `last`
            warnings.append(
                f"{shown}: cut to {first} {train_iters}, the end of training [skip-range-cut]"
            )
            usable.append((first, train_iters))
    return usable


def shorten(lines: list[str]) -> list[str]:
    """At most SHOWN lines, and how many more there are."""
    return (
        lines
        if len(lines) <= SHOWN
        else [*lines[:SHOWN], f"... and {len(lines) - SHOWN} more of these"]
    )
