"""Loss scales for half precision as host numbers: how large now, and what an overflow or a good
step does to it."""

import math
from typing import Any, Protocol


class GradScaler(Protocol):
    """What the optimizer needs of a loss scale."""

    scale: float

    def update(self, found_inf: bool) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class ConstantGradScaler:
    """The fixed scale of --loss-scale; an overflow skips the step and changes nothing."""

    def __init__(self, scale: float) -> None:
        if not scale > 0:
            raise ValueError(
                f"--loss-scale {scale} must be positive; leave the flag out for a dynamic scale"
            )
        self.scale = float(scale)

    def update(self, found_inf: bool) -> None:
        """Nothing to learn from a step."""

    def state_dict(self) -> dict[str, Any]:
        """{"scale": float}, for the record."""
        return {"scale": self.scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The command line's scale stays: it is a choice of this run, not a state that training has
        found."""


class DynamicGradScaler:
    """Megatron's dynamic loss scale (facts/megatron.md 7).

    An overflow uses up one unit of hysteresis and, once none is left, multiplies the scale by
    `backoff_factor` (not below `min_scale`). Hysteresis comes back only with a full window of
    `growth_interval` good steps in a row, when the scale also grows by `growth_factor` (to at most
    `max_scale`); a backoff does not replenish it.
    """

    def __init__(
        self,
        initial_scale: float = 2.0**32,
        min_scale: float = 1.0,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        max_scale: float | None = None,
    ) -> None:
        if not min_scale > 0:
            raise ValueError(f"--min-loss-scale {min_scale} must be positive")
        if not initial_scale >= min_scale:
            raise ValueError(
                f"--initial-loss-scale {initial_scale} is below --min-loss-scale {min_scale}; "
                "raise the first or lower the second"
            )
        if growth_interval < 1:
            raise ValueError(f"--loss-scale-window {growth_interval} must be at least 1")
        if hysteresis < 1:
            raise ValueError(f"--hysteresis {hysteresis} must be at least 1")
        if not growth_factor > 1.0:
            raise ValueError(f"--loss-scale-growth-factor {growth_factor} must be greater than 1")
        if not 0.0 < backoff_factor < 1.0:
            raise ValueError(
                f"--loss-scale-backoff-factor {backoff_factor} must be between 0 and 1"
            )
        if max_scale is not None and not initial_scale <= max_scale:
            raise ValueError(
                f"--max-loss-scale {max_scale} is below --initial-loss-scale {initial_scale}; "
                "lower the second"
            )
        self.scale = float(initial_scale)
        self.min_scale = float(min_scale)
        self.max_scale = math.inf if max_scale is None else float(max_scale)
        self.growth_interval = growth_interval
        self.hysteresis = hysteresis
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.growth_tracker = 0
        self.hysteresis_tracker = hysteresis

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
        """Take over what `state_dict` gave; a constant scale's state gives its scale and leaves the
        trackers."""
        self.scale = float(state["scale"])
        self.growth_tracker = int(state.get("growth_tracker", 0))
        self.hysteresis_tracker = int(state.get("hysteresis_tracker", self.hysteresis))


def build_grad_scaler(
    *,
    fp16: bool,
    loss_scale: float | None,
    initial_loss_scale: float = 2.0**32,
    min_loss_scale: float = 1.0,
    loss_scale_window: int = 1000,
    hysteresis: int = 2,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    max_loss_scale: float | None = None,
) -> GradScaler | None:
    """The scaler these flags ask for: constant with --loss-scale (any precision), dynamic with
    --fp16, else None."""
    if loss_scale is not None:
        return ConstantGradScaler(loss_scale)
    if fp16:
        return DynamicGradScaler(
            initial_loss_scale,
            min_loss_scale,
            loss_scale_window,
            hysteresis,
            growth_factor,
            backoff_factor,
            max_loss_scale,
        )
    return None
