"""When a chunk's units have their weights and gradients whole, in one micro-batch: what is gathered
how often, and the most that is there at a time. The order is that of `parallel/fsdp.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron.config.plan.buckets import EMBEDDING, HEAD


def sites(layers: range, first: bool, last: bool, tied: bool) -> list[int]:
    """The unit of each module that a chunk calls, in order; a tied output layer is of the
    embedding's."""
    ends = [HEAD, EMBEDDING if tied else HEAD] if last else []
    return [*[EMBEDDING] * first, *(1 + layer for layer in layers), *ends]


@dataclass(frozen=True)
class Sharing:
    """frees: are weights freed after use? ahead: is the next unit gathered meanwhile, and are a
    unit's gradients reduced while the next one computes?"""

    frees: bool
    gathers_ahead: bool
    reduces_ahead: bool


class Passes:
    """A micro-batch through a chunk. gathers: of each unit. peak: bytes of (weights, gradients)
    when they are most, together.

    `sizes`: elements of each unit that ranks share; `itemsizes`: of a weight and a gradient.
    `runs`: lengths of the runs of layers that are recomputed, from the first layer on. `carried`:
    the unit whose gradients a backward pass before may leave under way.
    """

    def __init__(
        self,
        units: Sequence[int],
        sizes: Mapping[int, int],
        itemsizes: tuple[int, int],
        sharing: Sharing,
        runs: Sequence[int] = (),
        carried: int | None = None,
    ):
        self.gathers: Counter[int] = Counter()
        self.peak = (0, 0)
        self._sizes = sizes
        self._itemsizes = itemsizes
        self._sharing = sharing
        self._weights: set[int] = set()
        self._grads = set() if carried is None or not sharing.reduces_ahead else {carried}
        kept = units.index(HEAD) - 1 if HEAD in units else len(units)
        for number, unit in enumerate(units):
            self._need(unit, units[number + 1 : number + 2])
            if number < kept:
                self._weights.discard(unit)
        run_of: dict[int, Sequence[int]] = {}
        start = sum(unit == EMBEDDING for unit in units[:1])
        for run in runs:
            run_of |= dict.fromkeys(units[start : start + run], units[start : start + run])
            start += run
        reduced: set[int] = set()
        self._grads.clear()
        for number in reversed(range(len(units))):
            unit = units[number]
            self._need(unit, units[max(number - 1, 0) : number])
            self._grads.add(unit)
            for other in run_of.get(unit, ()):
                if other in units[: number + 1]:
                    self._need(other, ())
            self._measure()
            if unit not in units[:number]:
                self._grads -= reduced
                self._weights.discard(unit)
                reduced = {unit}
                if not sharing.reduces_ahead:
                    self._grads.discard(unit)

    def _need(self, unit: int, following: Sequence[int]) -> None:
        if self._sharing.frees:
            for needed in (unit, *(following if self._sharing.gathers_ahead else ())):
                self.gathers[needed] += needed not in self._weights
                self._weights.add(needed)
            self._measure()

    def _measure(self) -> None:
        weights, grads = (
            sum(self._sizes.get(unit, 0) for unit in units) * itemsize
            for units, itemsize in zip((self._weights, self._grads), self._itemsizes, strict=True)
        )
        self.peak = max(self.peak, (weights, grads), key=sum)
