"""Loss scaling for fp16, constant or dynamic: the scale is a host number, updated once per step."""

import math
from typing import Any, Protocol

from megatron.config.precision import PrecisionConfig


class GradScaler(Protocol):
    """What the optimizer needs of a loss scale."""

    scale: float

    def update(self, found_inf: bool) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class ConstantGradScaler:
    """The fixed scale of --loss-scale; an overflow skips the step and changes nothing."""

    def __init__(self, scale: float) -> None:
        assert scale > 0, scale
        self.scale = float(scale)

    def update(self, found_inf: bool) -> None:
        """The scale stays constant."""

    def state_dict(self) -> dict[str, Any]:
        """{"scale": float}, for the record."""
        return {"scale": self.scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep this run's --loss-scale: a constant scale is configuration, not training state."""


class DynamicGradScaler:
    """Megatron's dynamic loss scale.

    An overflow uses up one unit of hysteresis and, once none is left, multiplies the scale by
    `backoff_factor` (not below `min_scale`). Hysteresis comes back only with a full window of
    `growth_interval` good steps in a row, when the scale also grows by `growth_factor` (to at most
    `max_scale`); a backoff does not replenish it.
    """

    def __init__(self, config: PrecisionConfig) -> None:
        self.scale = float(config.initial_loss_scale)
        self.min_scale = float(config.min_loss_scale)
        self.max_scale = math.inf if config.max_loss_scale is None else float(config.max_loss_scale)
        self.growth_interval = int(config.loss_scale_window)
        self.hysteresis = config.hysteresis
        self.growth_factor = config.loss_scale_growth_factor
        self.backoff_factor = config.loss_scale_backoff_factor
        assert 0.0 < self.min_scale <= self.scale <= self.max_scale, config
        assert self.growth_interval >= 1 and self.hysteresis >= 1, config
        assert self.growth_factor > 1.0 > self.backoff_factor > 0.0, config
        self.growth_tracker = 0
        self.hysteresis_tracker = self.hysteresis

    def update(self, found_inf: bool) -> None:
        """Count one step, overflowed or good, and adapt the scale for the next one."""
        if found_inf:
            self.growth_tracker = 0
            self.hysteresis_tracker -= 1
            if self.hysteresis_tracker <= 0:
                self.scale = max(self.scale * self.backoff_factor, self.min_scale)
            return
        self.growth_tracker += 1
        if self.growth_tracker == self.growth_interval:
            self.growth_tracker = 0
            self.hysteresis_tracker = self.hysteresis
            self.scale = min(self.scale * self.growth_factor, self.max_scale)

    def state_dict(self) -> dict[str, Any]:
        """JSON-able: scale (float), growth_tracker and hysteresis_tracker (int)."""
        return {
            "scale": self.scale,
            "growth_tracker": self.growth_tracker,
            "hysteresis_tracker": self.hysteresis_tracker,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; a constant scale's state gives its scale and leaves
        the trackers."""
        self.scale = float(state["scale"])
        self.growth_tracker = int(state.get("growth_tracker", 0))
        self.hysteresis_tracker = int(state.get("hysteresis_tracker", self.hysteresis))


def build_grad_scaler(config: PrecisionConfig) -> GradScaler | None:
    """The configured scaler: constant with --loss-scale (any precision), dynamic with --fp16, else
    None."""
    if config.loss_scale is not None:
        return ConstantGradScaler(config.loss_scale)
    return DynamicGradScaler(config) if config.fp16 else None
