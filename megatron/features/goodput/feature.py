"""What happened to a run with --save, for tools/goodput.py; --crash-loop-limit."""

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

    crash_loop_limit: int = arg(
        3,
        minimum=0,
        dump=False,
        help="with --save: a restart by torchrun (--max-restarts) or SLURM is an error after this "
        "many attempts in a row that failed in the same iteration on the same rank (0: never)",
    )

    def hooks(self, loop: Loop) -> Iterator[Hook]:
        """Events of a run that saves, and their sums as points."""
        if not loop.run.config.checkpoint.save:
            return
        from megatron.features.goodput.run_events import RunEvents

        yield RunEvents(loop.run, loop.started, self.crash_loop_limit)
        if any(writer.takes_points for writer in loop.lines.writers):
            from megatron.features.goodput.points import GoodputPoints

            yield GoodputPoints(loop.run, loop.lines)
