"""One size in one dtype: every contestant in its processes, in turns, and what their times
give.

Each contestant has a process for each thread setting; on a CPU all but one are stopped while that
one has its turn. On another device, whose memory a stopped process keeps, one has all its turns and
ends before the next one starts. Depends on processes.py; prints nothing.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from processes import ROOT, Worker, make_job
from settings import DEFAULT, environment_of
from sizes import Size

from tools.shared.memory import free_memory

OURS = "ours"
CEILING = "ceiling"
TOLERANCE = {"fp32": 1e-5, "bf16": 5e-3}  # of losses in the warm-up steps, relative
CEILING_ROUNDS = 3
SETTING_ROUNDS = 3  # after which a contestant keeps its default and its best setting
TURN_SECONDS = 0.5
MOST_STEPS = 100  # of one turn
MEMORY_MARGIN = 1.25


class Disagreement(ValueError):
    """Two contestants do not train the same model."""


@dataclass(frozen=True)
class Contestant:
    """Who takes part. `kind` as in worker.py; `tree`: the checkout of this repository whose modules
    it is built from."""

    name: str
    kind: str
    compiled: bool = False
    tree: Path = ROOT


@dataclass
class Series:
    """The turns of one contestant with one thread setting. `seconds`: of a step, the median of each
    turn."""

    contestant: str
    setting: str
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)  # of the warm-up steps
    steps_per_turn: int = 1  # timed ones
    compile_seconds: float | None = None
    peak_bytes: int | None = None
    parts: list[tuple[float, float]] = field(
        default_factory=list
    )  # the ceiling's: GEMMs, attention

    @property
    def median(self) -> float:
        """Seconds of a step, the median over the turns."""
        return statistics.median(self.seconds)


@dataclass
class Race:
    """What one size in one dtype gave."""

    size: Size
    dtype: str
    parameters: int = 0
    flops_per_step: int = 0
    ceiling_dtype: str = ""
    series: list[Series] = field(default_factory=list)
    profile: dict[str, float] | None = None  # seconds by kind of work

    @property
    def contestants(self) -> list[str]:
        """Those that ran, in the order of the table."""
        return list(
            dict.fromkeys(one.contestant for one in self.series if one.contestant != CEILING)
        )

    def default(self, name: str) -> Series:
        """The contestant's turns with its own defaults."""
        return next(one for one in self.series if (one.contestant, one.setting) == (name, DEFAULT))

    def best(self, name: str) -> Series:
        """Its turns with the setting that is fastest, of those that ran in every round."""
        mine = [one for one in self.series if one.contestant == name]
        rounds = max(len(one.seconds) for one in mine)
        return min((one for one in mine if len(one.seconds) == rounds), key=lambda one: one.median)

    def ceiling(self) -> tuple[float, float] | None:
        """Seconds of all GEMMs and of all attention of a step at their fastest, with whichever
        setting."""
        parts = [pair for one in self.series if one.contestant == CEILING for pair in one.parts]
        return min(parts, key=sum) if parts else None

    def ratio(self, other: str, mine: str) -> tuple[float, float] | None:
        """How many times as fast as `other` is `mine`: each at its best setting, and both with
        their defaults."""
        if not {other, mine} <= set(self.contestants):
            return None
        best = ratio(self.best(other), self.best(mine))
        return best, ratio(self.default(other), self.default(mine))


def ratio(other: Series, mine: Series) -> float:
    """How many times as fast as `other` is `mine`: the median over the rounds that both ran, of the
    same round."""
    return statistics.median(a / b for a, b in zip(other.seconds, mine.seconds, strict=False))


def steps_of_turn(step_seconds: float) -> int:
    """How many steps of a turn are timed, for a step of that many seconds."""
    return max(1, min(MOST_STEPS, round(TURN_SECONDS / step_seconds)))


def turns_of_round(count: int, done: int) -> list[int]:
    """The order of so many in the round after `done` ones: it moves on by one every round."""
    return [(done + position) % count for position in range(count)]


def check_losses(name: str, losses: Sequence[float], expected: Sequence[float], dtype: str) -> None:
    """Raise Disagreement at the first step whose loss is not ours."""
    for step, (loss, right) in enumerate(zip(losses, expected, strict=True), 1):
        if not abs(loss - right) <= TOLERANCE[dtype] * abs(right):
            raise Disagreement(
                f"step {step}: the loss of {name} is {loss:.6f}, ours is {right:.6f}: they do not "
                f"train the same model, so their times say nothing"
            )


@dataclass
class Plan:
    """How to run a race: see the options of train_step.py."""

    contestants: Sequence[Contestant]
    settings: Sequence[str]
    rounds: int
    warmup: int
    environment: Mapping[str, str]
    device: str
    folder: Path  # of temporary files
    ceiling: bool = False
    # of the contestants that are not this suite, with their defaults only
    slow_rounds: int | None = None
    profile: bool = False
    busy: int = 0
    threads: int | None = None
    clock: str = "wall"


class Entry:
    """One contestant with one thread setting, and its process while it has one."""

    def __init__(self, race: RunningRace, contestant: Contestant, setting: str, rounds: int):
        self.race = race
        self.contestant = contestant
        self.rounds = rounds
        self.series = Series(contestant.name, setting)
        self.worker: Worker | None = None

    @property
    def label(self) -> str:
        """Its name in messages."""
        return f"{self.contestant.name} ({self.series.setting})"

    def start(self) -> None:
        """Start its process; build and warm up, compare the losses, then stop it."""
        race = self.race
        plan = race.plan
        size = race.result.size
        dtype = race.result.dtype
        race.tell(f"{self.label}: start and warm-up")
        job = make_job(
            self.contestant.kind,
            size,
            dtype=dtype,
            device=plan.device,
            tree=self.contestant.tree,
            compiled=self.contestant.compiled,
            flags=["--torch-compile"] if self.contestant.compiled else [],
            clock=plan.clock,
            start=str(race.start_file),
        )
        environment = environment_of(self.series.setting, plan.environment, plan.threads)
        # compiled code of a contestant is found by its other settings, and by no other contestant
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(plan.folder / self.contestant.name)
        self.worker = Worker(self.label, job, environment)
        facts = self.worker.receive()
        if self.contestant.kind == CEILING:
            race.result.ceiling_dtype = facts["dtype"]
        else:
            self._warm_up(facts)
        self.worker.pause()

    def _warm_up(self, facts: dict[str, Any]) -> None:
        race = self.race
        plan = race.plan
        result = race.result
        if self is race.entries[0]:
            result.parameters = facts["parameters"]
            result.flops_per_step = facts["flops_per_step"]
            if race.start_is_read and not race.start_file.exists():
                self.worker.ask("save_start", str(race.start_file), plan.warmup + 2 * plan.rounds)
        warm = self.worker.ask("warm_up", plan.warmup)
        expected = race.entries[0].series.losses or warm["losses"]
        check_losses(self.contestant.name, warm["losses"], expected, result.dtype)
        if (
            not self.series.losses
        ):  # else it is a second start, which finds its compiled code on the disk
            self.series.losses = warm["losses"]
            self.series.compile_seconds = warm["compile_seconds"]
            self.series.steps_per_turn = steps_of_turn(warm["step_seconds"])

    def turn(self) -> None:
        """Run one turn; everybody else is stopped."""
        if self.race.takes_turns:
            self.race.make_room(self)
        if self.worker is None:
            self.start()
        self.race.tell(f"round {len(self.series.seconds) + 1}: {self.label}")
        self.worker.resume()
        if self.contestant.kind == CEILING:
            parts = self.worker.ask("turn")
            self.series.parts.append(parts)
            self.series.seconds.append(sum(parts))
        else:
            # a process alone is warm
            uncounted = 1 if self.race.takes_turns and len(self.race.entries) > 1 else 0
            answer = self.worker.ask("turn", uncounted, self.series.steps_per_turn)
            self.series.seconds.append(answer["seconds"])
            self.series.peak_bytes = answer["peak_bytes"]
        self.worker.pause()
        self.race.note_turn(self)

    def profile(self) -> dict[str, float]:
        """Seconds by kind of work of a step of ours."""
        if self.worker is None:
            self.start()
        self.worker.resume()
        return self.worker.ask("profile")

    def end(self) -> None:
        """End its process."""
        if self.worker is not None:
            self.worker.end()
            self.worker = None


class RunningRace:
    """The entries of one race while it runs."""

    def __init__(self, plan: Plan, size: Size, dtype: str, tell: Callable[[str], None]):
        self.plan = plan
        self.tell = tell
        self.result = Race(size, dtype)
        self.start_file = plan.folder / f"{size.name}-{dtype}.pt"
        self._recent: list[Entry] = []  # that have processes, the last one to run at the end
        self._largest = 0  # bytes, of any process so far
        self.entries: list[Entry] = []
        for setting in plan.settings:
            for contestant in plan.contestants:
                rounds = plan.rounds
                if plan.slow_rounds is not None and contestant.kind != OURS:
                    rounds = plan.slow_rounds if setting == DEFAULT else 0
                if rounds:
                    self.entries.append(Entry(self, contestant, setting, rounds))
        if plan.ceiling:
            for setting in plan.settings:
                rounds = min(plan.rounds, CEILING_ROUNDS)
                self.entries.append(Entry(self, Contestant(CEILING, CEILING), setting, rounds))

    @property
    def takes_turns(self) -> bool:
        """Whether all have their processes at the same time."""
        return self.plan.device == "cpu"

    @property
    def start_is_read(self) -> bool:
        """Whether a contestant starts from our weights, which are copied for it."""
        return any(entry.contestant.kind not in (OURS, CEILING) for entry in self.entries)

    def make_room(self, entry: Entry) -> None:
        """End other processes while there is too little memory for a turn of this one.

        The one that ran last is ended first: its next turn is the furthest away, and starts it
        again.
        """
        have = entry.worker.resident_bytes() if entry.worker else 0
        for other in reversed(self._recent.copy()):
            if free_memory() >= MEMORY_MARGIN * self._largest - have:
                return
            if other is not entry:
                other.end()
                self._recent.remove(other)

    def note_turn(self, entry: Entry) -> None:
        """Note that it has a process, and how large this became."""
        self._recent = [other for other in self._recent if other is not entry] + [entry]
        self._largest = max(self._largest, entry.worker.peak_resident_bytes())

    def keep_best_settings(self) -> None:
        """End every contestant's entries but its defaults and its best setting."""
        for name in self.result.contestants:
            kept = (self.result.default(name), self.result.best(name))
            for entry in self.entries:
                if entry.contestant.name == name and not any(entry.series is one for one in kept):
                    entry.rounds = 0
                    entry.end()
                    self._recent = [other for other in self._recent if other is not entry]

    def run(self, deadline: float) -> None:
        """Run all rounds, or as many as the time allows."""
        with contextlib.ExitStack() as stack:
            if self.takes_turns:
                self._start_all()
            for number in range(self.plan.busy):
                busy = Worker(f"busy process {number + 1}", make_job("busy"), self.plan.environment)
                stack.callback(busy.end)
            (self._in_turns if self.takes_turns else self._one_by_one)(deadline)
        if self.takes_turns:
            self._profile(self.entries[0])

    def _start_all(self) -> None:
        for entry in self.entries:
            self.make_room(entry)
            entry.start()
            self.note_turn(entry)
            self.result.series.append(entry.series)

    def _in_turns(self, deadline: float) -> None:
        for done in range(self.plan.rounds):
            if done and time.monotonic() > deadline:
                break
            for index in turns_of_round(len(self.entries), done):
                if done < self.entries[index].rounds:
                    self.entries[index].turn()
            if done + 1 == SETTING_ROUNDS:
                self.keep_best_settings()

    def _one_by_one(self, deadline: float) -> None:
        """Each has an equal share of the time."""
        for number, entry in enumerate(self.entries):
            now = time.monotonic()
            end = now + (deadline - now) / (len(self.entries) - number)
            entry.start()
            self.result.series.append(entry.series)
            for done in range(entry.rounds):
                if done and time.monotonic() > end:
                    break
                entry.turn()
            if number == 0:
                self._profile(entry)
            entry.end()

    def _profile(self, entry: Entry) -> None:
        if self.plan.profile:
            self.tell("profile")
            self.result.profile = entry.profile()

    def end(self) -> None:
        """End all processes."""
        for entry in self.entries:
            entry.end()


def run_race(
    plan: Plan, size: Size, dtype: str, deadline: float, tell: Callable[[str], None]
) -> Race:
    """Run one race to its end. Raises Disagreement, and what processes.Worker raises."""
    race = RunningRace(plan, size, dtype, tell)
    try:
        race.run(deadline)
    finally:
        race.end()
    return race.result
