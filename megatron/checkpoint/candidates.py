"""The order in which a load tries checkpoints: the newest first, older ones if it is damaged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint import store
from megatron.checkpoint.filesystem import CheckpointError
from megatron.config import history
from megatron.config.history import History


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
    what the tracker names and every older checkpoint that led to it, merged with those of the run
    directories `snapshot_roots` by iteration. Where the tracker is missing or damaged, the
    checkpoint saved last counts as named; not in `snapshot_roots`, for a slot is emptied tracker
    first. Raises CheckpointError for a tracker that cannot be read if there is no checkpoint next
    to it.
    """
    typed = str(path)  # Path would take a ./ away, which the log shows
    path = Path(path)
    if step is not None or store.is_checkpoint(path):
        return [Candidate(typed, step)], []
    by_root: list[tuple[int, Path]] = []
    problems: list[str] = []
    main: History | None = None
    for root in (path, *snapshot_roots):
        histories = history.read_all(root, store.iterations(root))
        last = max(histories, default=-1)
        try:
            newest = store.latest(root)
        except CheckpointError as error:
            if not histories or not error.is_damage:
                raise
            problems.append(str(error))
            newest = history.newest(root, histories)
        if newest is None and histories and root == path:
            newest = history.newest(root, histories)
            problems.append(
                f"{root / store.TRACKER} is missing: iteration {newest}, the checkpoint saved "
                "last, is used [checkpoint-tracker-missing]"
            )
        if newest is None:
            continue
        up_to = {n: other for n, other in histories.items() if n <= newest}
        good = newest
        if history.vouched_file(store.iteration_directory(root, newest), store.STATE) is None:
            good = history.newest(root, up_to) or newest  # the named one cannot say what led to it
        own = histories.get(good)
        if root == path:
            main = own
        elif main and main.branches and own and own.branches:
            if not (own.leads_to(main) or main.leads_to(own)):
                continue  # a snapshot of another history, or of a branch that was left
        by_root += [(n, root) for n in {newest, *history.led_to(own, newest, up_to)}]
        if last > newest:
            problems.append(
                f"{root / store.TRACKER} names iteration {newest}, but a checkpoint of "
                f"iteration {last} exists as well; load it with --ckpt-step {last}"
            )
    by_root.sort(key=lambda pair: -pair[0])
    names = {path: typed}
    return [
        Candidate(names.get(root, str(root)), iteration) for iteration, root in by_root
    ], problems
