"""The features of the training loop, in their order, and those that need no file of their own. What
only some runs need is loaded here."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron.training.agreement import Requests
from megatron.training.evaluation import Evaluation
from megatron.training.hook import Hook
from megatron.training.logging.iteration import IterationResult
from megatron.training.logging.training_log import TrainingLog
from megatron.training.run import Run
from megatron.training.save_policy import SavePolicy
from megatron.training.skipping.skip import Skipping

if TYPE_CHECKING:
    from megatron.data.ledger import Recorder


def build_hooks(
    run: Run,
    lines: TrainingLog,
    evaluation: Evaluation,
    saving: SavePolicy,
    skipping: Skipping,
    started: float,
) -> list[Hook]:
    """The hooks in their order, which matters: docs/design.md gives the reasons. `started`: when
    this process started."""
    config = run.config
    hooks: list[Hook] = []
    monitor = getattr(run.services.signals, "monitor", None)
    if monitor:
        from megatron.training.launch.hang_watch import HangWatch

        hooks.append(HangWatch(monitor, monitor.limits, run))
    if config.profiling.profile:
        from megatron.training.profiler import Profiling

        hooks.append(Profiling(run))
    if config.training.check_weight_hash_across_dp_replicas_interval:
        from megatron.training.weight_check import WeightComparison

        hooks.append(WeightComparison(run))
    if config.spikes.spike_action != "off":
        hooks.append(SpikeDetection(run))
    hooks.append(IterationLog(lines))
    if config.logging.log_straggler:
        from megatron.training.logging.straggler import Stragglers

        hooks.append(Stragglers(run))
    if run.config.checkpoint.save:
        from megatron.training.logging.run_events import RunEvents

        hooks.append(RunEvents(run, started))
    if run.recorder:
        hooks.append(DataLedger(run, run.recorder))
    hooks += [skipping, evaluation, saving]
    if run.spikes.decides:
        from megatron.training.rollback import RollbackBuffer

        hooks.append(RollbackBuffer(run, saving))
    control = config.checkpoint.control_file
    if control and run.runtime.rank == 0:
        from megatron.training.launch.control_file import ControlFile, ControlFileRequests

        hooks.append(ControlFileRequests(ControlFile(control)))
    if config.training.manual_gc:
        hooks.append(GarbageCollection(run))
    return hooks


class SpikeDetection(Hook):
    """Passes each trained iteration to the spike detector; the finding is logged."""

    def __init__(self, run: Run):
        self._run = run

    def after_step(self, result: IterationResult) -> None:
        assert result.loss is not None  # the iteration was trained
        result.finding = self._run.spikes.record(
            result.iteration, result.loss, result.grad_norm, result.skipped
        )


class IterationLog(Hook):
    """The log line, metrics and TensorBoard of each iteration."""

    def __init__(self, lines: TrainingLog):
        self._lines = lines

    def after_step(self, result: IterationResult) -> None:
        self._lines.add(result)

    def after_skip(self, first: int, result: IterationResult) -> None:
        self._lines.add(result)

    def on_rollback(self) -> None:
        self._lines.go_back()

    def before_save(self) -> None:
        """After a resume, nothing before the checkpoint is written a second time."""
        self._lines.flush()

    def intervals(self) -> Sequence[int | None]:
        return self._lines.intervals


class DataLedger(Hook):
    """--data-ledger. Trained iterations are recorded by `train_step`, with the hash that travels
    with the loss."""

    def __init__(self, run: Run, recorder: Recorder):
        self._run = run
        self._ledger = recorder.ledger  # on rank 0, else None

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


class GarbageCollection(Hook):
    """--manual-gc: Python's collector runs at fixed iterations, the same on all ranks."""

    def __init__(self, run: Run):
        self._training = run.config.training

    def on_start(self) -> None:
        gc.disable()

    def before_evaluation(self) -> None:
        if self._training.manual_gc_eval:
            gc.collect()

    def after_iteration(self, iteration: int, requests: Requests) -> None:
        interval = self._training.manual_gc_interval
        if interval and iteration % interval == 0:
            gc.collect()

    def intervals(self) -> Sequence[int | None]:
        return (self._training.manual_gc_interval,)
