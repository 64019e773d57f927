"""--snapshot-interval: saves a checkpoint over the older of two."""

from __future__ import annotations

from megatron.checkpoint import retention
from megatron.checkpoint.filesystem import CheckpointError
from megatron.parallel.collectives import gather_objects
from megatron.training.checkpointing.save import (
    Constants,
    PendingSave,
    RunDirectory,
    begin_save,
    own_slices,
    save_directory,
    snapshot_directory,
)
from megatron.training.run import Run


def save_snapshot(run: Run, constants: Constants) -> PendingSave | None:
    """Like `save_checkpoint`, over the older of the two snapshots."""
    iteration = run.progress.iteration
    ctx = run.runtime.ctx
    c = run.config.checkpoint
    folder = snapshot_directory(c, save_directory(c))
    slot = None
    failure = None
    if run.runtime.rank == 0:
        try:
            run.services.fence()
            slot = str(retention.free_slot(folder, iteration))
        except CheckpointError as error:
            failure = str(error), error.errno
    slot, failure = gather_objects((slot, failure), ctx.world)[0]
    if failure:
        raise CheckpointError(*failure)
    assert slot is not None, "rank 0 has chosen it"
    return begin_save(
        run,
        constants,
        RunDirectory(run, slot),
        own_slices(run),
        f" snapshot of iteration {iteration} saved to {slot}"
        if run.config.logging.is_short
        else f"  saved snapshot at iteration {iteration:7d} to {slot}",
        is_snapshot=True,
    )
