"""One training run: its state, its progress and the services it uses."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import nn

from megatron.checkpoint.filesystem import CheckpointError
from megatron.config.history import History
from megatron.config.plan.plan import Plan
from megatron.config.tree import Config
from megatron.optimizer.optimizer import MixedPrecisionOptimizer
from megatron.optimizer.scheduler import OptimizerParamScheduler
from megatron.parallel.collectives import all_reduce_, gather_objects
from megatron.parallel.ddp import GradBuffers
from megatron.parallel.single_stage import SingleStage
from megatron.timers import Timers
from megatron.training.batch import BatchRules
from megatron.training.launch.initialize import Runtime
from megatron.training.launch.signals import SignalWatch
from megatron.training.result import IterationResult

if TYPE_CHECKING:
    from megatron.checkpoint.async_writer import Writer
    from megatron.checkpoint.skip_log import SkipRecord
    from megatron.model.gpt import GPTModel
    from megatron.parallel.fp8 import DelayedScaling
    from megatron.parallel.pipeline import Pipeline
    from megatron.training.batch import Batch
    from megatron.training.cuda_graph import MicroBatchGraphs
    from megatron.training.step_counter import StepCounter

    class Chunks(nn.ModuleList):
        """The chunks of the model that a rank holds; one without virtual stages."""

        def __iter__(self) -> Iterator[GPTModel]: ...

        def __getitem__(self, chunk: int) -> GPTModel: ...  # type: ignore[override]  # no slices

else:
    Chunks = nn.ModuleList

Value = TypeVar("Value")


@dataclass(frozen=True)
class Services:
    """What the loop and the step call; a test gives its own.

    `signals.received` is the signal that requests the run to stop, `clock()` the time in seconds,
    `all_reduce(tensor, axis, op="sum")` works in place and returns the tensor.
    """

    signals: SignalWatch = field(default_factory=SignalWatch)
    clock: Callable[[], float] = time.time
    all_reduce: Callable[..., torch.Tensor] = all_reduce_
    # raises where another job has taken --save over; called by rank 0
    fence: Callable[[], None] = lambda: None
    writer: Writer | None = None  # of --async-save


@dataclass
class Progress:
    """How far a run is; everything else about its position follows from these."""

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    skipped_train_samples: int = 0
    # the ranges [first, last] already skipped, ascending; those to come are `Run.plan.skips`
    skipped: list[list[int]] = field(default_factory=list)
    skipped_iterations: int = 0
    saved_skips: list[Any] = field(default_factory=list)  # `skips` of the state that was loaded
    skip_records: list[SkipRecord] = field(default_factory=list)  # of what is skipped
    data_order: dict[str, Any] = field(default_factory=dict)  # which data the samples are of
    # what checkpoints keep of features, by name (`Hook`)
    features: dict[str, Any] = field(default_factory=dict)
    history: History = field(default_factory=lambda: History().branch())


class Veto(NamedTuple):
    """An update that a feature does not let happen: log lines count `{by}-skipped` iterations, and
    give the reasons."""

    by: str
    reason: str


@dataclass
class Run:
    """One training run: its configuration and plan, its state, and the services it uses."""

    config: Config
    plan: Plan
    runtime: Runtime
    timers: Timers
    model: Chunks
    pipeline: SingleStage | Pipeline
    buffers: GradBuffers
    optimizer: MixedPrecisionOptimizer
    scheduler: OptimizerParamScheduler
    rules: BatchRules
    tokenizer: dict[str, Any]
    progress: Progress = field(default_factory=Progress)
    counters: list[StepCounter] = field(default_factory=list)
    # asked before each update, with the iteration, its loss and its gradient norm, which are those
    # of all ranks
    before_update: list[Callable[[int, float, float], Veto | None]] = field(default_factory=list)
    # of a feature: the micro-batch with weights of its tokens in `loss_mask`, in training
    weigh: Callable[[Batch], Batch] = lambda batch: batch
    # of a feature: what is trained in place of forward_step, which evaluations keep
    objective: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda step: step
    # what is validated beside the weights that are trained, by name: while the context is open the
    # model has these weights; it gives False where there are none yet
    other_weights: dict[str, Callable[[], AbstractContextManager[bool]]] = field(
        default_factory=dict
    )
    # of the metrics that forward_step returns; None before the first step
    metric_names: tuple[str, ...] | None = None
    kernels: dict[str, str] = field(default_factory=dict)  # what computes each operation
    fp8: DelayedScaling | None = None  # of --fp8-recipe delayed
    graphs: MicroBatchGraphs | None = None  # of --cuda-graph-impl local
    services: Services = field(default_factory=Services)
    script_flags: Sequence[str] = ()  # of a script's own, as typed

    def of_rank_0(self, action: Callable[[], Value]) -> Value:
        """What `action` gives on rank 0, for all ranks, which call this. Raises its CheckpointError
        on all of them."""
        answer: Any = None
        failure = None
        if self.runtime.rank == 0:
            try:
                answer = action()
            except CheckpointError as error:
                failure = error
        answer, failure = gather_objects((answer, failure), self.runtime.ctx.world)[0]
        if failure:
            raise failure
        return answer

    def advance(self, result: IterationResult) -> IterationResult:
        """Move the counters and the schedule past an iteration, or past several that are skipped at
        once; `result` with where the run is then."""
        plan = self.plan
        progress = self.progress
        last = result.iteration
        first = last - result.iterations + 1
        samples = plan.consumed_samples(last) - plan.consumed_samples(first - 1)
        progress.iteration = last
        progress.consumed_train_samples += samples
        if result.skipped == "user":
            progress.skipped_train_samples += samples
            progress.skipped_iterations += result.iterations
            if progress.skipped and progress.skipped[-1][1] == first - 1:
                progress.skipped[-1][1] = last
            else:
                progress.skipped.append([first, last])
        self.scheduler.after_iteration(
            plan.scheduled_samples(first, last), overflow=result.skipped == "overflow"
        )
        return replace(
            result,
            consumed_samples=progress.consumed_train_samples,
            skipped_samples=progress.skipped_train_samples,
            skipped_iterations=progress.skipped_iterations,
            learning_rate=self.scheduler.get_lr(),
            loss_scale=self.optimizer.loss_scale,
            adam_beta2=self.optimizer.adam_beta2,
        )
