"""Assignment of whole parameters to the ranks of the sharded optimizer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

SLACK = 101, 100  # a rank is full with this share of the mean: 1.01


@dataclass(frozen=True)
class Partition:
    """`order`: the parameters' numbers as they are walked; `pieces`: of each, by its number,
    (elements, owner)."""

    order: tuple[int, ...]
    pieces: tuple[tuple[tuple[int, int], ...], ...]


def whole_parameters(
    names: Sequence[str], shapes: Sequence[Sequence[int]], ranks: int
) -> Partition:
    """Walk the parameters, which are named in the model's order, and go to the next rank when one
    has its share.

    The walk has attention first, then both norms, then the MLP, whose gate and up matrices count
    as two parameters. A parameter with which a rank passes 1.01 of the
    mean goes to the next rank, uncounted.
    """
    order = sorted(range(len(names)), key=lambda number: _rank_in_walk(names, number))
    parts = [
        [math.prod(shape[1:])] * shape[0] if len(shape) == 3 else [math.prod(shape)]
        for shape in shapes
    ]
    mean = sum(map(sum, parts)) // ranks
    pieces: list[tuple[tuple[int, int], ...]] = [()] * len(names)
    owner = elements = 0
    for number in order:
        for size in parts[number]:
            elements += size
            if elements * SLACK[1] > mean * SLACK[0] and owner < ranks - 1:
                owner = owner + 1
                elements = 0
            pieces[number] += ((size, owner),)
    return Partition(tuple(order), tuple(pieces))


def _rank_in_walk(names: Sequence[str], number: int) -> tuple[int, int]:
    """Where a parameter comes: the norm before attention right before the one behind it, all others
    as they are."""
    name = names[number]
    block, separator, _ = name.partition("input_layernorm.")
    if not separator:
        return number, 0
    behind = [
        index for index, text in enumerate(names) if text.startswith(block + "pre_mlp_layernorm.")
    ]
    return behind[0], number - behind[0]
