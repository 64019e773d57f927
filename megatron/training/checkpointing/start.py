"""Where a run starts: at a checkpoint of --load or at iteration 0, with the directory of --save in
order."""

from dataclasses import replace
from pathlib import Path

from megatron import log
from megatron.checkpoint import store
from megatron.checkpoint.filesystem import DISK, CheckpointError
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.history import History
from megatron.training.checkpointing.one_history import (
    LOCAL_COPIES,
    is_same_directory,
    last_number,
    others,
    problem,
)
from megatron.training.launch.process import Refusal
from megatron.training.run import Run


def load_checkpoint(run: Run) -> str | None:
    """Load the checkpoint of --load, if there is one, and return its path. Raises ValueError (of
    exit code 2 where none is good) or CheckpointError.

    If it is damaged for any rank, all ranks load the newest good one before it, unless one
    iteration was requested.
    """
    c = run.config.checkpoint
    # then the directory is this job's
    if run.runtime.rank == 0 and c.save and not run.config.training.skip_train:
        _clear_leftovers(c, c.save)
    loaded = None
    if c.load:
        from megatron.training.checkpointing.load import load_newest

        loaded = load_newest(run, c)
    if c.save and not run.config.training.skip_train:
        _begin_branch(run, c)
    return loaded


def _begin_branch(run: Run, c: CheckpointConfig) -> None:
    """What this run saves comes after all that --save holds. Raises Refusal where some of that is
    of another history than the checkpoint that was loaded."""
    p = run.progress
    before = p.history.branches[:-1]
    own = History(before) if before and (p.iteration or is_same_directory(c)) else None
    save = str(c.save)
    foreign, last = run.of_rank_0(lambda: (others(c, own), last_number(c, save)))
    if foreign:
        raise Refusal(problem(c, save, c.load, own, [str(path) for path in foreign]), 2)
    p.history = replace(p.history, number=max(p.history.number, last + 1))


def _clear_leftovers(c: CheckpointConfig, save: str) -> None:
    """Remove what an earlier job left in the directory, so that it can no longer complete a
    save."""
    for root in (Path(save), *c.slots_of(save)):
        try:
            store.clear_leftovers(root)
        except CheckpointError as error:
            log.warn_once(str(error))
    newest = Path(save, LOCAL_COPIES)
    if c.non_persistent_ckpt_type != "local" and newest.exists():
        DISK.remove(newest)
