"""Removal of old checkpoints (--keep-last, --keep-every), and the choice of a snapshot's slot."""

from __future__ import annotations

from pathlib import Path

from megatron.checkpoint import store
from megatron.checkpoint.filesystem import DISK, Disk
from megatron.checkpoint.slots import empty, newest_in, slots


def prune(
    root: Path | str, keep_last: int, keep_every: int | None = None, *, disk: Disk = DISK
) -> list[int]:
    """Remove checkpoints but the tracker's, the `keep_last` newest up to it, and multiples of
    `keep_every`.

    Those beyond the tracker's belong to an abandoned history (a run that resumed from an older
    one): they are neither counted nor removed. Call it on rank 0 after a save has returned. Returns
    the iterations removed."""
    if keep_last < 1:
        raise ValueError(f"keep_last {keep_last}: at least one checkpoint must be kept")
    root, newest = Path(root), store.latest(root)
    present = [
        iteration
        for iteration in store.iterations(root)
        if newest is not None and iteration <= newest
    ]
    retained = {
        *present[-keep_last:],
        newest,
        *(iteration for iteration in present if keep_every and iteration % keep_every == 0),
    }
    removed = [iteration for iteration in present if iteration not in retained]
    for iteration in removed:
        store.discard(store.iteration_directory(root, iteration), disk)
    return removed


def free_slot(directory: Path | str, iteration: int, disk: Disk = DISK) -> Path:
    """Empty the slot for the snapshot of `iteration` and return it: one of an abandoned history, an
    empty one, or the older one."""

    def last_iteration(slot: Path) -> int:
        newest = newest_in(slot)
        return -1 if newest is None or newest >= iteration else newest

    root = min(slots(directory), key=last_iteration)
    empty(root, disk)
    return root
