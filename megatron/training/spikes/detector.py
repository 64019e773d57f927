"""Is the loss or the gradient norm of an iteration out of line with those before it? Numbers in, a
finding out; no torch.

The rule is robust and one-sided. A value is held against the straight line through the last
accepted ones; its distance is measured in their spread (1.4826 x the median distance from the line,
which a normal distribution calls sigma). What is out of line never enters the window, so one spike
does not hide the next; a long run of such values is a new level.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

WINDOW = 128  # accepted values that a new one is held against
LEAST = 64  # as many must be there
LOSS_Z = 6.0
LOSS_EXCESS = 0.05  # sigma, and nats above the line
NORM_Z = 8.0
NORM_RATIO = 10.0  # sigma of the logarithm, and times the line: docs/spikes.md says why
PRECURSOR_Z = 4.0
TOGETHER = 32  # iterations: findings that long before a spike belong to it
LEVEL_SHIFT = 64  # out of line in a row: the level has changed
# standard deviations of a normal distribution in its median absolute deviation
SIGMA = 1.4826

_X = np.arange(WINDOW, dtype=np.float64)


@dataclass(frozen=True)
class Finding:
    """What an iteration is: `kind` is "", `precursor`, `loss`, `grad-norm`, `non-finite` or `level
    shift`.

    `loss_z` and `norm_z` are in sigma above the line, 0 while there is too little to compare with;
    `excess` in nats; `ratio` of the gradient norm to the line's.
    """

    kind: str = ""
    loss_z: float = 0.0
    norm_z: float = 0.0
    excess: float = 0.0
    ratio: float = 1.0

    @property
    def spike(self) -> bool:
        """Is it one that something may be done about?"""
        return self.kind in ("loss", "grad-norm", "non-finite")

    @property
    def sigma(self) -> float:
        """How far out of line it is, by the worse of the two."""
        return max(self.loss_z, self.norm_z)


@dataclass
class Series:
    """The last accepted values of one number."""

    values: list[float] = field(default_factory=list)

    def against(self, value: float) -> tuple[float, float]:
        """(distance in sigma, distance) of `value` above the line through the window; zeros while
        there are too few."""
        count = len(self.values)
        if count < LEAST:
            return 0.0, 0.0
        y = np.array(self.values)
        x = _X[:count] - (count - 1) / 2
        mean = y.sum() / count
        slope = (x @ y) / (x @ x)
        distance = np.abs(y - mean - slope * x)
        distance.partition((count - 1) // 2)
        sigma = SIGMA * float(distance[(count - 1) // 2])
        above = value - float(mean + slope * (count + 1) / 2)
        return above / max(sigma, 1e-12), above

    def accept(self, value: float) -> None:
        """Take a value in; the oldest leaves."""
        self.values.append(value)
        del self.values[:-WINDOW]


class SpikeDetector:
    """Judges iterations one after the other. Iterations that are skipped are not shown to it and
    change nothing."""

    def __init__(self) -> None:
        self._loss = Series()
        self._norm = Series()
        self._in_a_row = 0

    @property
    def ready(self) -> bool:
        """Are there enough accepted losses to compare with? Until then only numbers that are not
        finite are found."""
        return len(self._loss.values) >= LEAST

    def check(self, loss: float, grad_norm: float | None = None) -> Finding:
        """What an iteration is with this loss (nats per token, mean over all) and norm (before
        clipping)."""
        if not math.isfinite(loss) or (grad_norm is not None and not math.isfinite(grad_norm)):
            return Finding("non-finite")
        loss_z, excess = self._loss.against(loss)
        log_norm = None if grad_norm is None else math.log(max(grad_norm, 1e-30))
        norm_z, above = (0.0, 0.0) if log_norm is None else self._norm.against(log_norm)
        ratio = math.exp(min(above, 700.0))
        kind = ""
        if loss_z > LOSS_Z and excess > LOSS_EXCESS:
            kind = "loss"
        elif norm_z > NORM_Z and ratio > NORM_RATIO:
            kind = "grad-norm"
        elif max(loss_z, norm_z) > PRECURSOR_Z:
            kind = "precursor"
        if kind in ("loss", "grad-norm"):
            self._in_a_row += 1
            if self._in_a_row > LEVEL_SHIFT:
                self._loss = Series()
                self._norm = Series()
                self._in_a_row = 0
                kind = "level shift"
        else:
            self._in_a_row = 0
        if kind not in ("loss", "grad-norm"):
            self._loss.accept(loss)
            if log_norm is not None:
                self._norm.accept(log_norm)
        return Finding(kind, loss_z, norm_z, excess, ratio)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON; a copy, since one may be written while the run goes
        on."""
        return {
            "loss": list(self._loss.values),
            "log_grad_norm": list(self._norm.values),
            "in_a_row": self._in_a_row,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what a checkpoint kept."""
        self._loss = Series(list(state["loss"]))
        self._norm = Series(list(state["log_grad_norm"]))
        self._in_a_row = int(state["in_a_row"])
