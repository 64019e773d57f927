"""Decides when a run saves, handles disk errors, and says what a later run can resume from."""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from megatron import log
from megatron.checkpoint.filesystem import CheckpointError
from megatron.training.checkpointing import save
from megatron.training.checkpointing.save import PendingSave
from megatron.training.hook import Hook
from megatron.training.logging.training_log import TrainingLog
from megatron.training.result import Requests
from megatron.training.run import Run

if TYPE_CHECKING:
    from megatron.training.checkpointing.local_copies import LocalCopies


class SavePolicy(Hook):
    """Checkpoints at --save-interval and at exits, snapshots at --snapshot-interval; with
    --async-save one of them at a time is being written."""

    def __init__(self, run: Run, lines: TrainingLog, hooks: Sequence[Hook]):
        """`hooks` are all of the loop, called before and after each save."""
        self._run = run
        self._lines = lines
        self._hooks = hooks
        # of --non-persistent-ckpt-type local, once training has started
        self._local_copies: LocalCopies | None = None
        self._pending: PendingSave | None = None
        self._saved_at = self._loaded = run.progress.iteration
        self._advise()

    @functools.cached_property
    def _constants(self) -> save.Constants:
        return save.constants_of(self._run)

    def on_start(self) -> None:
        run = self._run
        if run.config.checkpoint.non_persistent_ckpt_type == "local":
            from megatron.training.checkpointing.local_copies import LocalCopies

            self._local_copies = LocalCopies(run)
        if run.services.writer:
            copies = self._local_copies
            slices = copies.slices() if copies else save.own_slices(run)
            run.services.writer.reserve(slices, run.runtime.device)

    def requests(self, iteration: int) -> Requests | None:
        writer = self._run.services.writer
        return Requests(written=1) if self._pending and writer and writer.done() else None

    def due(self, iteration: int) -> bool:
        """Whether a checkpoint or snapshot is due at `iteration`."""
        return any(every and iteration % every == 0 for every in self.intervals())

    def intervals(self) -> Sequence[int | None]:
        c = self._run.config.checkpoint
        return (c.save_interval, c.snapshot_interval) if c.save else ()

    def save_if_due(self, iteration: int, requested: bool, final: bool) -> None:
        """Save after `iteration` if its interval, or else a snapshot, is due; `requested`: in any
        case. `final`: no other save of this run follows."""
        every = self._run.config.checkpoint.save_interval
        if requested or every and iteration % every == 0:
            self.save(final)
        elif self.due(iteration):
            self._snapshot()

    def on_rollback(self) -> None:
        """Save the run as it is now, since the newest checkpoint is of what was rolled back."""
        self.settle()  # or a pending save of what was rolled back becomes the newest later
        self._saved_at = -1
        if self._local_copies:
            self._local_copies.start_line()
        self.save(final=False)
        self.settle()

    def save(self, final: bool = True) -> None:
        """Save this iteration, if --save is given and it is not saved already.

        If the disk fails, the `final` save of a run raises CheckpointError; any other is a warning,
        since more follow. With --async-save only the `final` one is complete on return.
        """
        iteration = self._run.progress.iteration
        if not self._run.config.checkpoint.save:
            return
        write = functools.partial(save.save_checkpoint, self._run, self._constants)
        pending = self._pending
        if pending is None or pending.is_snapshot or pending.iteration != iteration:
            self.settle()
            if self._saved_at == iteration:
                return
            self._tell_hooks()
            self._attempt(write, iteration, final)
        if final:
            self.settle(final)
            # a process of --async-save has died: once more, without it
            if self._saved_at != iteration:
                self._attempt(write, iteration, final)
                self.settle(final)
            if self._local_copies:
                self._local_copies.remove()

    def settle(self, final: bool = False) -> None:
        """Wait for the save that is being written, if there is one, and complete it."""
        pending = self._pending
        if pending:
            finish = functools.partial(save.finish_save, self._run, pending)
            self._attempt(finish, pending.iteration, final, pending.is_snapshot)

    def _snapshot(self) -> None:
        """Write a snapshot, or start to; a disk error is a warning."""
        self.settle()
        self._tell_hooks()
        copies = self._local_copies
        write = copies.save if copies else functools.partial(save.save_snapshot, self._run)
        action = functools.partial(write, self._constants)
        self._attempt(action, self._run.progress.iteration, is_snapshot=True)

    def _attempt(
        self,
        action: Callable[[], PendingSave | None],
        iteration: int,
        final: bool = False,
        is_snapshot: bool = False,
    ) -> None:
        """Do a part of a save; one that is not `final` is a warning where the disk refuses, and
        always where a process of --async-save has died."""
        with self._run.timers("save-checkpoint"):
            try:
                self._pending = None  # also where the action fails
                self._pending = action()
                if not is_snapshot and not self._pending:
                    self._saved_at = iteration
                    for hook in self._hooks:
                        hook.after_save(iteration)
            except CheckpointError as error:
                # no number: not the disk's fault
                if error.errno is None or final and error.errno != errno.ECHILD:
                    raise
                kind = "snapshot"
                follows = "; training continues"
                if not is_snapshot:
                    kind = "checkpoint"
                    follows = (
                        f". {save.what_remains(self._run.config.checkpoint)}{follows}, the next "
                        f"save is tried at iteration {self._next_save(iteration)}"
                    )
                log.print_rank_0(f"WARNING: no {kind} of iteration {iteration}: {error}{follows}")
        self._advise()
        self._lines.timers(["save-checkpoint"])

    def _tell_hooks(self) -> None:
        for hook in self._hooks:
            hook.before_save()

    def _next_save(self, iteration: int) -> int:
        """The next iteration after this one that is saved if nobody interrupts the run."""
        config = self._run.config
        every = config.checkpoint.save_interval, config.training.exit_interval
        return min(self._run.plan.train_iters, *((iteration // n + 1) * n for n in every if n))

    def last_checkpoint(self) -> str:
        """What a later run can resume from, for the last line."""
        save_to = self._run.config.checkpoint.save
        if not save_to:
            return "no checkpoint (no --save)"
        return (
            f"last checkpoint: iteration {self._saved_at} in {save_to}"
            if self._saved_at > 0
            else "no checkpoint"
        )

    def _advise(self) -> None:
        """Prepare the message for a user who interrupts."""
        c = self._run.config.checkpoint
        signals = self._run.services.signals
        n = self._saved_at
        if n and c.load and (c.load == c.save or n == self._loaded):
            signals.advice = "the same command resumes from the last checkpoint"
        elif n and c.save:
            signals.advice = f"--load {c.save} resumes from the last checkpoint"
        else:
            signals.advice = (
                "there is no checkpoint yet"
                if c.save
                else "nothing was saved (--save is not given)"
            )
