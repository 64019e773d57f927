"""Iterations that are skipped: samples are consumed unread, the schedule advances, nothing else
changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from megatron import log
from megatron.config.skip_ranges import SkipRanges, may_skip
from megatron.training.hook import Hook
from megatron.training.launch.process import Refusal
from megatron.training.result import IterationResult
from megatron.training.run import Run

if TYPE_CHECKING:
    from megatron.checkpoint.skip_log import SkipRecord, Skips

WRONG_FLAGS = 2  # the exit code


def read_skips(run: Run) -> Skips | None:
    """What flags, `skips.jsonl` and the checkpoint that was loaded say of iterations to skip; None
    where there is nothing of these. All ranks call this. Raises Refusal for ranges that are not
    possible, CheckpointError for a file that cannot be read."""
    p = run.progress
    c = run.config.checkpoint
    if run.config.training.skip_train or not run.of_rank_0(lambda: may_skip(c, run.plan.skips)):
        return None
    from megatron.checkpoint.skip_log import Position, Skips

    here = Position.of(p.iteration, p.consumed_train_samples, p.skipped)
    typed = run.plan.skips
    skips = run.of_rank_0(lambda: Skips.read(c, typed, here, p.saved_skips))
    if problems := skips.problems(run.plan):
        raise Refusal("\nerror: ".join(problems), WRONG_FLAGS)
    return skips


def resolve_skips(run: Run, skips: Skips | None) -> None:
    """Skip the union of all that `skips` has from now on, and record what is new. Raises
    CheckpointError for a file that cannot be written."""
    if skips is None:
        return
    for text in skips.listed():
        log.print_rank_0(text)
    records = list(skips.records)
    if new := skips.new():
        records.append(new_record(run, new, "user", "command line", skips.read_at))
    write_records(run, records)
    run.progress.skip_records = records
    run.plan = replace(run.plan, skips=skips.all().cut(run.plan.train_iters))


def new_record(run: Run, iterations: SkipRanges, reason: str, source: str, time: str) -> SkipRecord:
    """The record of these iterations; the same on all ranks."""
    from megatron.checkpoint.skip_log import SkipRecord, spelled

    plan = run.plan
    shift = run.progress.consumed_train_samples - plan.consumed_samples(run.progress.iteration)
    return SkipRecord(
        spelled(iterations),
        s0=plan.consumed_samples(iterations.ranges[0][0] - 1) + shift,
        s1=plan.consumed_samples(iterations.ranges[-1][1]) + shift,
        tokens=plan.batch.samples_in(iterations) * run.config.model.seq_length,
        reason=reason,
        source=source,
        time=time,
    )


def write_records(run: Run, records: Sequence[SkipRecord]) -> None:
    """Have records in `<save>/skips.jsonl` (nothing without --save)."""
    from megatron.checkpoint import skip_log

    save = run.config.checkpoint.save
    run.of_rank_0(lambda: skip_log.record(save, records, run.services.fence) if save else None)


class Skipping(Hook):
    """Advances a run over the iterations that it skips."""

    def __init__(self, run: Run):
        self._run = run
        self._announced = 0  # the last iteration of the range that was announced last

    def skip(self, first: int, last: int, end: int) -> IterationResult:
        """Advance the run over iterations `first` to `last`, which are in one skipped range that
        ends at `end`; needs no agreement of the ranks. Each range is announced once."""
        run = self._run
        reason = next(
            (
                record.reason
                for record in run.progress.skip_records
                if record.reason != "user" and record.iterations.is_skipped(first)
            ),
            "user",
        )
        if end != self._announced:
            self._announced = end
            samples = run.plan.consumed_samples(end) - run.plan.consumed_samples(first - 1)
            why = "" if reason == "user" else f" ({reason})"
            iterations = f"iteration {first}" if first == end else f"iterations {first} to {end}"
            log.print_rank_0(
                f"skipping {iterations}{why}: {samples} samples "
                f"({samples * run.config.model.seq_length} tokens)"
            )
        return run.advance(
            IterationResult(
                iteration=last,
                iterations=last - first + 1,
                global_batch_size=run.plan.global_batch_size(last),
                seconds=0.0,
                skipped="user",
                reason=reason,
            )
        )

    def on_rollback(self) -> None:
        """Skipped ranges are announced again."""
        self._announced = 0
