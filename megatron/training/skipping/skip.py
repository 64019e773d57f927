"""Iterations that are skipped: samples are consumed unread, the schedule advances, nothing else
changes."""

from __future__ import annotations

from megatron import log
from megatron.training.hook import Hook
from megatron.training.result import IterationResult
from megatron.training.run import Run


class Skipping(Hook):
    """Advances a run over the iterations that it skips."""

    def __init__(self, run: Run):
        self._run = run
        self._announced = 0  # the last iteration of the range that was announced last

    def skip(self, first: int, last: int) -> IterationResult:
        """Advance the run over iterations `first` to `last`, which are in one skipped range; needs
        no agreement of the ranks."""
        run = self._run
        return run.advance(
            IterationResult(
                iteration=last,
                iterations=last - first + 1,
                global_batch_size=run.plan.global_batch_size(last),
                seconds=0.0,
                skipped="user",
                reason=run.progress.skip_history.reason(first),
            )
        )

    def announce(self, first: int, last: int) -> None:
        """Print once that a range is skipped: from `first`, where the run reaches it, to its end
        `last`."""
        run = self._run
        if last == self._announced:
            return
        self._announced = last
        reason = run.progress.skip_history.reason(first)
        samples = run.plan.consumed_samples(last) - run.plan.consumed_samples(first - 1)
        why = "" if reason == "user" else f" ({reason})"
        iterations = f"iteration {first}" if first == last else f"iterations {first} to {last}"
        log.print_rank_0(
            f"skipping {iterations}{why}: {samples} samples "
            f"({samples * run.config.model.seq_length} tokens)"
        )

    def on_rollback(self) -> None:
        """Skipped ranges are announced again."""
        self._announced = 0
