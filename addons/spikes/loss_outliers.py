"""Losses of single samples: their means, the usual range, and outliers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron.features.spikes.detector import SIGMA

STANDS_OUT = 6.0  # sigma above the median of the samples
LEAST_EXCESS = 0.5  # nats above it
MASKED = float("-inf")  # in place of a loss that does not count


def mean_loss(losses: np.ndarray) -> float:
    """The mean of the losses that count; 0 where none does."""
    counted = losses[losses != MASKED]
    return float(counted.mean(dtype=np.float64)) if len(counted) else 0.0


@dataclass(frozen=True)
class Scale:
    """The usual loss of a sample at one state of the model: `median` in nats and `sigma`, 1.4826 x
    the median distance."""

    median: float
    sigma: float

    def z(self, loss: float) -> float:
        """How far a loss is above the median, in sigma."""
        return (loss - self.median) / max(self.sigma, 1e-12)

    def stands_out(self, loss: float) -> bool:
        """Whether it is far above the usual losses; a non-finite loss is."""
        return not np.isfinite(loss) or (
            self.z(loss) > STANDS_OUT and loss - self.median > LEAST_EXCESS
        )


def scale_of(losses: Sequence[float]) -> Scale:
    """The scale of these losses of samples; those that are no numbers do not count."""
    finite = np.array([loss for loss in losses if np.isfinite(loss)])
    if not len(finite):
        return Scale(float("nan"), float("nan"))
    median = float(np.median(finite))
    return Scale(median, SIGMA * float(np.median(np.abs(finite - median))))
