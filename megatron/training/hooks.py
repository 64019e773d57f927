"""The features of the training loop, in their order, and those that need no file of their own."""

from __future__ import annotations

import gc
from collections.abc import Sequence

from megatron import log
from megatron.parallel.collectives import gather_objects
from megatron.training.agreement import Requests
from megatron.training.evaluation import Evaluation
from megatron.training.hook import Hook
from megatron.training.launch.control_file import SAVE, STOP, ControlFile
from megatron.training.logging.straggler import straggler_line
from megatron.training.logging.training_log import IterationResult, TrainingLog
from megatron.training.profiler import Profiler
from megatron.training.rollback import RollbackBuffer
from megatron.training.run import Run
from megatron.training.save_policy import SavePolicy
from megatron.training.skipping.skip import Skipping
from megatron.training.weight_check import check_replicas


def build_hooks(
    run: Run, lines: TrainingLog, evaluation: Evaluation, saving: SavePolicy, skipping: Skipping
) -> list[Hook]:
    """The order is part of what the loop does: docs/design.md says why it is this one."""
    profiler = Profiler(run.config, run.model, run.runtime.rank, run.runtime.device)
    compares = run.config.training.check_weight_hash_across_dp_replicas_interval
    hooks: list[Hook] = [
        Profiling(profiler),
        *([WeightComparison(run)] if compares else []),
        SpikeDetection(run),
        IterationLog(lines),
        *([Stragglers(run)] if run.config.logging.log_straggler else []),
        DataLedger(run),
        skipping,
        evaluation,
        saving,
        RollbackBuffer(run, saving),
    ]
    control = run.config.checkpoint.control_file
    if control and run.runtime.rank == 0:
        hooks.append(ControlFileRequests(ControlFile(control)))
    if run.config.training.manual_gc:
        hooks.append(GarbageCollection(run))
    return hooks


class Profiling(Hook):
    """--profile. It comes first, so that a profile holds nothing of the other hooks."""

    def __init__(self, profiler: Profiler):
        self._profiler = profiler

    def before_step(self, iteration: int) -> None:
        self._profiler.before_step(iteration)

    def after_step(self, result: IterationResult) -> None:
        self._profiler.after_step(result.iteration)

    def on_end(self) -> None:
        self._profiler.close()


class WeightComparison(Hook):
    """--check-weight-hash-across-dp-replicas-interval. It comes before anything is saved."""

    def __init__(self, run: Run):
        self._run = run
        self._interval = run.config.training.check_weight_hash_across_dp_replicas_interval

    def after_step(self, result: IterationResult) -> None:
        if result.iteration % self._interval == 0:
            check_replicas(self._run.model, self._run.runtime.ctx.dp_cp, result.iteration)


class SpikeDetection(Hook):
    """Each trained iteration is shown to the detector; its finding stands in the log."""

    def __init__(self, run: Run):
        self._run = run

    def after_step(self, result: IterationResult) -> None:
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


class Stragglers(Hook):
    """--log-straggler: the rank that computes longest, at each log interval."""

    def __init__(self, run: Run):
        self._run = run
        self._elapsed = 0.0
        self._iterations = 0

    def after_step(self, result: IterationResult) -> None:
        self._elapsed += result.seconds
        self._iterations += 1
        if result.iteration % self._run.config.logging.log_interval:
            return
        seconds = gather_objects(self._run.timers.pop_watched(), self._run.runtime.ctx.world)
        log.print_rank_last(
            straggler_line(result.iteration, self._iterations, self._elapsed, seconds)
        )
        self._elapsed = 0.0
        self._iterations = 0


class DataLedger(Hook):
    """--data-ledger. Trained iterations are recorded by `train_step`, with the hash that travels
    with the loss."""

    def __init__(self, run: Run):
        self._run = run
        self._ledger = run.recorder.ledger if run.recorder else None  # on rank 0

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


class ControlFileRequests(Hook):
    """--control-file, on rank 0."""

    def __init__(self, file: ControlFile):
        self._file = file

    def requests(self, iteration: int) -> Requests | None:
        requested = self._file.request(iteration)
        if requested is None:
            return None
        return Requests(save_now=requested == SAVE, stop_now=requested == STOP)

    def after_iteration(self, iteration: int, requests: Requests) -> None:
        if requests.save_now or requests.stop_now:
            self._file.done()


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
