"""Iterations that the flags --train-range-to-skip and --iterations-to-skip say are skipped. What is
wrong with them: docs/skipping.md."""

import re
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from megatron.config.skip_ranges import RANGE_FLAG, SHOWN, SkipRanges, merge, shorten

SINGLE_FLAG = "--iterations-to-skip"
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
    skips, *messages = _read(*typed, train_iters)
    problems, warnings = map(list, messages)
    if not problems and train_iters and skips.nothing_to_train(0, train_iters):
        problems.append(
            f"{RANGE_FLAG}: nothing to train, all {train_iters} iterations are skipped; narrow the "
            "ranges [skip-leaves-nothing-to-train]"
        )
    if problems:
        raise ValueError("\n".join(shorten(problems)))
    infos = [describe(skips)] if skips.ranges else []
    count = len(skips)
    if train_iters and LARGE_SHARE * count > train_iters:
        text = f"{RANGE_FLAG} skips {count} of {train_iters} iterations"
        text += f" ({100 * count / train_iters:.1f} %)"
        if samples_in is not None:
            samples = samples_in(skips)
            text += f", {samples} samples"
            text += f" = {samples * seq_length} tokens" if seq_length else ""
        warnings.append(f"{text} that will not be trained on [skip-large-share]")
    return ParsedSkips(skips, shorten(warnings), infos)


def describe(skips: SkipRanges) -> str:
    """One line: the flag with the normalised ranges (ready to copy while they are few) and
    their total."""
    shown = " ".join(f"{first} {last}" for first, last in skips.ranges[:SHOWN])
    number = f" ... ({len(skips.ranges)} ranges)" if len(skips.ranges) > SHOWN else ""
    return f"skipping {len(skips)} iteration{'s' * (len(skips) != 1)}: {RANGE_FLAG} {shown}{number}"


# rules, notes and plan of one command line ask for the same, and there may be 1e5 ranges
@lru_cache(maxsize=1)
def _read(
    pairs: tuple[int | str, ...] | None,
    singles: tuple[int | str, ...] | None,
    train_iters: int | None,
) -> tuple[SkipRanges, tuple[str, ...], tuple[str, ...]]:
    """The ranges that the values of the two flags are, cut at the end of training; problems and
    warnings."""
    problems: list[str] = []
    warnings: list[str] = []
    values = _integers(RANGE_FLAG, pairs, problems)
    single = _integers(SINGLE_FLAG, singles, problems)
    if len(values) % 2:
        problems.append(
            f"{RANGE_FLAG}: takes pairs FIRST LAST, and {values[-1]} is a FIRST without a LAST; "
            f"write {values[-1]} {values[-1]} to skip that iteration alone [skip-range-incomplete]"
        )
    typed = [
        (f"{RANGE_FLAG} {first} {last}", first, last)
        for first, last in zip(values[::2], values[1::2], strict=False)
    ]
    typed += [(f"{SINGLE_FLAG} {number}", number, number) for number in single]
    usable = []
    limit = sys.maxsize if train_iters is None else train_iters
    for text, first, last in typed:
        if first > last:
            problems.append(
                f"{text}: the first iteration is after the last; did you mean {last} {first}? "
                "[skip-range-reversed]"
            )
        elif first < 1:
            problems.append(
                f"{text}: iterations start at 1"
                + (f"; write 1 {last}" if last >= 1 else "")
                + " [skip-before-first-iteration]"
            )
        elif first > limit:
            problems.append(
                f"{text}: never reached, training ends with iteration {train_iters}; give "
                "iterations of the run, or omit it [skip-after-last-iteration]"
            )
        else:
            usable.append((first, min(last, limit)))
            if last > limit:
                warnings.append(
                    f"{text}: cut to {first} {limit}, the end of training [skip-range-cut]"
                )
    return SkipRanges(merge(usable, warnings)), tuple(problems), tuple(warnings)


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
    bad = [text for text in map(str, values) if not _INTEGER.fullmatch(text)]
    problems += [
        # problems are lines
        f"{flag} {' '.join(text.split())}: not an integer{_hint(text)} [value-malformed]"
        for text in bad
    ]
    return [] if bad else list(map(int, values))


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
