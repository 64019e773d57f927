"""Rotary positions of a layer."""

from dataclasses import dataclass
from typing import NamedTuple

# Llama 3.1's context before it was lengthened, and the turns in it between which frequencies go
# over from slowed to kept.
LLAMA3_CONTEXT = 8192
LLAMA3_LOW = 1.0
LLAMA3_HIGH = 4.0


class Yarn(NamedTuple):
    """YaRN (Peng et al. 2023): slow frequencies are divided by `factor`. In `context` positions
    those with more than `fast` turns stay, those with less than `slow` are slow; in channels, which
    are `rounded` outwards, the result goes over linearly. Queries and keys are multiplied by
    `length`, the scores of latent attention by `scores`."""

    factor: float
    context: int
    fast: float
    slow: float
    length: float
    rounded: bool
    scores: float = 1.0


class LongRope(NamedTuple):
    """LongRoPE (Ding et al. 2024): frequencies are divided, each by its own number, by `short` in
    sequences of up to `context` tokens, by `long` in longer ones. Queries and keys are multiplied
    by `length`."""

    context: int
    short: tuple[float, ...]
    long: tuple[float, ...]
    length: float


@dataclass(frozen=True)
class Rope:
    """Rotary positions: `width` rotated channels of a head, the base of their frequencies, whether
    neighbours or halves are rotated, the divisor of positions, Llama 3.1's factor on low
    frequencies, numbers of YaRN or LongRoPE."""

    width: int
    base: float
    interleaved: bool = False
    interpolation: int | None = None
    scaling: float | None = None
    yarn: Yarn | None = None
    longrope: LongRope | None = None
