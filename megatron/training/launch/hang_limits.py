"""How long a rank may be without progress, by phase of the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megatron.config.tree import Config

SHARE_OF_TIMEOUT = 0.9  # of --distributed-timeout-minutes, which ends waiting ranks later
# For an iteration. Storage and hosts that are busy stall healthy ranks for ten seconds and more.
LEAST_SECONDS = 60.0
MEDIANS = 4.0


class Phase(NamedTuple):
    """What a rank is doing, and the seconds that it may be without progress (None: no limit).

    `announced`: rank 0 is notified, since a rank may hold the interpreter's lock in it for long.
    """

    name: str
    iteration: int = 0
    limit: float | None = None
    announced: bool = True

    def __str__(self) -> str:
        return f"{self.name} {self.iteration}" if self.iteration else self.name


@dataclass(frozen=True)
class Limits:
    """Seconds without progress that each phase may take; None: no limit. `iteration`: that of an
    iteration, if the user gave one."""

    startup: float | None
    first_iteration: float | None
    evaluation: float | None
    save: float | None
    iteration: float | None
    iterations: bool = True  # are limited

    @property
    def between(self) -> float | None:
        """That of what is done between iterations."""
        if self.evaluation is None or self.save is None:
            return None
        return max(self.evaluation, self.save)

    def __str__(self) -> str:
        iteration = (
            f"{self.iteration:g}"
            if self.iteration
            else f"larger of {LEAST_SECONDS:g} and {MEDIANS:g} x median"
        )
        values = {
            "start-up": _number(self.startup),
            "first iteration": _number(self.first_iteration),
            "iteration": iteration if self.iterations else "none",
            "evaluation": _number(self.evaluation),
            "save": _number(self.save),
        }
        return ", ".join(f"{name} {value}" for name, value in values.items())


def _number(seconds: float | None) -> str:
    return "none" if seconds is None else f"{seconds:g}"


def limits(config: Config) -> Limits:
    """The limits of a run, from its flags."""
    p = config.parallel
    longest = SHARE_OF_TIMEOUT * 60 * p.distributed_timeout_minutes
    # compiling again, for another shape, takes longer than any iteration
    iterations = p.hang_timeout_seconds != 0 and not (
        config.training.torch_compile and p.hang_timeout_seconds is None
    )

    def limit(flag: float | None) -> float | None:
        return None if p.hang_timeout_seconds == 0 else (longest if flag is None else flag) or None

    return Limits(
        limit(p.hang_timeout_startup_seconds),
        limit(p.hang_timeout_first_iteration_seconds) if iterations else None,
        limit(p.hang_timeout_evaluation_seconds),
        limit(p.hang_timeout_save_seconds),
        p.hang_timeout_seconds,
        iterations,
    )
