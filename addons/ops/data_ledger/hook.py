"""What writes the ledger in the training loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megatron.training.hook import Hook
from megatron.training.result import IterationResult
from megatron.training.run import Run
from megatron.training.step_counter import StepCounter
from megatron.training.step_sums import set_counts

from .writer import Ledger, Recorder

if TYPE_CHECKING:
    from megatron.training.batch import MicroBatch


class DataLedger(Hook, StepCounter):
    """--data-ledger: rank 0 writes, and of the ranks that read the same samples one counts. The
    hash of an iteration's samples is summed with the loss."""

    before = ("Skipping",)  # and so before SavePolicy: cut after a rollback, then saved again
    after = ("IterationLog",)
    size = 2  # the low and the high 32 bits of the hash

    def __init__(self, run: Run, path: str):
        ctx = run.runtime.ctx
        self._run = run
        self._ledger = Ledger(path, run.config.model.seq_length) if ctx.rank == 0 else None
        is_first = not (ctx.tp.rank or ctx.pp.rank or ctx.cp.rank)
        self._recorder = Recorder(self._ledger, counts=is_first)
        self.hash_of = Recorder.hash_of
        run.counters.append(self)

    def see(self, samples: MicroBatch) -> None:
        self._recorder.add(samples.hash)

    def close(self, slots: torch.Tensor) -> None:
        set_counts(slots, self._recorder.halves())

    def summed(self, iteration: int, sums: list[float]) -> dict[str, float | int | None]:
        first = self._run.progress.consumed_train_samples
        count = self._run.plan.global_batch_size(iteration)
        self._recorder.record(iteration, first, count, *sums)
        return {}

    def after_skip(self, first: int, result: IterationResult) -> None:
        if self._ledger:
            plan = self._run.plan
            shift = result.consumed_samples - plan.consumed_samples(result.iteration)
            numbers = range(first - 1, result.iteration + 1)
            self._ledger.skip(first, [plan.consumed_samples(n) + shift for n in numbers])

    def on_rollback(self) -> None:
        if self._ledger:
            self._ledger.go_back()

    def before_save(self) -> None:
        if self._ledger:
            self._ledger.sync()
