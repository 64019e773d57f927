"""The part of each data set that train, valid and test read (--split)."""

import math
import re
from collections.abc import Sequence

import numpy as np

SPLITS = ("train", "valid", "test")
# prefixes, and weights (or EpochCounts) if the user gave any
Blend = tuple[list[str], list[float] | None]
SplitMatrix = list[tuple[float, float] | None]


def parse_split(split: str) -> SplitMatrix:
    """`--split 949,50,1` as the part of the sequences each of train, valid, test gets, None for an
    empty one.

    Bounds are running sums of the normalized shares from an int 0 (Megatron's cache keys show it).
    Missing shares are 0. Quotes are passed over, as Megatron does: they reach it from scripts with
    arrays of quoted flags. Raises ValueError for anything but one to three non-negative numbers
    with a positive sum.
    """
    words = [word for word in re.split(r"[,/\s'\"]+", split.strip()) if word]
    try:
        shares = [float(word) for word in words]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= 3 or not all(0 <= s < math.inf for s in shares) or sum(shares) == 0:
        raise ValueError(
            f"--split {split}: must be up to three shares of train, valid and test, such as "
            "949,50,1 [split-malformed]"
        )
    shares = normalize(shares + [0.0] * (3 - len(shares)))
    bounds: list[float] = [0]
    for share in shares:
        bounds.append(bounds[-1] + share)
    return [
        (low, high) if high > low else None
        for low, high in zip(bounds[:-1], bounds[1:], strict=True)
    ]


def split_range(bounds: tuple[float, float], sequences: int) -> range:
    """The sequences of one split: both bounds rounded half to even, as Megatron rounds them."""
    return range(int(round(bounds[0] * float(sequences))), int(round(bounds[1] * float(sequences))))


def normalize(weights: Sequence[float]) -> list[float]:
    """Divide by the float64 sum, with numpy's order of summation (megatron-core's numbers to the
    last bit)."""
    values = np.array(weights, np.float64)
    return (values / np.sum(values)).tolist()
