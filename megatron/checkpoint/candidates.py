"""The order in which a load tries checkpoints: the newest first, older ones if it is damaged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint import store
from megatron.checkpoint.filesystem import CheckpointError


@dataclass(frozen=True)
class Candidate:
    """A checkpoint to try: iteration `step` of the run directory `path`, or, with None, the one
    directory `path` is."""

    path: str
    step: int | None

    def open(self) -> store.Checkpoint:
        """Its checked metadata. Raises CheckpointError."""
        checkpoint = store.load(self.path, self.step)
        assert checkpoint is not None, f"{self.path} is a run directory"
        return checkpoint


def candidates(
    path: Path | str, step: int | None = None, snapshot_roots: Sequence[Path] = ()
) -> tuple[list[Candidate], list[str]]:
    """The checkpoints to try for `path`, in order, and problems with trackers.

    Only one if it is requested by name: with `step`, or if `path` is not a run directory. Otherwise
    what the tracker names and every older checkpoint, merged with those of the run directories
    `snapshot_roots` by iteration. Where the tracker is missing or damaged, the newest complete
    checkpoint counts as named; not in `snapshot_roots`, for a slot is emptied tracker first. Raises
    CheckpointError for a tracker that cannot be read if there is no checkpoint next to it.
    """
    typed = str(path)  # Path would take a ./ away, which the log shows
    path = Path(path)
    if step is not None or store.is_checkpoint(path):
        return [Candidate(typed, step)], []
    by_root: list[tuple[int, Path]] = []
    problems: list[str] = []
    for root in (path, *snapshot_roots):
        complete = store.iterations(root)
        try:
            newest = store.latest(root)
        except CheckpointError as error:
            if not complete or not error.is_damage:
                raise
            problems.append(str(error))
            newest = complete[-1]
        if newest is None and complete and root == path:
            newest = complete[-1]
            problems.append(
                f"{root / store.TRACKER} is missing: iteration {newest}, the newest complete "
                "checkpoint, is used [checkpoint-tracker-missing]"
            )
        if newest is not None:
            by_root += [
                (iteration, root) for iteration in {*complete, newest} if iteration <= newest
            ]
            if complete and complete[-1] > newest:
                problems.append(
                    f"{root / store.TRACKER} names iteration {newest}, but a checkpoint of "
                    f"iteration {complete[-1]} exists as well; load it with --ckpt-step "
                    f"{complete[-1]}"
                )
    by_root.sort(key=lambda pair: -pair[0])
    names = {path: typed}
    return [
        Candidate(names.get(root, str(root)), iteration) for iteration, root in by_root
    ], problems
