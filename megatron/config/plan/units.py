"""Which units of weights a chunk's modules compute with, and when they and their gradients are
there whole, in one micro-batch: what is gathered how often, and the most that is there at a
time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from megatron.config.plan.buckets import DECODER, EMBEDDING, HEAD, UnitName

Unit = TypeVar("Unit")


class Use(NamedTuple, Generic[Unit]):
    """A module's: the `units` that it reads, `again` those of them that its backward reads.

    `ahead`, `behind`: gathered meanwhile, for the module after it and, in backward, before it.
    `keeps`: not freed behind its forward pass. `closes`: no module before it uses them, so their
    gradients are complete when its backward ends. `frees`: not read by its backward nor later.
    """

    units: tuple[Unit, ...]
    again: tuple[Unit, ...]
    ahead: tuple[Unit, ...]
    behind: tuple[Unit, ...]
    keeps: tuple[Unit, ...]
    closes: tuple[Unit, ...]
    frees: tuple[Unit, ...]


def uses(calls: Sequence[tuple[UnitName, ...]], last: bool) -> list[Use[UnitName]]:
    """Of each of a chunk's `calls` (`Chunk.calls`), of which the `last` chunk ends with the output
    layer."""
    end = len(calls) - 1
    before_output = calls[:end] if last else calls
    norm = before_output.index((HEAD,)) if (HEAD,) in before_output else len(calls)
    # Of the last chunk backward follows at once, of the last layer and of what lies behind it.
    kept = min(end, norm - (norm + 1 == end)) if last else len(calls)
    # The gradient of an embedding takes ids alone; that of a tied output layer the weight.
    again = [
        units if last and number == end else tuple(unit for unit in units if unit != EMBEDDING)
        for number, units in enumerate(calls)
    ]
    result = []
    for number, units in enumerate(calls):
        after = calls[number + 1] if number < end else ()
        before = again[number - 1] if 0 < number <= kept else ()
        keeps = tuple(unit for unit in units if unit in after)
        closes = tuple(unit for unit in units if all(unit not in each for each in calls[:number]))
        frees: Collection[UnitName] = ()
        if last and number == norm:
            frees = set(again[end]).difference(*again[: number + 1])
        result.append(
            Use(
                units,
                again[number],
                # the final norm takes no time, and an evaluation goes on to the output layer
                after if number != norm else (),
                before,
                keeps + again[number] if number >= kept else keeps,
                closes,
                tuple(sorted(frees)),
            )
        )
    return result


@dataclass(frozen=True)
class Sharing:
    """frees: are weights freed after use? gathers_ahead: is the next unit gathered meanwhile?
    reduces_ahead: are a unit's gradients reduced while the next one computes?"""

    frees: bool
    gathers_ahead: bool
    reduces_ahead: bool


class Passes:
    """A micro-batch through a chunk with these `uses`. gathers: of each unit. peak:
    bytes of (weights, gradients) when they are most, together.

    `sizes`: elements of each unit that ranks share; `itemsizes`: of a weight and a gradient.
    `runs`: lengths of the runs of layers that are recomputed, from the first layer on. `carried`:
    the unit whose gradients a backward pass before may leave under way.
    """

    def __init__(
        self,
        uses: Sequence[Use[UnitName]],
        sizes: Mapping[UnitName, int],
        itemsizes: tuple[int, int],
        sharing: Sharing,
        runs: Sequence[int] = (),
        carried: UnitName | None = None,
    ):
        self.gathers: Counter[UnitName] = Counter()
        self.peak = (0, 0)
        self._sizes = sizes
        self._itemsizes = itemsizes
        self._sharing = sharing
        self._weights: set[UnitName] = set()
        self._grads = set() if carried is None or not sharing.reduces_ahead else {carried}
        for use in uses:
            self._need(use.units, use.ahead)
            self._weights -= {unit for unit in use.units if unit not in use.keeps}
        run_of: dict[UnitName, Sequence[UnitName]] = {}
        layers = [use.units[0] for use in uses if use.units[0][0] == DECODER]
        for run in runs:
            run_of |= dict.fromkeys(layers[:run], layers[:run])
            layers = layers[run:]
        reduced: set[UnitName] = set()
        self._grads.clear()
        for use in reversed(uses):
            self._weights.difference_update(use.frees)
            self._grads.update(use.units)
            self._need(use.again, use.behind)
            for unit in use.again:
                self._need([other for other in run_of.get(unit, ()) if other <= unit], ())
            self._measure()
            for unit in use.closes:
                self._grads -= reduced
                self._weights.discard(unit)
                reduced = {unit}
                if not sharing.reduces_ahead:
                    self._grads.discard(unit)

    def _need(self, units: Sequence[UnitName], following: Sequence[UnitName]) -> None:
        if self._sharing.frees:
            for needed in (*units, *(following if self._sharing.gathers_ahead else ())):
                self.gathers[needed] += needed not in self._weights
                self._weights.add(needed)
            self._measure()

    def _measure(self) -> None:
        weights, grads = (
            sum(self._sizes.get(unit, 0) for unit in units) * itemsize
            for units, itemsize in zip((self._weights, self._grads), self._itemsizes, strict=True)
        )
        self.peak = max(self.peak, (weights, grads), key=sum)
