"""Detects iterations whose loss or gradient norm is an outlier: numbers in, a finding out, no
torch.

The rule is robust and one-sided. A value is compared with a linear fit through the last accepted
values; its distance is measured in sigma (1.4826 x the median absolute distance from the fit, which
is the standard deviation of a normal distribution). Outliers never enter the window, so one spike
does not hide the next; many consecutive outliers are a new level.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

WINDOW = 128  # accepted values that a new one is compared with
LEAST = 64  # fewest of them
LOSS_Z = 6.0
LOSS_EXCESS = 0.05  # sigma, and nats above the line
NORM_Z = 8.0
NORM_RATIO = 10.0  # sigma of the logarithm, and times the line: docs/features/spikes.md says why
PRECURSOR_Z = 4.0
TOGETHER = 32  # iterations: findings that long before a spike belong to it
LEVEL_SHIFT = 64  # consecutive outliers: the level has changed
# standard deviations of a normal distribution in its median absolute deviation
SIGMA = 1.4826

_X = np.arange(WINDOW, dtype=np.float64)


@dataclass(frozen=True)
class Finding:
    """The finding on an iteration: `kind` is "", `precursor`, `loss`, `grad-norm`, `non-finite` or
    `level shift`.

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
        """Whether --spike-action applies to it."""
        return self.kind in ("loss", "grad-norm", "non-finite")

    @property
    def sigma(self) -> float:
        """Deviation in sigma, the larger of loss and gradient norm."""
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
        """Add a value to the window and drop the oldest."""
        self.values.append(value)
        del self.values[:-WINDOW]


class SpikeDetector:
    """Checks iterations one after the other; skipped ones are not passed to it."""

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
        """The finding on an iteration with this loss (nats per token, mean over all) and norm
        (before clipping)."""
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
        """The state for a checkpoint, as JSON data; a copy, since a checkpoint may be written
        during training."""
        return {
            "loss": list(self._loss.values),
            "log_grad_norm": list(self._norm.values),
            "in_a_row": self._in_a_row,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self._loss = Series(list(state["loss"]))
        self._norm = Series(list(state["log_grad_norm"]))
        self._in_a_row = int(state["in_a_row"])
