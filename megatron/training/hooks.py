"""The hooks of the core, in their order, and those that need no file of their own. What only some
runs need is loaded here. Those of features say their places themselves."""

import gc
from collections.abc import Iterable, Sequence

from megatron import object_stores
from megatron.config.training import TrainingConfig
from megatron.training.evaluation import Evaluation
from megatron.training.hook import Hook
from megatron.training.logging.training_log import TrainingLog
from megatron.training.result import IterationResult, Requests
from megatron.training.run import Run
from megatron.training.save_policy import SavePolicy
from megatron.training.skipping import Skipping


def build_hooks(
    run: Run,
    lines: TrainingLog,
    evaluation: Evaluation,
    saving: SavePolicy,
    skipping: Skipping,
) -> list[Hook]:
    """The hooks in their order, which matters: docs/design.md gives the reasons."""
    config = run.config
    hooks: list[Hook] = []
    monitor = getattr(run.services.signals, "monitor", None)
    if monitor:
        from megatron.training.launch.hang_watch import HangWatch

        hooks.append(HangWatch(monitor, monitor.limits, run))
    if run.plan.own_model:
        from megatron.training.weight_check import OwnModelChecks

        hooks.append(OwnModelChecks(run))
    if config.data.object_storage_cache_path:
        reads = object_stores.part("store_reads").StoreReads(config.data, run.runtime.ctx.world)
        hooks.append(reads)
    hooks.append(IterationLog(lines))
    hooks += [skipping, evaluation, saving]
    control = config.checkpoint.control_file
    if control and run.runtime.rank == 0:
        from megatron.training.launch.control_file import ControlFileRequests

        hooks.append(ControlFileRequests(control))
    if config.training.manual_gc:
        hooks.append(GarbageCollection(config.training))
    return hooks


def placed(hooks: Sequence[Hook], added: Iterable[Hook]) -> list[Hook]:
    """`hooks` with each of `added` among them: right before the first that it must precede, or
    last. Raises ValueError where that is not possible."""
    order = list(hooks)
    waiting = list(added)
    while waiting:
        # one that names none that waits, too
        kinds = {type(h).__name__ for h in waiting}
        hook = next((h for h in waiting if kinds.isdisjoint(h.before + h.after)), waiting[0])
        waiting.remove(hook)
        name = type(hook).__name__
        names = [type(h).__name__ for h in order]
        end = len(order)
        precede = [
            index
            for index in range(end)
            if names[index] in hook.before or name in order[index].after
        ]
        follow = [
            index
            for index in range(end)
            if names[index] in hook.after or name in order[index].before
        ]
        index = min(precede, default=end)
        if follow and follow[-1] >= index:
            raise ValueError(
                f"{name} cannot be before {names[index]} and after {names[follow[-1]]}"
            )
        order.insert(index, hook)
    return order


class IterationLog(Hook):
    """The log line and the results of each iteration."""

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


class GarbageCollection(Hook):
    """--manual-gc: Python's collector runs at fixed iterations, the same on all ranks."""

    def __init__(self, training: TrainingConfig):
        self._training = training

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
