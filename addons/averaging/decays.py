"""The weights of a mean of checkpoints that stands for a decay of the learning rate over them.
Needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from math import cos, pi, sqrt
from types import MappingProxyType

# what is left of the learning rate when this part of the checkpoints is behind: 1 to 0
DECAYS = MappingProxyType(
    {
        "linear": lambda part: 1 - part,
        "cosine": lambda part: (1 + cos(pi * part)) / 2,
        "1-sqrt": lambda part: 1 - sqrt(part),
    }
)


def decay_weights(decay: Callable[[float], float], count: int) -> list[float]:
    """The weight of each of `count` checkpoints, oldest first, with a sum of 1.

    The steps between two checkpoints are in all later ones. They are to count as `decay` says for
    that time, so the weight of a checkpoint is the loss of `decay` from it to the next.
    """
    factors = [decay(number / count) for number in range(count)] + [0.0]
    return [here - after for here, after in zip(factors, factors[1:], strict=False)]
