"""--run-events: what happened to a run, for tools/goodput.py; --crash-loop-limit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.arguments import arg
from megatron.training.feature import Feature, Loop

if TYPE_CHECKING:
    from megatron.training.hook import Hook


@dataclass(frozen=True)
class GoodputConfig(Feature):
    """Lost time and crash loops."""

    run_events: bool = arg(False, requires="save", per_run=True)
    """with --save: append starts, iterations, stalls, saves and failures of all attempts to
    run_events.jsonl there, for tools/goodput.py"""

    crash_loop_limit: int = arg(3, minimum=0, needs="run_events")
    """with --run-events: a restart by torchrun (--max-restarts) or SLURM is an error after this
    many attempts in a row that failed in the same iteration on the same rank (0: never)"""

    def hooks(self, loop: Loop) -> Iterator[Hook]:
        """Events, and their sums as points."""
        if not self.run_events:
            return
        from .run_events import RunEvents

        yield RunEvents(loop.run, loop.started, self.crash_loop_limit)
        if any(writer.takes_points for writer in loop.lines.writers):
            from .points import GoodputPoints

            yield GoodputPoints(loop.run, loop.lines)
