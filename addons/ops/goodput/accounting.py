"""Where the time of a run went: from its run_events.jsonl to spans of time and their sums."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import mean
from typing import Any

from .run_events_file import (
    NAME,
    attempts_of,
    failure_of,
    read_events,
)

Event = Mapping[str, Any]
INTERRUPTED = 130  # exit code of Ctrl-C, which is no failure
# In the order of the table. `other`: log, data sets, hooks, what the file does not cover.
KINDS = {
    "productive": "training steps that were kept",
    "recomputed": "training steps that were lost and repeated",
    "stalled": "iterations of more than 3 times the usual time, without the usual time",
    "evaluation": "validation",
    "save": "training stopped for a checkpoint",
    "start-up": "from the start of a process to its first iteration",
    "detection": "from the last sign of progress to a failure",
    "restart": "from a failure to the start by the same launcher",
    "waiting": "between attempts otherwise (queue, no automatic restart)",
    "other": "the rest: data, log, hooks",
}


@dataclass(frozen=True)
class Span:
    """From `start` to `end`, in seconds since 1970, a run did something of KINDS."""

    kind: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end - self.start


@dataclass(frozen=True)
class Goodput:
    """What became of the time of a run. `saves` are the seconds for which each save stopped the
    training, `step_seconds` the mean of an iteration (None without any)."""

    name: str
    spans: tuple[Span, ...]
    attempts: int
    failures: int
    saves: tuple[float, ...]
    iterations: int
    step_seconds: float | None

    @property
    def seconds(self) -> float:
        """From the first start to the last event."""
        return self.spans[-1].end - self.spans[0].start if self.spans else 0.0

    def of(self, kind: str) -> float:
        """Seconds of one kind."""
        return sum(span.seconds for span in self.spans if span.kind == kind)

    @property
    def share(self) -> float:
        """Effective share: productive seconds of all seconds."""
        return self.of("productive") / self.seconds if self.seconds else 0.0

    @property
    def seconds_between_failures(self) -> float | None:
        """Mean time between failures, without waiting; None without a failure."""
        return (self.seconds - self.of("waiting")) / self.failures if self.failures else None

    @property
    def best_interval(self) -> int | None:
        """Iterations between saves that lose least time (Young and Daly: the square root of 2 x
        cost of a save x time between failures); None where one of these is not known."""
        between = self.seconds_between_failures
        if between is None or not self.saves or not self.step_seconds:
            return None
        return max(1, round(math.sqrt(2.0 * mean(self.saves) * between) / self.step_seconds))


def read_goodput(path: str) -> Goodput:
    """Of a --save directory or its run_events.jsonl. Raises ValueError."""
    return account(path, _attempts(path))


def failure_lines(path: str) -> list[str]:
    """Of each attempt that failed: time, iteration, rank, host, exit code and reason, separated by
    tabs. Raises ValueError as `read_goodput`."""
    failures = [failure for events in _attempts(path) if (failure := failure_of(events))]
    return [
        "\t".join(
            [
                _time(failure["time"]),
                *(str(failure[key]) for key in ("iteration", "rank")),
                *(" ".join(str(failure[key]).split()) for key in ("host", "code", "reason")),
            ]
        )
        for failure in failures
    ]


def _time(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds).isoformat(" ", "seconds")
    except (ValueError, OverflowError, OSError):  # of a damaged file
        return "unknown"


def _attempts(path: str) -> list[list[Event]]:
    file = Path(path)
    file = file / NAME if file.is_dir() else file
    try:
        attempts = attempts_of(read_events(file))
    except OSError as error:
        raise ValueError(
            f"{file}: cannot be read ({error.strerror or error}); give the --save directory "
            "of a run with --run-events [file-not-readable]"
        ) from None
    if not attempts:
        raise ValueError(f"{file}: no run has started here; give a --save directory")
    return attempts


def account(name: str, attempts: Sequence[Sequence[Event]]) -> Goodput:
    """The spans of all attempts, without gaps."""
    spans: list[Span] = []
    steps: list[Event] = []
    failures = 0
    for number, events in enumerate(attempts):
        events = _after(events, spans[-1].end if spans else -math.inf)
        start = events[0]
        if spans:
            before = attempts[number - 1]
            restarted = bool(start.get("starter")) and before[0].get("starter") == start["starter"]
            _add(spans, "restart" if restarted else "waiting", start["process_start"])
        resumes_at = [later[0]["iteration"] for later in attempts[number + 1 :]]
        spans += _of_attempt(events, min(resumes_at, default=None), spans)
        steps += [event for event in events if event["event"] == "steps"]
        failure = failure_of(events)
        stopped = any(event["event"] == "end" for event in events)
        killed = failure is None and not stopped and number + 1 < len(attempts)
        failures += killed or failure is not None and failure["code"] != INTERRUPTED
    trained = sum(event["last"] - event["first"] + 1 for event in steps)
    return Goodput(
        name,
        tuple(spans),
        len(attempts),
        failures,
        tuple(
            event["seconds"] for events in attempts for event in events if event["event"] == "save"
        ),
        max((event["last"] for event in steps), default=attempts[-1][0]["iteration"]),
        sum(event["seconds"] for event in steps) / trained if trained else None,
    )


def _after(events: Sequence[Event], end: float) -> Sequence[Event]:
    """The events of an attempt, later where it began before `end`: the clock was set back."""
    begun = events[0]["process_start"]
    if begun >= end:
        return events
    moved = [{**event, "time": event["time"] + end - begun} for event in events]
    return [{**moved[0], "process_start": end}, *moved[1:]]


def _of_attempt(
    events: Sequence[Event], resumed_at: int | None, before: Sequence[Span]
) -> list[Span]:
    """The spans of an attempt; a later one resumed at `resumed_at`, None if there is none."""
    first = events[0]
    begins = first["process_start"]
    spans: list[Span] = [Span("start-up", begins, max(begins, first["time"]))]
    for number, event in enumerate(events[1:], 1):
        kind = event["event"]
        if kind == "steps":
            later = [
                following["iteration"]
                for following in events[number:]
                if following["event"] == "rollback"
            ]
            last_kept = min([event["last"], *later, *([] if resumed_at is None else [resumed_at])])
            share = (last_kept + 1 - event["first"]) / (event["last"] + 1 - event["first"])
            begin = event["time"] - event["seconds"]
            _add(spans, "other", begin)
            _add(spans, "productive", begin + event["seconds"] * min(1.0, max(0.0, share)))
            _add(spans, "recomputed", event["time"])
        elif kind == "stall":  # the usual time is in the steps that follow
            _add(spans, "other", event["time"] - event["seconds"])
            _add(spans, "stalled", event["time"] - event["usual"])
        elif kind in ("save", "evaluation"):
            _add(spans, "other", event["time"] - event["seconds"])
            _add(spans, kind, event["time"])
        else:
            _add(spans, "detection" if kind == "failure" else "other", event["time"])
    return spans


def _add(spans: list[Span], kind: str, until: float) -> None:
    """What was done from the end of the last span `until` a time; clocks may have jumped."""
    if until > spans[-1].end:
        spans.append(Span(kind, spans[-1].end, until))


def table(run: Goodput) -> list[str]:
    """Lines that say where the time went, and which --save-interval would lose least."""
    lines = [
        f"{run.name}: {_count(run.iterations, 'iteration')}, {_count(run.attempts, 'start')}, "
        f"{_count(run.failures, 'failure')}, "
        f"{run.seconds:.1f} s",
    ]
    for kind, meaning in KINDS.items():
        seconds = run.of(kind)
        if seconds:
            lines.append(f"  {kind:<11}{seconds:>10.1f} s {seconds / run.seconds:>6.1%}  {meaning}")
    lines.append(f"effective share: {run.share:.1%}")
    between = run.seconds_between_failures
    if between is None:
        lines.append("no failure: the checkpoint interval cannot be judged")
    elif run.best_interval is None:
        lines.append(f"mean time between failures: {between:.0f} s")
    else:
        lines.append(
            f"mean time between failures: {between:.0f} s; a save stops training for "
            f"{mean(run.saves):.2f} s; least time is lost with --save-interval {run.best_interval} "
            "(Young and Daly)"
        )
    return lines


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
