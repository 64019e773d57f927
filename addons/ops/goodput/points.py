"""Where the time of a run went, as points of the writers that take them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron.small_files import LIMIT, open_regular
from megatron.training.hook import Hook
from megatron.training.logging.training_log import TrainingLog
from megatron.training.run import Run

from .accounting import KINDS, account
from .run_events_file import NAME, attempts_of, parse_events


class EventsTail:
    """The events of a file that grows: what is new is read, and lines about iterations that follow
    one another are one event, so that a long run needs little memory."""

    def __init__(self, path: Path):
        self._path = path
        self._read = 0  # bytes
        self.events: list[Mapping[str, Any]] = []

    def update(self) -> None:
        """Read the lines that are complete by now. Raises OSError."""
        with open_regular(self._path) as file:
            file.seek(self._read)
            text = file.read(LIMIT)
        text = text[: text.rfind(b"\n") + 1]
        self._read += len(text)
        for event in parse_events(text.decode(errors="replace")):
            last: Mapping[str, Any] = self.events[-1] if self.events else {"event": None}
            steps = event["event"] == last["event"] == "steps"
            if steps and event["first"] == last["last"] + 1:
                seconds = last["seconds"] + event["seconds"]
                self.events[-1] = {**event, "first": last["first"], "seconds": seconds}
            else:
                self.events.append(event)


class GoodputPoints(Hook):
    """Writes the sums of all attempts after each checkpoint and at the end, as far as rank 0 has
    written them to run_events.jsonl; the last rank has the writers."""

    def __init__(self, run: Run, lines: TrainingLog):
        self._run = run
        self._lines = lines
        assert run.config.checkpoint.save is not None, "the events are next to checkpoints"
        self._tail = EventsTail(Path(run.config.checkpoint.save) / NAME)

    def after_save(self, iteration: int) -> None:
        self._write(iteration)

    def on_end(self) -> None:
        self._write(self._run.progress.iteration)

    def _write(self, iteration: int) -> None:
        writers = [writer for writer in self._lines.writers if writer.takes_points]
        if not writers:
            return
        try:
            self._tail.update()
        except OSError:  # rank 0 has begun none, or its directory is not this machine's
            return
        for writer in writers:
            writer.points(iteration, points(self._tail.events))


def points(events: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Values by tag; {} without an attempt."""
    attempts = attempts_of(list(events))
    if not attempts:
        return {}
    run = account("", attempts)
    seconds = {f"time/{kind.replace('-', '_')}_seconds": run.of(kind) for kind in KINDS}
    return {"time/effective_share": run.share, "time/failures": run.failures, **seconds}
