"""Which iterations a run leaves out and has left out: flags, `skips.jsonl` and checkpoints joined. Trains nothing.

Rank 0 reads and writes the file; what it found or wrote goes to all ranks, so that they hold one list.
"""
from __future__ import annotations

import hashlib
import json
from dataclasses import replace

from megatron import log
from megatron.checkpoint import skip_records
from megatron.checkpoint.disk import CheckpointError
from megatron.checkpoint.skip_records import SkipRecord
from megatron.parallel.collectives import gather_objects
from megatron.training.build import Run


def order_hash(run: Run) -> str:
    """16 digits of what decides which data a sample number means: batch sizes, sequence length, seed, training data."""
    order = {key: run.data_order.get(key) for key in ("train", "sampler")}
    known = [run.plan.batch.steps, run.config.model.seq_length, run.config.training.seed, order]
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:16]


def new_record(run: Run, first: int, last: int, reason: str, source: str) -> SkipRecord:
    """The record of a range, as of now."""
    plan, progress = run.plan, run.progress
    shift = progress.consumed_train_samples - plan.consumed_samples(progress.iteration)
    s0, s1 = plan.consumed_samples(first - 1) + shift, plan.consumed_samples(last) + shift
    return SkipRecord(f"{first}-{last}", first, last, s0, s1, (s1 - s0) * run.config.model.seq_length, reason, source,
                      skip_records.now(), order_hash(run))


def append_lines(run: Run, lines: list[str]) -> None:
    """Write lines to `<save>/skips.jsonl` (nothing without --save). Raises CheckpointError on all ranks."""
    directory, failure = run.config.checkpoint.save, None
    if run.runtime.rank == 0 and directory and lines and not run.config.training.skip_train:
        try:
            run.fence()
            skip_records.append(directory, lines)
        except CheckpointError as error:
            failure = str(error), error.errno
    failure = gather_objects(failure, run.runtime.ctx.world)[0]
    if failure:
        raise CheckpointError(*failure)


def record_skip(run: Run, first: int, last: int, reason: str, source: str) -> None:
    """From here on the run leaves out iterations first to last; `skips.jsonl` and the checkpoints say so. For all ranks.

    The samples that are open already know nothing of it: they must be opened anew. Raises CheckpointError where it cannot be
    written.
    """
    line = gather_objects(new_record(run, first, last, reason, source).line(), run.runtime.ctx.world)[0]
    append_lines(run, [line])
    run.skip_history.lines.append(line)
    run.plan = replace(run.plan, skips=run.plan.skips.joined([(first, last)]))
    record = skip_records.active([line], "new")[f"{first}-{last}"]
    log.print_rank_0(f"iterations {first} to {last} are left out from here on ({reason}, {source}): samples {record.s0} to "
                     f"{record.s1 - 1}, {record.tokens} tokens")
