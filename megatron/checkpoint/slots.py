"""The two rotating slots of snapshots.

A slot is a run directory with one checkpoint: a new snapshot goes into the slot of the older one,
so there is always a complete one in addition to the one being written, and never more than two."""

from __future__ import annotations

from pathlib import Path

from megatron.checkpoint import store
from megatron.checkpoint.filesystem import DISK, CheckpointError, Disk

SLOTS = ("0", "1")


def slots(directory: Path | str) -> list[Path]:
    """The run directories below a snapshot directory."""
    return [Path(directory) / name for name in SLOTS]


def newest_in(root: Path) -> int | None:
    """The iteration of a slot, None where it is empty or its tracker is damaged."""
    try:
        return store.latest(root)
    except CheckpointError:
        return None


def drop_beyond(directory: Path | str, iteration: int, disk: Disk = DISK) -> None:
    """Empty the slots whose snapshot is beyond `iteration`, which has just been saved: they belong
    to an abandoned history."""
    for root in slots(directory):
        if (newest_in(root) or 0) > iteration:
            empty(root, disk)


def empty(root: Path, disk: Disk) -> None:
    """Remove the tracker, then what it named."""
    if (root / store.TRACKER).exists():
        disk.remove(root / store.TRACKER)
        disk.fsync_directory(root)
    for iteration in store.iterations(root):
        store.discard(store.iteration_directory(root, iteration), disk)
