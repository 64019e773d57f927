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
        found = store.load(self.path, self.step)
        assert found is not None, f"{self.path} is a run directory"
        return found


def candidates(
    path: Path | str, step: int | None = None, more: Sequence[Path] = ()
) -> tuple[list[Candidate], list[str]]:
    """The checkpoints to try for `path`, in order, and problems with trackers.

    Only one if it is requested by name: with `step`, or if `path` is not a run directory. Otherwise
    what the tracker names and every older checkpoint, merged with those of the run directories
    `more` (snapshots) by iteration. Where the tracker is missing or damaged, the newest complete
    checkpoint counts as named; not in `more`, for a slot is emptied tracker first. Raises
    CheckpointError for a tracker that cannot be read if there is no checkpoint next to it.
    """
    path = Path(path)
    if step is not None or store.is_checkpoint(path):
        return [Candidate(str(path), step)], []
    found: list[tuple[int, Path]] = []
    problems: list[str] = []
    for root in (path, *more):
        here = store.iterations(root)
        try:
            newest = store.latest(root)
        except CheckpointError as error:
            if not here or not error.is_damage:
                raise
            problems.append(str(error))
            newest = here[-1]
        if newest is None and here and root == path:
            newest = here[-1]
            problems.append(
                f"{root / store.TRACKER} is missing: iteration {newest}, the newest complete "
                "checkpoint, is used [checkpoint-tracker-missing]"
            )
        if newest is not None:
            found += [(one, root) for one in {*here, newest} if one <= newest]
            if here and here[-1] > newest:
                problems.append(
                    f"{root / store.TRACKER} names iteration {newest}, but a checkpoint of "
                    f"iteration {here[-1]} exists as well; load it with --ckpt-step {here[-1]}"
                )
    found.sort(key=lambda pair: -pair[0])
    return [Candidate(str(root), one) for one, root in found], problems
