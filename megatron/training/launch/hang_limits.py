"""How long a rank may be without progress, by phase of the run, and what follows when one is for
longer: nothing, a warning, or the end of the run."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from megatron.config.tree import Config

SHARE_OF_TIMEOUT = 0.9  # of --distributed-timeout-minutes, which ends waiting ranks later
# For an iteration. Storage and hosts that are busy stall healthy ranks for ten seconds and more.
LEAST_SECONDS = 60.0
MEDIANS = 4.0
# A rank that computes may be starved of cores, or slow: it has so many times its limit.
COMPUTES_LIMITS = 10.0
ALL_WAIT_LIMITS = 4.0  # limits that all may wait for each other: a network may recover


class RunPhase(NamedTuple):
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
class HangLimits:
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


def limits(config: Config) -> HangLimits:
    """The limits of a run, from its flags."""
    p = config.parallel
    longest = SHARE_OF_TIMEOUT * 60 * p.distributed_timeout_minutes
    # compiling again, for another shape, takes longer than any iteration
    iterations = p.hang_timeout_seconds != 0 and not (
        config.training.torch_compile and p.hang_timeout_seconds is None
    )

    def limit(flag: float | None) -> float | None:
        return None if p.hang_timeout_seconds == 0 else (longest if flag is None else flag) or None

    return HangLimits(
        limit(p.hang_timeout_startup_seconds),
        limit(p.hang_timeout_first_iteration_seconds) if iterations else None,
        limit(p.hang_timeout_evaluation_seconds),
        limit(p.hang_timeout_save_seconds),
        p.hang_timeout_seconds,
        iterations,
    )


@dataclass(frozen=True)
class RankState:
    """What is known of a rank: for how long it has made no progress (of one that does not answer:
    the time in its phase), the limit of its phase, and what it is doing.

    `waits`: for which collective or device, "" where it is exiting, None if it does not wait.
    `computes`: it has a core or waits for one; of one that does not answer, it waits for one.
    `stopped`: by a signal.
    """

    seconds: float
    limit: float | None
    waits: str | None = None
    computes: bool = False
    answers: bool = True
    stopped: bool = False

    def beyond(self, limits: float = 1.0) -> bool:
        """Has it been without progress for more than so many limits?"""
        return self.limit is not None and self.seconds > limits * self.limit


class HangAction(Enum):
    """What follows from the states of all ranks."""

    NOTHING = "nothing"
    WARN = "warn"
    END = "end"


class Decision(NamedTuple):
    """The action, and the ranks that a warning is about or that hang."""

    action: HangAction
    ranks: tuple[int, ...] = ()


def decide(states: Mapping[int, RankState], world_size: int) -> Decision:
    """What follows from the states of the connected ranks, one of which is beyond its limit.

    A run of one rank keeps nobody waiting: it is warned about. Of several, a rank that others may
    wait for is warned about while it is within its limit or computes; without such a rank those
    that neither wait nor answer are a hang, at once. So is one that a signal has stopped. Where all
    wait, those hang that wait for something else than most.
    """
    if world_size == 1:
        late = tuple(rank for rank, state in states.items() if state.beyond())
        return Decision(HangAction.WARN if late else HangAction.NOTHING, late)
    busy = {rank: state for rank, state in states.items() if state.answers and state.waits is None}
    slow = tuple(
        rank
        for rank, state in busy.items()
        if not state.beyond(COMPUTES_LIMITS if state.computes else 1.0)
    )
    silent = {rank: state for rank, state in states.items() if not state.answers}
    stopped = any(state.stopped for state in silent.values())
    if slow and not stopped:
        return Decision(HangAction.WARN, slow)
    hung = [
        rank
        for rank, state in silent.items()
        if state.stopped or state.beyond() and not state.computes
    ]
    hung += busy.keys() - set(slow)
    if hung:
        return Decision(HangAction.END, tuple(sorted(hung)))
    if silent or not all(state.beyond(ALL_WAIT_LIMITS) for state in states.values()):
        return Decision(HangAction.NOTHING)
    waits = [state.waits for state in states.values()]
    usual = max(waits, key=waits.count)
    odd = tuple(rank for rank, state in states.items() if state.waits != usual)
    return Decision(HangAction.END, odd or tuple(states))
