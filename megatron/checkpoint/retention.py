"""What a run directory keeps: removal of old checkpoints (--keep-last, --keep-every), and the two
slots of snapshots.

A slot is a run directory with one checkpoint: a new snapshot goes into the slot of the older one,
so there is always a complete one in addition to the one being written, and never more than two."""

from collections.abc import Sequence
from pathlib import Path

from megatron.checkpoint import store
from megatron.checkpoint.filesystem import DISK, CheckpointError, Disk
from megatron.config import history, run_directory
from megatron.config.run_directory import RunDirectory


def prune(
    root: Path | str, keep_last: int, keep_every: int | None = None, *, disk: Disk = DISK
) -> list[int]:
    """Remove checkpoints but the tracker's, the `keep_last` newest that led to it, and multiples of
    `keep_every`.

    Those of another branch (a run that resumed from an older one, or rolled back) are neither
    counted nor removed. Call it on rank 0 after a save has returned. Returns the iterations
    removed."""
    if keep_last < 1:
        raise ValueError(f"keep_last {keep_last}: at least one checkpoint must be kept")
    newest = run_directory.latest(root)
    if newest is None:
        return []
    run = RunDirectory(root)
    present = history.led_to(run.histories.get(newest), newest, run.histories)
    retained = {
        *present[-keep_last:],
        newest,
        *(iteration for iteration in present if keep_every and iteration % keep_every == 0),
    }
    removed = [iteration for iteration in present if iteration not in retained]
    for iteration in removed:
        store.discard(run.folder(iteration), disk)
    return removed


def newest_in(root: Path) -> int | None:
    """The iteration of a slot, None where it is empty or its tracker is damaged."""
    try:
        return run_directory.latest(root)
    except CheckpointError:
        return None


def free_slot(slots: Sequence[Path], iteration: int, disk: Disk = DISK) -> Path:
    """Empty the slot for the snapshot of `iteration` and return it: one of an abandoned history, an
    empty one, or the older one."""

    def last_iteration(slot: Path) -> int:
        newest = newest_in(slot)
        return -1 if newest is None or newest >= iteration else newest

    root = min(slots, key=last_iteration)
    empty(root, disk)
    return root


def empty(root: Path, disk: Disk) -> None:
    """Remove the tracker, then what it named."""
    if (root / store.TRACKER).exists():
        disk.remove(root / store.TRACKER)
        disk.fsync_directory(root)
    for iteration in run_directory.iterations(root):
        store.discard(store.iteration_directory(root, iteration), disk)
