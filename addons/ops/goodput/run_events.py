"""What happened to a run, for tools/goodput.py: run_events.jsonl in --save, one JSON object per
start, second of training, stall, evaluation, save, rollback and failure. It also ends a crash
loop."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any

from megatron import cluster
from megatron.small_files import path_inside
from megatron.training.checkpointing.save import save_directory
from megatron.training.hook import Hook
from megatron.training.launch.process import Failure, this_process
from megatron.training.logging.output import OutputFile
from megatron.training.result import IterationResult, Requests
from megatron.training.run import Run

from .run_events_file import NAME, crash_loop, newest_events, unreported

STEPS_EVERY = 1.0  # seconds between two lines about iterations
LONGEST_REASON = 2000  # characters
# An iteration is a stall if it takes that many times the median of the latest ones, of which a few
# are known, and at least one second.
STALL_FACTOR = 3.0
STALL_SECONDS = 1.0
FEWEST_KNOWN = 8


class RunEvents(Hook):
    """Rank 0 writes the file; where it died, rank 1 writes that. Saves are timed from
    `before_save` on."""

    before = ("Skipping",)
    after = ("IterationLog",)

    def __init__(self, run: Run, started: float, crash_loop_limit: int):
        """`started`: when this process started. Raises ValueError in a crash loop."""
        self._run = run
        self._started = started
        # the clock may be set while the run trains
        self._clock = time.time() - time.monotonic()
        self._path = path_inside(save_directory(run.config.checkpoint), NAME)
        self._file: OutputFile | None = None
        self._first: int | None = None  # of the iterations that are not written yet
        self._seconds = 0.0
        self._latest: deque[float] = deque(maxlen=64)  # seconds of iterations
        self._written_at = 0.0
        self._under_way: tuple[str, float] | None = None  # evaluation or save
        self._failure: Failure | None = None  # that was written
        self._unreported: dict[str, Any] | None = None  # failure of the attempt before
        run.services.signals.on_failure = self.failed
        starter = cluster.starter()
        before = []
        if run.runtime.rank == 0:
            # also not where it cannot be read now: a log ends no run
            with contextlib.suppress(OSError):
                before = newest_events(self._path)
        if before:
            self._unreported = unreported(before)
            problem = crash_loop(before, starter, crash_loop_limit) if starter else None
            if problem:
                run.services.signals.on_failure = lambda failure: None
                raise ValueError(problem)

    def on_start(self) -> None:
        process = this_process()
        if self._unreported:
            self._append_line(self._unreported, own_line=True)
        self._write(
            "start",
            process_start=self._started,
            iteration=self._run.progress.iteration,
            ranks=self._run.runtime.world_size,
            host=process.host,
            pid=process.pid,
            starter=cluster.starter(),
        )

    def after_step(self, result: IterationResult) -> None:
        seconds = result.seconds
        if seconds >= STALL_SECONDS and len(self._latest) >= FEWEST_KNOWN:
            usual = median(self._latest)
            if seconds > STALL_FACTOR * usual:
                self._write_steps(result.iteration - 1)
                self._write("stall", iteration=result.iteration, seconds=seconds, usual=usual)
                seconds = usual
        self._latest.append(result.seconds)  # so that a run that stays slow is soon as usual
        self._first = self._first or result.iteration
        self._seconds += seconds
        if self._now() - self._written_at >= STEPS_EVERY:
            self._write_steps(result.iteration)

    def on_rollback(self) -> None:
        self._first = None
        self._write("rollback", iteration=self._run.progress.iteration)

    def before_evaluation(self) -> None:
        self._begin("evaluation")

    def before_save(self) -> None:
        self._begin("save")

    def after_save(self, iteration: int) -> None:
        self._end()

    def after_iteration(self, iteration: int, requests: Requests) -> None:
        self._end()

    def on_end(self) -> None:
        self._end()
        self._write_steps(self._run.progress.iteration)
        self._write("end", iteration=self._run.progress.iteration)

    def failed(self, failure: Failure) -> None:
        """The run ends by an error of the rank `failure.process`; called on every rank that still
        can, perhaps twice. An error counts more than a death, which may have followed from it."""
        rank = self._run.runtime.rank
        many = self._run.runtime.world_size > 1
        writer = 1 if failure.process.rank == 0 and failure.silent and many else 0
        known = self._failure
        if rank != writer or known and (failure.silent or not known.silent):
            return
        self._failure = failure
        if rank == 0:
            self._write_steps(self._run.progress.iteration)
        process = failure.process
        self._append(
            "failure",
            iteration=self._run.progress.iteration + 1,
            rank=process.rank,
            host=process.host,
            pid=process.pid,
            code=failure.code,
            silent=failure.silent,
            reason=failure.text.strip()[:LONGEST_REASON],
        )

    def _now(self) -> float:
        """Seconds since 1970, by the clock as it was when this process started."""
        return time.monotonic() + self._clock

    def _begin(self, name: str) -> None:
        self._end()
        self._write_steps(self._run.progress.iteration)
        self._under_way = (name, self._now())

    def _end(self) -> None:
        if self._under_way:
            name, since = self._under_way
            self._under_way = None
            self._write(name, iteration=self._run.progress.iteration, seconds=self._now() - since)

    def _write_steps(self, last: int) -> None:
        if self._first is not None:
            self._write("steps", first=self._first, last=last, seconds=self._seconds)
        self._first = None
        self._seconds = 0.0

    def _write(self, event: str, **content: Any) -> None:
        if self._run.runtime.rank == 0:
            self._append(event, **content)

    def _append(self, event: str, **content: Any) -> None:
        self._written_at = self._now()
        line = {"event": event, "time": self._written_at, **content}
        self._append_line(line, event == "start" and os.path.exists(self._path))

    def _append_line(self, content: Mapping[str, Any], own_line: bool) -> None:
        """A line in one write; `own_line`: the process before may have been killed while it
        wrote."""
        if self._file is None:
            self._file = OutputFile(str(self._path), "--save")
        self._file.write(f"{chr(10) * own_line}{json.dumps(content)}\n")
