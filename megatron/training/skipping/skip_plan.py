"""Which iterations a run skips and has skipped: flags, `skips.jsonl` and checkpoints combined.

Rank 0 reads and writes the file and resolves them; the result is sent to all ranks, so that they
have one list.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

from megatron import log
from megatron.checkpoint import skip_log, slots, store
from megatron.checkpoint.candidates import candidates
from megatron.checkpoint.filesystem import CheckpointError
from megatron.checkpoint.skip_log import Entry, SkipRecord
from megatron.checkpoint.state import RunState
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.plan.plan import Plan
from megatron.config.skip_ranges import FILE_NAME, SkipRanges
from megatron.config.tree import Config
from megatron.parallel.collectives import gather_objects
from megatron.training.checkpointing.save import snapshot_directory
from megatron.training.launch.initialize import Runtime
from megatron.training.launch.signals import Refusal
from megatron.training.run import Run
from megatron.training.skipping.resolve import Position, Recorded, Resolution, resolve

WRONG_FLAGS = 2  # the exit code


@dataclass(frozen=True)
class Skips:
    """The resolution of what a run skips, and its inputs, so that it can be repeated if another
    checkpoint is loaded than expected. `saved`: ids in the file of --save."""

    typed: SkipRanges
    recorded: Recorded
    saved: frozenset[str]
    resolution: Resolution


def resolve_skips(config: Config, plan: Plan, runtime: Runtime) -> tuple[Plan, Skips | None]:
    """What a run will skip, by flags, file and the checkpoint of --load; None where nothing can be
    skipped: no flag, nothing to load, no records of an earlier run in --save.

    Raises Refusal on all ranks for ranges that are not possible, CheckpointError for a file that
    cannot be read.
    """
    c = config.checkpoint
    recorded_before = runtime.rank == 0 and bool(c.save and os.path.exists(Path(c.save, FILE_NAME)))
    if not (
        plan.skips.ranges
        or config.training.forget_skip
        or c.load
        or gather_objects(recorded_before, runtime.ctx.world)[0]
    ):
        return plan, None
    found = None
    failure = None
    if runtime.rank == 0:
        try:
            recorded, saved, at = (
                (Recorded(), frozenset(), Position())
                if config.training.skip_train
                else _recorded(c)
            )
            found = Skips(
                plan.skips,
                recorded,
                saved,
                resolve(plan, plan.skips, config.training.forget_skip or (), recorded, at),
            )
        except CheckpointError as error:
            failure = str(error), error.errno
    found, failure = gather_objects((found, failure), runtime.ctx.world)[0]
    if failure:
        raise CheckpointError(*failure)
    assert found is not None, "rank 0 has made it"
    if not config.training.skip_train:
        _tell(found.resolution)
    return replace(plan, skips=found.resolution.skips), found


def _tell(resolution: Resolution) -> None:
    if resolution.problems:
        raise Refusal("\nerror: ".join(resolution.problems), WRONG_FLAGS)
    for text in resolution.notes:
        log.print_rank_0(text)


def _recorded(c: CheckpointConfig) -> tuple[Recorded, frozenset[str], Position]:
    """What is on disk: records of the checkpoint, of the run it is of and of --save, the last one
    counting; the ids that the last of these has; and where the run continues."""
    state = _expected(c)
    at = Position()
    entries: list[Entry] = []
    origins: dict[str, str] = {}

    def take(lines: list[str], source: str) -> list[Entry]:
        new = skip_log.parse(lines, source)
        origins.update((name, source) for name, _ in new)
        entries.extend(new)
        return new

    root = None
    if c.load and not c.finetune:
        root = Path(c.load).parent if store.is_checkpoint(Path(c.load)) else Path(c.load)
    if state is not None:
        at = Position(state.iteration, state.consumed_train_samples, state.skipped_ranges())
        take([one for one in state.skips if isinstance(one, str)], "the checkpoint")
    saved: list[Entry] = []
    for directory in dict.fromkeys(str(Path(path)) for path in (root, c.save) if path):
        lines, torn = skip_log.read(directory)
        source = f"{directory}/{skip_log.FILE_NAME}"
        if torn:
            log.print_rank_0(
                f"WARNING: {source}: its last line was cut off while it was written and does not "
                f"count: {torn[:80]!r}"
            )
        saved = take(lines, source)
    recorded = Recorded(
        skip_log.active(entries),
        origins,
        store.iterations(root) if root else (),
        str(root or ""),
    )
    return recorded, frozenset(skip_log.active(saved) if c.save else ()), at


def _expected(c: CheckpointConfig) -> RunState | None:
    """The state of the checkpoint that will be loaded, as far as is known before its tensors are
    read."""
    if not c.load or c.finetune:
        return None
    try:
        tries, _ = candidates(c.load, c.ckpt_step, slots.slots(snapshot_directory(c, c.load)))
    except CheckpointError:
        return None  # the load says why
    for candidate in tries:
        try:
            return candidate.open().state
        except CheckpointError:
            continue  # ... and of this one too
    return None


def start_skips(run: Run, skips: Skips | None) -> None:
    """After checkpoint and data are loaded: resolve again if it is another checkpoint than
    expected, and record what is new. Raises as `resolve_skips` and `record_skip` do."""
    if skips is None or run.config.training.skip_train:
        return
    resolution = skips.resolution
    progress = run.progress
    if progress.iteration != resolution.iteration:
        at = Position(
            progress.iteration, progress.consumed_train_samples, run.progress.skip_history.executed
        )
        resolution = resolve(
            run.plan, skips.typed, run.config.training.forget_skip or (), skips.recorded, at
        )
        _tell(resolution)
        run.plan = replace(run.plan, skips=resolution.skips)
    world = run.runtime.ctx.world
    made = None
    if run.runtime.rank == 0:
        made = _changes(run, skips, resolution)
    made = gather_objects(made, world)[0]
    assert made is not None, "rank 0 has made it"
    kept, lines, notes = made
    run.progress.skip_history.records = skip_log.active(
        skip_log.parse(kept, "the records that count")
    )
    for text in notes:
        log.print_rank_0(text)
    _append(run, lines)


def _changes(
    run: Run, skips: Skips, resolution: Resolution
) -> tuple[list[str], list[str], list[str]]:
    """(active records, lines that the file of --save lacks, what to print), on rank 0."""
    kept = []
    lines = []
    notes = []
    now = order_hash(run)
    for name, record in resolution.kept.items():
        line = record.line()
        if record.hash != now and record.s1 > run.progress.consumed_train_samples:
            line = new_record(
                run,
                record.parts,
                record.reason,
                f"{record.source}; the data order was {record.hash}",
                now,
            ).line()
            notes.append(
                f"WARNING: {skips.recorded.origins[name]}: {name} was recorded with another order "
                "of the data (seed, sequence length, batch sizes or data set): it is samples "
                f"{record.s0} to {record.s1 - 1} of the order that the data have now"
            )
            lines.append(line)
        elif name not in skips.saved:
            lines.append(line)
        kept.append(line)
    for name, reason, place in resolution.moved:
        new = new_record(run, SkipRanges([place]), reason, f"was {name}", now).line()
        kept.append(new)
        lines += [skip_log.forget_line(name), new]
    lines += [skip_log.forget_line(name) for name in resolution.forgotten]
    typed = [
        new_record(run, one, "user", "command line", now).line()
        for one in skip_log.grouped(resolution.new)
    ]
    return kept + typed, lines + typed, notes


def order_hash(run: Run) -> str:
    """16 digits of what determines the data of a sample number: batch sizes, sequence length, seed,
    training data."""
    order = {key: run.progress.data_order.get(key) for key in ("train", "sampler")}
    recorded = [run.plan.batch.steps, run.config.model.seq_length, run.config.training.seed, order]
    return hashlib.sha256(json.dumps(recorded, sort_keys=True).encode()).hexdigest()[:16]


def new_record(run: Run, parts: SkipRanges, reason: str, source: str, order: str) -> SkipRecord:
    """The record of these iterations, as of now; `order`: what `order_hash` gives."""
    plan = run.plan
    progress = run.progress
    names = skip_log.named(parts)
    shift = progress.consumed_train_samples - plan.consumed_samples(progress.iteration)
    s0 = plan.consumed_samples(names["a"] - 1) + shift
    s1 = plan.consumed_samples(names["b"]) + shift
    tokens = plan.batch.samples_in(parts) * run.config.model.seq_length
    return SkipRecord(
        **names,
        s0=s0,
        s1=s1,
        tokens=tokens,
        reason=reason,
        source=source,
        time=skip_log.now(),
        hash=order,
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
    new = new_record(run, SkipRanges([(first, last)]), reason, source, order_hash(run))
    line = gather_objects(new.line(), run.runtime.ctx.world)[0]
    _append(run, [line])
    ((_, record),) = skip_log.parse([line], "the new record")
    assert record is not None
    run.progress.skip_history.records[record.id] = record
    run.plan = replace(run.plan, skips=run.plan.skips.joined([(first, last)]))
    log.print_rank_0(
        f"iterations {first} to {last} will be skipped ({reason}, {source}): samples {record.s0} "
        f"to {record.s1 - 1}, {record.tokens} tokens"
    )
