"""Which iterations a run skips: those of its flags and those recorded in `skips.jsonl`, the union.

Rank 0 reads and writes the file and judges; the result is sent to all ranks, so that they have one
list.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron import log
from megatron.checkpoint import retention, skip_log, store
from megatron.checkpoint.candidates import candidates
from megatron.checkpoint.filesystem import CheckpointError
from megatron.checkpoint.skip_log import SkipRecord
from megatron.checkpoint.state import RunState
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.plan.plan import Plan
from megatron.config.skip_flags import SHOWN, shorten
from megatron.config.skip_ranges import FILE_NAME, RANGE_FLAG, SkipRanges
from megatron.config.tree import Config
from megatron.parallel.collectives import gather_objects
from megatron.training.checkpointing.save import snapshot_directory
from megatron.training.launch.initialize import Runtime
from megatron.training.launch.signals import Refusal
from megatron.training.run import Run

WRONG_FLAGS = 2  # the exit code


@dataclass(frozen=True)
class Position:
    """Where a run continues: iterations done, samples consumed, and which of those iterations were
    omitted."""

    iteration: int = 0
    consumed: int = 0
    executed: Sequence[Sequence[int]] = ()

    @property
    def omitted(self) -> SkipRanges:
        """`executed`."""
        return SkipRanges().joined((first, last) for first, last in self.executed)


@dataclass(frozen=True)
class Skips:
    """The ranges `typed` and the `records` found, each with the file it is from. `saved`: lines
    in the file of --save; `checkpoints`: those of `load`."""

    typed: SkipRanges
    records: Sequence[tuple[str, SkipRecord]] = ()
    saved: frozenset[str] = frozenset()
    checkpoints: Sequence[int] = ()
    load: str = ""

    def all(self) -> SkipRanges:
        """What is skipped."""
        recorded = (span for _, record in self.records for span in record.iterations.ranges)
        return SkipRanges().joined(recorded).joined(self.typed.ranges)

    def new(self, position: Position) -> SkipRanges:
        """What is to be recorded: ranges of the flags that are neither recorded nor behind."""
        covered = replace(self, typed=position.omitted).all()
        return SkipRanges(
            (first, last)
            for first, last in self.typed.ranges
            if covered.count_in(first, last) < last - first + 1
        )

    def problems(self, plan: Plan, position: Position) -> list[str]:
        """Why a run cannot resume with these at a position."""
        executed = position.omitted
        typed = set(self.typed.ranges)
        wanted = [
            (span, f"{RANGE_FLAG} {span[0]} {span[1]}", "omit the range")
            for span in self.typed.ranges
        ]
        wanted += [
            (span, f"{source}: {span[0]}-{span[1]}", "remove it there")
            for source, record in self.records
            for span in record.iterations.ranges
            if span not in typed
        ]
        problems = []
        for (first, last), name, remedy in wanted:
            done = min(last, position.iteration)
            if executed.count_in(first, done) < done - first + 1:
                problems.append(
                    f"{name}: iterations of {first} to {done} have been trained already, the run "
                    f"resumes from iteration {position.iteration}; {self._earlier(first)}, or "
                    f"{remedy} [skip-already-trained]"
                )
        for source, record in self.records:
            if record.s1 > position.consumed and not _is_applicable(record, plan, position):
                problems.append(
                    f"{source}: {record.ranges[:80]} are samples {record.s0} to {record.s1 - 1}, "
                    "and others with these batch sizes; give those of before, or remove that line "
                    f"and give the ranges as they are now with {RANGE_FLAG} "
                    "[skip-record-not-applicable]"
                )
        nothing = self.all().nothing_to_train(position.iteration, plan.train_iters)
        if not problems and nothing and self.new(position):
            problems.append(
                f"{RANGE_FLAG}: nothing to train, iterations {position.iteration + 1} to "
                f"{plan.train_iters} are skipped; narrow the ranges [skip-leaves-nothing-to-train]"
            )
        return shorten(problems)

    def listed(self, position: Position) -> list[str]:
        """A line with the ranges to come and where they are from."""
        shown = [
            f"{_short(record.iterations)} ({record.reason}, {source})"
            for source, record in self.records
            if record.iterations.ranges[-1][1] > position.iteration
        ]
        if new := self.new(position):
            shown.append(f"{_short(new)} (user, command line, new)")
        return ["iterations to skip: " + ", ".join(shown)] if shown else []

    def _earlier(self, first: int) -> str:
        """The remedy: how to resume from before an iteration."""
        before = [number for number in self.checkpoints if number < first]
        if before:
            return f"give --ckpt-step {max(before)}, the newest checkpoint before them"
        return (
            f"{self.load or 'there'} has no checkpoint before them: start a new run without "
            "--load, into another --save"
        )


def _is_applicable(record: SkipRecord, plan: Plan, position: Position) -> bool:
    """Whether a record's iterations to come are still its samples."""
    shift = position.consumed - plan.consumed_samples(position.iteration)
    first = record.iterations.ranges[0][0]
    last = record.iterations.ranges[-1][1]
    begins = first <= position.iteration or record.s0 == plan.consumed_samples(first - 1) + shift
    return begins and record.s1 == plan.consumed_samples(last) + shift


def _short(iterations: SkipRanges) -> str:
    text = skip_log.spelled(SkipRanges(iterations.ranges[:SHOWN]))
    not_shown = len(iterations.ranges) - SHOWN
    return f"{text} and {not_shown} more" if not_shown > 0 else text


def resolve_skips(config: Config, plan: Plan, runtime: Runtime) -> tuple[Plan, Skips | None]:
    """What a run will skip, by flags, file and the checkpoint of --load; None where nothing can be
    skipped: no flag, nothing to load, no records of an earlier run in --save.

    Raises Refusal on all ranks for ranges that are not possible, CheckpointError for a file that
    cannot be read.
    """
    c = config.checkpoint
    recorded_before = runtime.rank == 0 and bool(c.save and os.path.exists(Path(c.save, FILE_NAME)))
    if config.training.skip_train or not (
        plan.skips.ranges or c.load or gather_objects(recorded_before, runtime.ctx.world)[0]
    ):
        return plan, None
    recorded = None
    failure = None
    if runtime.rank == 0:
        try:
            recorded = _recorded(c, plan.skips)
        except CheckpointError as error:
            failure = str(error), error.errno
    recorded, failure = gather_objects((recorded, failure), runtime.ctx.world)[0]
    if failure:
        raise CheckpointError(*failure)
    assert recorded is not None, "rank 0 has made it"
    skips, position = recorded
    _judge(skips, plan, position)
    for text in skips.listed(position):
        log.print_rank_0(text)
    return replace(plan, skips=skips.all().cut(plan.train_iters)), skips


def _judge(skips: Skips, plan: Plan, position: Position) -> None:
    if problems := skips.problems(plan, position):
        raise Refusal("\nerror: ".join(problems), WRONG_FLAGS)


def _recorded(c: CheckpointConfig, typed: SkipRanges) -> tuple[Skips, Position]:
    """What is on disk: the records of the directories of --load and --save (of a checkpoint alone:
    its copy of them), and where the run continues."""
    state = _expected(c)
    position = Position()
    root = None
    if c.load and not c.finetune:
        root = Path(c.load).parent if store.is_checkpoint(Path(c.load)) else Path(c.load)
    records: dict[SkipRecord, str] = {}
    saved: list[str] = []
    if state is not None:
        position = Position(state.iteration, state.consumed_train_samples, state.skipped_ranges())
        if root and not (root / FILE_NAME).exists():
            lines = [line for line in state.skips if isinstance(line, str)]
            records = dict.fromkeys(skip_log.parse(lines, "the checkpoint"), "the checkpoint")
    for directory in dict.fromkeys(str(Path(path)) for path in (root, c.save) if path):
        saved, torn = skip_log.read(directory)
        source = f"{directory}/{FILE_NAME}"
        if torn:
            log.print_rank_0(
                f"WARNING: {source}: its last line was cut off while it was written and does not "
                f"count: {torn[:80]!r}"
            )
        records |= dict.fromkeys(skip_log.parse(saved, source), source)
    return Skips(
        typed,
        [(source, record) for record, source in records.items()],
        frozenset(record.line() for record in skip_log.parse(saved, "") if c.save),
        store.iterations(root) if root else (),
        str(root or ""),
    ), position


def _expected(c: CheckpointConfig) -> RunState | None:
    """The state of the checkpoint that will be loaded, as far as is known before its tensors are
    read."""
    if not c.load or c.finetune:
        return None
    try:
        tries, _ = candidates(c.load, c.ckpt_step, retention.slots(snapshot_directory(c, c.load)))
    except CheckpointError:
        return None  # the load says why
    for candidate in tries:
        try:
            return candidate.open().state
        except CheckpointError:
            continue  # ... and of this one too
    return None


def start_skips(run: Run, skips: Skips | None) -> None:
    """After checkpoint and data are loaded: judge again, since it may be an older checkpoint than
    expected, and record what is new. Raises as `resolve_skips` and `record_skip` do."""
    if skips is None:
        return
    progress = run.progress
    position = Position(
        progress.iteration, progress.consumed_train_samples, progress.skip_history.executed
    )
    _judge(skips, run.plan, position)
    records = [record for _, record in skips.records]
    if new := skips.new(position):
        records.append(_new_record(run, new, "user", "command line"))
    progress.skip_history.records = gather_objects(records, run.runtime.ctx.world)[0]
    lines = [record.line() for record in progress.skip_history.records]
    _append(run, [line for line in lines if line not in skips.saved])


def _new_record(run: Run, iterations: SkipRanges, reason: str, source: str) -> SkipRecord:
    """The record of these iterations, as of now."""
    plan = run.plan
    shift = run.progress.consumed_train_samples - plan.consumed_samples(run.progress.iteration)
    return SkipRecord(
        skip_log.spelled(iterations),
        s0=plan.consumed_samples(iterations.ranges[0][0] - 1) + shift,
        s1=plan.consumed_samples(iterations.ranges[-1][1]) + shift,
        tokens=plan.batch.samples_in(iterations) * run.config.model.seq_length,
        reason=reason,
        source=source,
        time=skip_log.now(),
    )


def _append(run: Run, lines: list[str]) -> None:
    """Write lines to `<save>/skips.jsonl` (nothing without --save). Raises CheckpointError on all
    ranks."""
    directory = run.config.checkpoint.save
    failure = None
    if run.runtime.rank == 0 and directory and lines:
        try:
            run.services.fence()
            skip_log.append(directory, lines)
        except CheckpointError as error:
            failure = str(error), error.errno
    failure = gather_objects(failure, run.runtime.ctx.world)[0]
    if failure:
        raise CheckpointError(*failure)


def record_skip(run: Run, first: int, last: int, reason: str, source: str) -> None:
    """Skip iterations first to last from now on, and record it in `skips.jsonl` and in checkpoints;
    all ranks call this.

    Samples that are open must be reopened. Raises CheckpointError where it cannot be written.
    """
    new = _new_record(run, SkipRanges([(first, last)]), reason, source)
    record = gather_objects(new, run.runtime.ctx.world)[0]
    _append(run, [record.line()])
    run.progress.skip_history.records.append(record)
    run.plan = replace(run.plan, skips=run.plan.skips.joined([(first, last)]))
    log.print_rank_0(
        f"iterations {first} to {last} will be skipped ({reason}, {source}): samples {record.s0} "
        f"to {record.s1 - 1}, {record.tokens} tokens"
    )
