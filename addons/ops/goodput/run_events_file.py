"""Reads run_events.jsonl, which a run writes in its --save directory; no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.small_files import open_regular, read_text

NAME = "run_events.jsonl"
TAIL = (
    1 << 22
)  # bytes: a start reads the newest attempts only, as many as some hours of training write
_NUMBERS = {  # what an event holds besides its time
    "start": ("process_start", "iteration"),
    "steps": ("first", "last", "seconds"),
    "stall": ("iteration", "seconds", "usual"),
    "save": ("seconds",),
    "evaluation": ("seconds",),
    "rollback": ("iteration",),
    "failure": ("iteration", "rank", "code"),
    "end": (),
}
_TEXTS = {"start": ("starter",), "failure": ("host", "reason")}
_LARGEST = 1e15
UNKNOWN = -1  # rank


def read_events(path: Path) -> list[dict[str, Any]]:
    """The events of a file, the oldest first. Raises OSError."""
    return parse_events(read_text(path, errors="replace"))


def newest_events(path: Path) -> list[dict[str, Any]]:
    """The events in the last TAIL bytes of a file. Raises OSError."""
    with open_regular(path) as file:
        file.seek(max(0, file.seek(0, 2) - TAIL))
        return parse_events(file.read(TAIL).decode(errors="replace"))


def parse_events(text: str) -> list[dict[str, Any]]:
    """The events of a text; incomplete lines are omitted, as are events without their values."""
    events = []
    for line in text.splitlines():
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue  # a process was killed while it wrote
        if isinstance(event, dict) and _is_event(event):
            events.append(event)
    return events


def _is_event(event: Mapping[str, Any]) -> bool:
    name = event.get("event")
    if not isinstance(name, str) or name not in _NUMBERS:
        return False
    numbers: list[Any] = [event.get(key) for key in ("time", *_NUMBERS[name])]
    texts = [event.get(key) for key in _TEXTS.get(name, ())]
    return (
        all(type(value) in (int, float) and abs(value) <= _LARGEST for value in numbers)
        and all(isinstance(value, str) for value in texts)
        and event.get("seconds", 0) >= 0
        and (name != "stall" or event["seconds"] >= event["usual"] >= 0)
        and (name != "steps" or event["first"] <= event["last"])
    )


def attempts_of(events: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """The events of each attempt: a list begins with a start."""
    attempts: list[list[Mapping[str, Any]]] = []
    for event in events:
        if event["event"] == "start":
            attempts.append([])
        if attempts:
            attempts[-1].append(event)
    return attempts


def failure_of(attempt: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Why an attempt failed: the last of its failures, for an error is written after the death that
    it may have caused; None where none is written."""
    return next((event for event in reversed(attempt) if event["event"] == "failure"), None)


def unreported(events: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The failure of the newest attempt, if neither an end nor a failure is written: all of its
    processes were killed. It has the time of the last event. None otherwise."""
    newest = attempts_of(events)[-1:]
    if not newest or {"end", "failure"} & {event["event"] for event in newest[0]}:
        return None
    start = newest[0][0]
    done = [event["last"] for event in newest[0] if event["event"] == "steps"]
    return {
        "event": "failure",
        "time": newest[0][-1]["time"],
        "iteration": max(done, default=start["iteration"]) + 1,
        "rank": 0 if start.get("ranks") == 1 else UNKNOWN,
        "host": str(start.get("host", "")),
        "pid": start.get("pid", 0),
        "code": 1,
        "silent": True,
        "recovered": True,
        "reason": "terminated without reporting an error: killed (a signal, out of memory), or its "
        "machine was lost; found at the next start",
    }


def crash_loop(events: Sequence[Mapping[str, Any]], starter: str, limit: int) -> str | None:
    """Why starting again is useless: the newest `limit` attempts, all started by `starter` (its
    automatic restarts), failed in the same iteration on the same rank. None otherwise."""
    newest = attempts_of(events)[-limit:]
    # without the cause and the iteration, nobody knows whether it would come again
    failures = [failure_of(attempt) or {} for attempt in newest]
    failures = [{} if failure.get("recovered") else failure for failure in failures]
    kinds = {(failure.get("iteration"), failure.get("rank")) for failure in failures}
    if (
        not 0 < limit == len(newest)
        or len(kinds) > 1
        or not all(failures)
        or any(attempt[0].get("starter") != starter for attempt in newest)
    ):
        return None
    last = failures[-1]
    return (
        f"{limit} attempts in a row failed in iteration {last['iteration']} on rank "
        f"{last['rank']} ({last['host']}): {last['reason']}. Remove the cause, then start the run "
        "yourself; --crash-loop-limit 0 restarts without end [crash-loop]"
    )
