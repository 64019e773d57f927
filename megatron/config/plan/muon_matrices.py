"""The matrices that Muon updates, and what they cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from megatron.config.muon import MuonConfig
from megatron.config.plan.parameter_spec import Matrices

# Elements of the matrices that are orthogonalized at a time, unless one has more.
CHUNK = 2**24


class Stack(NamedTuple):
    """`number` matrices of `rows` x `columns`."""

    number: int
    rows: int
    columns: int

    @property
    def cost(self) -> int:
        """Multiplications of one Newton-Schulz step: X X^T and P X, each of short^2 x long, and
        the square of the first."""
        short, long = sorted((self.rows, self.columns))
        return self.number * short**2 * (2 * long + short)


def stacks(config: MuonConfig, matrices: Matrices | None, shape: Sequence[int]) -> list[Stack]:
    """The matrices of a weight of this GLOBAL shape; [] if Muon does not update it."""
    if matrices is None:
        return []
    columns = shape[-1]
    if matrices.stacked:
        return [Stack(shape[0], math.prod(shape[1:-1]), columns)]
    rows = math.prod(shape[:-1])
    if not matrices.parts or not config.muon_split_qkv:
        return [Stack(1, rows, columns)]
    groups = rows // sum(matrices.parts)
    return [Stack(1, groups * part, columns) for part in matrices.parts]


def at_a_time(elements: int) -> int:
    """How many weights of so many elements (of all tensor-parallel ranks) are updated together."""
    return max(1, CHUNK // elements)
