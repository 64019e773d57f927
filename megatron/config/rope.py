"""Rotary positions of a layer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rope:
    """Rotary positions: `width` rotated channels of a head, the base of their frequencies, whether
    neighbours or halves are rotated, the divisor of positions, Llama 3.1's factor on low
    frequencies."""

    width: int
    base: float
    interleaved: bool = False
    interpolation: int | None = None
    scaling: float | None = None
