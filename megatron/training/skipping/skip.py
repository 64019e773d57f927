"""Iterations that are skipped: samples are consumed unread, the schedule advances, nothing else
changes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from megatron import log, optional
from megatron.config import skip_ranges
from megatron.config.plan.plan import Plan
from megatron.config.tree import Config
from megatron.parallel.collectives import gather_objects
from megatron.training.hook import Hook
from megatron.training.launch.initialize import Runtime
from megatron.training.logging.iteration import IterationResult
from megatron.training.run import Run

if TYPE_CHECKING:
    from megatron.training.skipping.skip_plan import Skips


def resolve_skips(config: Config, plan: Plan, runtime: Runtime) -> tuple[Plan, Skips | None]:
    """See `skip_plan.resolve_skips`; None where nothing can be skipped: no flag, nothing to load,
    no records of an earlier run in --save."""
    c = config.checkpoint
    records = os.path.join(c.save or "", skip_ranges.FILE_NAME)
    there = runtime.rank == 0 and bool(c.save) and os.path.exists(records)
    if not (
        plan.skips.ranges
        or config.training.forget_skip
        or c.load
        or gather_objects(there, runtime.ctx.world)[0]
    ):
        return plan, None
    skip_plan = optional.load("megatron.training.skipping.skip_plan")
    return skip_plan.resolve_skips(config, plan, runtime)


def start_skips(run: Run, skips: Skips | None) -> None:
    """See `skip_plan.start_skips`."""
    if skips:
        optional.load("megatron.training.skipping.skip_plan").start_skips(run, skips)


class Skipping(Hook):
    """Advances a run over the iterations that it skips."""

    def __init__(self, run: Run):
        self._run = run
        self._announced = 0  # the last iteration of the range that was announced last

    def skip(self, first: int, last: int) -> IterationResult:
        """Advance the run over iterations `first` to `last`, which are in one skipped range; needs
        no agreement of the ranks."""
        run = self._run
        plan = run.plan
        progress = run.progress
        samples = plan.consumed_samples(last) - plan.consumed_samples(first - 1)
        progress.iteration = last
        progress.consumed_train_samples += samples
        progress.skipped_train_samples += samples
        reason = run.progress.skip_history.reason(first)
        run.progress.skip_history.note(first, last)
        run.scheduler.after_iteration(plan.scheduled_samples(first, last))
        return IterationResult(
            last,
            plan.global_batch_size(last),
            progress.consumed_train_samples,
            run.optimizer.param_groups[0]["lr"],
            run.optimizer.loss_scale,
            0.0,
            skipped="user",
            iterations=last - first + 1,
            reason=reason,
            skipped_iterations_total=run.progress.skip_history.total,
            skipped_samples=progress.skipped_train_samples,
        )

    def announce(self, first: int, last: int) -> None:
        """Print once that a range is skipped: from `first`, where the run reaches it, to its end
        `last`."""
        run = self._run
        if last == self._announced:
            return
        self._announced = last
        reason = run.progress.skip_history.reason(first)
        samples = run.plan.consumed_samples(last) - run.plan.consumed_samples(first - 1)
        why = "" if reason == "user" else f" ({reason})"
        where = f"iteration {first}" if first == last else f"iterations {first} to {last}"
        log.print_rank_0(
            f"skipping {where}{why}: {samples} samples "
            f"({samples * run.config.model.seq_length} tokens)"
        )

    def on_rollback(self) -> None:
        """Skipped ranges are announced again."""
        self._announced = 0
