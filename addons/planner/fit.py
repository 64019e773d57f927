"""Constants from measured steps: least squares of logarithms, held to what was known before."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

NOISE = 0.05  # of a measured step; what is further off counts less than its square
Slopes = Callable[[np.ndarray, np.ndarray], np.ndarray]


def fit(
    predict: Callable[[np.ndarray], np.ndarray],
    measured: np.ndarray,
    start: np.ndarray,
    spread: np.ndarray,
    slopes: Slopes | None = None,
    steps: int = 25,
) -> np.ndarray:
    """The x near `start` (of a normal prior with this `spread`) at which exp(predict(x)) is nearest
    to the `measured` seconds: Levenberg and Marquardt's steps, with a loss that is linear in large
    residuals. `predict` gives logarithms, `slopes` their derivatives at x, where predict(x) is
    known."""
    logs = np.log(measured)

    def loss(x: np.ndarray) -> tuple[float, np.ndarray]:
        residual = (predict(x) - logs) / NOISE
        robust = 2 * (np.sqrt(1 + residual**2 / 2) - 1)
        return float(robust.sum() + (((x - start) / spread) ** 2).sum() / 2), residual

    def differences(x: np.ndarray, base: np.ndarray) -> np.ndarray:
        return np.stack([(predict(x + h) - base) / 1e-3 for h in 1e-3 * np.eye(len(x))], axis=1)

    x = start.copy()
    best, residual = loss(x)
    damping = 1e-2
    for _ in range(steps):
        slope = (slopes or differences)(x, predict(x)) / NOISE
        weights = 1 / np.sqrt(1 + residual**2 / 2)
        normal = (slope * weights[:, None]).T @ slope + np.diag(spread**-2.0)
        downhill = (slope * weights[:, None]).T @ residual + (x - start) / spread**2
        before = best
        while damping < 1e6:
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -downhill)
            tried = x + np.clip(step, -0.5, 0.5)
            value, others = loss(tried)
            if value < best:
                x, best, residual = tried, value, others
                damping = max(damping / 4, 1e-4)
                break
            damping *= 4
        if before - best < 1e-3 * before:
            break
    return x
