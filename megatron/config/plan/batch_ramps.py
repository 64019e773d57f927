"""Global batch sizes that change: the steps of --rampup-batch-size, --rampup-micro-batches and
--step-batch-size-schedule."""

import math
import re
from collections.abc import Sequence
from decimal import Decimal

_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_MOST_SIZES = 1_000_000  # of a ramp: more are a slip of the pen, which would take hours here
_AMOUNT = re.compile(r"([0-9]+(?:\.[0-9]*)?(?:E[0-9]{1,2})?)([KMBT]?)")


def rampup_steps(values: Sequence[int | str], global_batch_size: int) -> list[tuple[int, int]]:
    """(samples, size) steps of --rampup-batch-size START INCREMENT SAMPLES up to
    `global_batch_size`.

    The size after c samples is START + INCREMENT * int(c / p) while c <= SAMPLES, with p = SAMPLES
    / increments in floating point, and the full size after that; the thresholds are the smallest c
    at which that expression changes.
    """
    flag = f"--rampup-batch-size {' '.join(map(str, values))}"
    try:
        start, increment, samples = (int(value) for value in values)
    except ValueError:
        raise ValueError(
            f"{flag}: expected three integers, START INCREMENT SAMPLES [batch-ramp-malformed]"
        ) from None
    if start < 1 or increment < 1 or samples < 0:
        raise ValueError(
            f"{flag}: START and INCREMENT must be at least 1, and SAMPLES not negative "
            "[value-out-of-range]"
        )
    if start > global_batch_size:
        raise ValueError(
            f"{flag}: starts above --global-batch-size {global_batch_size}; use at most that as "
            "START [batch-ramp-starts-too-high]"
        )
    if (global_batch_size - start) % increment:
        raise ValueError(
            f"{flag}: --global-batch-size {global_batch_size} minus START {start} is "
            f"{global_batch_size - start}, not a multiple of INCREMENT {increment}; change one of "
            "them [batch-ramp-increment-does-not-fit]"
        )
    increments = (global_batch_size - start) // increment
    _refuse_endless(flag, increments)
    if increments == 0:
        return [(0, global_batch_size)]
    if samples == 0:
        raise ValueError(
            f"{flag}: SAMPLES must be at least 1; change it, or give only --global-batch-size "
            "[value-out-of-range]"
        )
    per_increment = samples / increments
    size_from = {0: start}
    for count in range(1, increments + 1):
        threshold = max(0, math.ceil(count * per_increment))
        while int(threshold / per_increment) < count:
            threshold += 1
        while threshold and int((threshold - 1) / per_increment) >= count:
            threshold -= 1
        if threshold <= samples:
            size_from[threshold] = start + count * increment
    if max(size_from.values()) < global_batch_size:
        size_from[samples + 1] = global_batch_size
    return sorted(size_from.items())


def _refuse_endless(flag: str, increments: int) -> None:
    if increments > _MOST_SIZES:
        raise ValueError(
            f"{flag}: {increments} increments up to --global-batch-size, more than {_MOST_SIZES}; "
            "give a larger INCREMENT [batch-ramp-increment-does-not-fit]"
        )


def micro_batch_steps(
    values: Sequence[int | str], global_batch_size: int, divisor: int
) -> list[tuple[int, int]]:
    """(samples, size) steps of --rampup-micro-batches START INCREMENT ITERATIONS up to
    `global_batch_size`.

    Iteration n (1-based) has min(START + (n - 1) // ITERATIONS * INCREMENT, all) micro-batches on
    each data-parallel rank, each of `divisor` samples over all of them.
    Raises ValueError.
    """
    flag = f"--rampup-micro-batches {' '.join(map(str, values))}"
    try:
        start, increment, iterations = (int(value) for value in values)
    except ValueError:
        raise ValueError(
            f"{flag}: expected three integers, START INCREMENT ITERATIONS [batch-ramp-malformed]"
        ) from None
    if min(start, increment, iterations) < 1:
        raise ValueError(f"{flag}: each of the three must be at least 1 [value-out-of-range]")
    if start * divisor > global_batch_size:
        raise ValueError(
            f"{flag}: starts above the {global_batch_size // divisor} micro-batches of "
            f"--global-batch-size {global_batch_size}; use at most that as START "
            "[batch-ramp-starts-too-high]"
        )
    _refuse_endless(flag, (global_batch_size - start * divisor) // (increment * divisor))
    steps = []
    consumed = 0
    for size in range(start * divisor, global_batch_size, increment * divisor):
        steps.append((consumed, size))
        consumed += size * iterations
    return [*steps, (consumed, global_batch_size)]


def parse_step_schedule(text: str, seq_length: int | None = None) -> list[tuple[int, int]]:
    """(samples, size) steps of --step-batch-size-schedule "0:768 250B:1536", entries split by
    blanks or commas.

    Thresholds are tokens when `seq_length` is given (and become whole samples), else samples.
    Numbers may end in K, M, B or T (1e3 .. 1e12) and have decimals. Raises ValueError listing every
    bad entry.
    """
    flag = f'--step-batch-size-schedule "{text}"'
    problems: list[str] = []
    steps: list[tuple[int, int]] = []
    for entry in text.replace(",", " ").split():
        threshold_text, colon, size_text = entry.partition(":")
        threshold = _amount(threshold_text)
        size = _amount(size_text)
        if not colon or threshold is None or size is None:
            problems.append(f"{entry} is not THRESHOLD:BATCH_SIZE, as in 250B:1536")
            continue
        if size < 1:
            problems.append(f"{entry} has a batch size of {size}; it must be at least 1")
        steps.append((threshold if seq_length is None else threshold // seq_length, size))
    steps.sort(key=lambda step: step[0])
    if not steps and not problems:
        problems.append("it is empty; give at least 0:BATCH_SIZE")
    if steps and steps[0][0] != 0:
        problems.append(f"the first threshold is {steps[0][0]} samples; it must be 0")
    for (before, _), (after, _) in zip(steps, steps[1:], strict=False):
        if before == after:
            problems.append(
                f"two entries begin at {after} samples; thresholds must be strictly increasing"
            )
    if problems:
        raise ValueError(f"{flag}: {'; '.join(problems)} [step-schedule-malformed]")
    return steps


def _amount(text: str) -> int | None:
    """An integer from "250B", "1.5M" or "768"; None if it is none."""
    match = _AMOUNT.fullmatch(text.strip().upper())
    return int(Decimal(match[1]) * _SUFFIXES[match[2]]) if match else None
