"""Which checkpoints a load tries, in which order."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megatron.config import history
from megatron.config.history import History
from megatron.config.run_directory import (
    ARGS,
    STATE,
    TRACKER,
    CheckpointError,
    RunDirectory,
    is_checkpoint,
    iteration_directory,
    latest,
    vouched_file,
)


class Try(NamedTuple):
    """A checkpoint to try: iteration `step` of the run directory `path`, or, with None, the one
    directory `path` is."""

    path: str
    step: int | None

    @property
    def folder(self) -> Path:
        """Its directory, where no save of it was interrupted."""
        return Path(self.path) if self.step is None else iteration_directory(self.path, self.step)


def tries(
    path: Path | str, step: int | None = None, snapshots: Sequence[Path] = ()
) -> tuple[list[Try], list[str]]:
    """The checkpoints that a load of `path` tries, in order, and problems with trackers.

    Only one if it is requested by name: with `step`, or if `path` is not a run directory. Otherwise
    what the tracker names and every older checkpoint that led to it, merged with those of the run
    directories `snapshots` by iteration. Where the tracker is missing or damaged, the checkpoint
    saved last counts as named; not in `snapshots`, for a slot is emptied tracker first. Raises
    CheckpointError for a tracker that cannot be read if there is no checkpoint next to it.
    """
    if step is not None or is_checkpoint(Path(path)):
        return [Try(str(path), step)], []
    listed: list[Try] = []
    problems: list[str] = []
    main: History | None = None
    for root in (path, *snapshots):
        run = RunDirectory(root)
        tracker = run.path / TRACKER
        try:
            named = latest(root)
        except CheckpointError as error:
            if not run.iterations or not error.is_damage:
                raise
            problems.append(str(error))
            named = run.last_saved()
        if named is None and run.iterations and root == path:
            named = run.last_saved()
            problems.append(
                f"{tracker} is missing: iteration {named}, the checkpoint saved last, is used "
                "[checkpoint-tracker-missing]"
            )
        if named is None:
            continue
        good = named
        if vouched_file(run.folder(named), STATE) is None:
            good = run.last_saved(named) or named  # the named one cannot say what led to it
        own = run.histories.get(good)
        if root == path:
            main = own
        elif main and main.branches and own and not _are_one(main, own, named):
            continue  # a snapshot of another history, or of a branch that was left
        # not Path(root), which would take a ./ away that the log shows
        listed += [Try(str(root), n) for n in {named, *history.led_to(own, named, run.histories)}]
        later = [
            n
            for n, other in run.histories.items()
            # not of a branch that was left
            if n > named and (not (own and own.branches and other) or own.leads_to(other))
        ]
        if later:
            problems.append(
                f"{tracker} names iteration {named}, but a checkpoint of iteration {later[-1]} "
                f"exists as well; load it with --ckpt-step {later[-1]}"
            )
    return sorted(listed, key=lambda each: -(each.step or 0)), problems


def newest(
    load: str | Path, step: int | None = None, snapshots: Sequence[Path] = ()
) -> Path | None:
    """The directory of the checkpoint that a load tries first; None if it is not there."""
    return next((folder for folder in _folders(load, step, snapshots)[:1] if folder.is_dir()), None)


def newest_with_good_args(
    load: str | Path, step: int | None = None, snapshots: Sequence[Path] = ()
) -> Path | None:
    """That of the first whose args are those its manifest names, or else as `newest`. A load goes
    back to an older checkpoint where the newest is damaged, so its flags must not count either."""
    folders = _folders(load, step, snapshots)
    good = (folder for folder in folders if vouched_file(folder, ARGS) is not None)
    return next(good, newest(load, step, snapshots))


def _folders(load: str | Path, step: int | None, snapshots: Sequence[Path]) -> list[Path]:
    try:
        return [each.folder for each in tries(load, step, snapshots)[0]]
    except CheckpointError:
        return []  # the load says why


def _are_one(main: History, own: History, iteration: int) -> bool:
    """Is a snapshot of `iteration`, of history `own`, of the run whose newest checkpoint has
    `main`?"""
    if not own.branches:
        return history.led_to(main, iteration, {iteration: own}) != []
    return own.leads_to(main) or main.leads_to(own)
