"""Rotary positions of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Yarn(NamedTuple):
    """YaRN (Peng et al. 2023): slow frequencies are divided by `factor`. In `context` positions
    those with more than `fast` turns stay, those with less than `slow` are slow; in channels, which
    are `rounded` outwards, the result goes over linearly. Queries and keys are multiplied by
    `length`."""

    factor: float
    context: int
    fast: float
    slow: float
    length: float
    rounded: bool


@dataclass(frozen=True)
class Rope:
    """Rotary positions: `width` rotated channels of a head, the base of their frequencies, whether
    neighbours or halves are rotated, the divisor of positions, Llama 3.1's factor on low
    frequencies, YaRN's numbers."""

    width: int
    base: float
    interleaved: bool = False
    interpolation: int | None = None
    scaling: float | None = None
    yarn: Yarn | None = None
