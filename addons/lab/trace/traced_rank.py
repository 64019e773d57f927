"""One rank of any cluster: the trainer's own build and training step on the meta device, in a
simulated process group, recorded."""

from __future__ import annotations

import contextlib
import io
import itertools
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from megatron.config.plan.plan import Plan, assignment, embedding_stages
from megatron.config.plan.transfers import PARALLELISM, axis_sizes, gradients
from megatron.config.tree import Config
from megatron.data.tokenizers.build import Tokenizer
from megatron.optimizer.optimizer import MixedPrecisionOptimizer
from megatron.parallel.context import ParallelContext
from megatron.parallel.fsdp import ShardedBuffers
from megatron.training import script_args
from megatron.training.batch import MicroBatch
from megatron.training.build import build_run
from megatron.training.launch.initialize import Runtime
from megatron.training.logging.subset_metrics import SubsetMetrics
from megatron.training.run import Run
from megatron.training.step import ForwardStep, train_step

from .fused_kernels import fused_kernels
from .recorder import Retained, StepRecorder, Timeline, TraceError
from .simulated_group import Message, serve_meta, simulated_ranks

META = torch.device("meta")
# Of several axes with the same ranks and group the first one counts.
AXES = (*PARALLELISM, "optimizer", "model", "world")
# Memory made in a step that may outlive it: names of metrics, scales, a first use's tables.
RETAINED_BYTES = 1 << 20


@dataclass(frozen=True)
class RankTrace:
    """What one rank does in a training step.

    `memory`: bytes by kind at the peak of the step, `peak` their sum, `peak_operation` where;
    `kind_peaks`: the most of each kind at any moment; `activations`: the most that any forward pass
    left for backward, its own temporaries freed; `build_peak`: the most while building.
    `flops` and `operations` by operation, `launches` by phase, `messages` with the axis of each;
    `timeline`: memory over the step.
    """

    rank: int
    stage: int
    memory: dict[str, int]
    peak: int
    peak_operation: str
    kind_peaks: dict[str, int]
    activations: int
    build_peak: int
    flops: dict[str, int]
    operations: dict[str, int]
    launches: dict[str, int]
    messages: list[tuple[str, Message]] = field(repr=False)
    timeline: Timeline = field(repr=False)
    metric_names: tuple[str, ...] = ()


def traced_config(config: Config) -> Config:
    """The configuration as it is traced: a GPU's, eager."""
    return replace(
        config,
        training=replace(config.training, device="cuda", torch_compile=False),
        logging=replace(config.logging, log_format="short"),
    )


def trace_rank(
    config: Config,
    plan: Plan,
    rank: int,
    tokenizer: Tokenizer,
    forward_step: ForwardStep,
    metric_names: tuple[str, ...] | None = None,
) -> RankTrace:
    """Build `rank` and run the step with the most micro-batches. `metric_names`: those that the
    last pipeline stage returns, if they are known. Raises TraceError."""
    recorder = StepRecorder(
        rank,
        allow_float64=config.precision.fp64,
        expert_capacity=config.model.moe_expert_capacity_factor,
    )
    with simulated_ranks(plan.world_size, rank), fused_kernels(), recorder:
        ctx = ParallelContext(config.parallel, plan.world_size, rank, embedding_stages(config))
        for ring in (ctx.cp, ctx.cp_ring):
            serve_meta(ring.group)
        runtime = Runtime(META, ctx, plan.world_size, rank)
        with contextlib.redirect_stdout(io.StringIO()):
            run = build_run(config, plan, runtime, recorder, tokenizer)
            script_args.connected(run.timers, ctx)
        _use_fused_update(run.optimizer)
        _count_subsets(run)
        _name_kinds(run, recorder)
        build_peak = recorder.peak
        _check_retained(recorder.unnamed(), "training begins, of no parameter, gradient or moment")
        is_last = run.pipeline.is_last(len(run.model) - 1)
        if not is_last:
            run.metric_names = metric_names or ()
        recorder.begin_step()
        train_step(run, forward_step, _samples(config), plan.train_iters)
        recorder.in_step = False
        recorder.check_waited()
        _check_retained(recorder.retained(), "the step")
        names = _axis_names(ctx)
        _check_reductions(config, plan, ctx.pp.rank, recorder, names)
        return RankTrace(
            rank,
            ctx.pp.rank,
            recorder.live_at_peak,
            recorder.peak,
            recorder.peak_operation,
            recorder.kind_peaks,
            recorder.activations,
            build_peak,
            dict(recorder.flops),
            dict(recorder.operations.most_common()),
            dict(recorder.launches),
            [(names.get(message.group, "world"), message) for message in recorder.messages],
            recorder.timeline,
            run.metric_names or (),
        )


def _samples(config: Config) -> Any:
    """Micro-batches of one shape on the host, as a loader hands them out."""
    rows = config.training.micro_batch_size
    length = config.model.seq_length
    packed = config.packed
    subset = config.counts_subsets and not packed
    shape = (1, 4, rows * length) if packed else (rows, length + 1 + subset)
    micro_batch = MicroBatch(torch.zeros(shape, dtype=torch.int64), packed, subset)
    return itertools.repeat(micro_batch)


def _count_subsets(run: Run) -> None:
    """As if all data were of one subset."""
    config = run.config
    packed = config.packed
    if config.counts_subsets:
        ctx = run.runtime.ctx
        subsets = SubsetMetrics(("train",), ctx, config.logging.log_accuracy, packed)
        run.counters.append(subsets)


def _use_fused_update(optimizer: MixedPrecisionOptimizer) -> None:
    """torch takes its fused optimizer kernels on a GPU, and the others on the meta device."""
    inner = optimizer.inner
    for group in inner.param_groups:
        if "fused" in group:
            group["fused"] = True
            group["foreach"] = False
    for state in inner.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].to(META)


def _name_kinds(run: Run, recorder: StepRecorder) -> None:
    """Which of the memory made while building is what."""
    optimizer = run.optimizer
    states = [
        value
        for state in optimizer.inner.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    main = [weight for group in optimizer.param_groups for weight in group["params"]]
    scales = [] if run.fp8 is None else [run.fp8.state, run.fp8.step_amax]
    recorder.adopt([*main, *states, *scales], "optimizer")
    recorder.adopt(run.model.buffers(), "buffers")
    # of fp32 parameters main weights are the parameters themselves
    recorder.adopt(run.model.parameters(), "weights")
    recorder.adopt([run.buffers.flat], "gradients")
    if isinstance(run.buffers, ShardedBuffers):
        for piece in (piece for unit in run.buffers.units.values() for piece in unit.pieces):
            recorder.adopt([piece.grads], "whole gradients")
            if piece.weights is not None:
                recorder.adopt([piece.weights], "whole weights")
                recorder.adopt([piece.part], "weights")


def _check_retained(tensors: list[Retained], when: str) -> None:
    """Raise TraceError for memory that building or a step leaves behind."""
    together = sum(tensor.nbytes for tensor in tensors)
    if together > RETAINED_BYTES:
        largest = tensors[0]
        raise TraceError(
            f"{largest.line}: {largest.operation} makes {largest.nbytes:,} bytes that are still "
            f"alive after {when} ({together:,} bytes in {len(tensors)} tensors): something keeps a "
            "reference [trace-memory-kept]"
        )


def _check_reductions(
    config: Config, plan: Plan, stage: int, recorder: StepRecorder, names: dict[str, str]
) -> None:
    """Raise TraceError for gradients that are not summed over the ranks of the plan."""
    if assignment(config):
        return  # ranks of a group send different amounts
    sizes = axis_sizes(config, plan)
    planned: Counter[tuple[str, str]] = Counter()
    for transfer in gradients(config, plan, stage):
        if sizes[transfer.axis] > 1 and transfer.operation != "all-gather":
            planned[_replicas(transfer.axis), transfer.operation] += transfer.nbytes
    traced: Counter[tuple[str, str]] = Counter()
    lines = {}
    for message, line in recorder.reductions:
        # gloo scatters sums by an exchange of parts
        operation = "reduce-scatter" if message.operation == "all-to-all" else message.operation
        key = _replicas(names.get(message.group, "world")), operation
        traced[key] += message.nbytes
        lines[key] = line
    for (axis, operation), nbytes in traced.items():
        if nbytes > planned[axis, operation]:
            raise TraceError(
                f"{lines[axis, operation]}: {operation} of {nbytes:,} bytes of gradients over the "
                f"ranks of {axis}, where the plan has {planned[axis, operation]:,}: sum them over "
                "the ranks that have other samples or another part of the gradient "
                "[trace-wrong-group]"
            )
    for (axis, operation), nbytes in planned.items():
        if traced[axis, operation] < nbytes:
            raise TraceError(
                f"{operation} of {traced[axis, operation]:,} bytes of gradients over the ranks of "
                f"{axis}, where the plan has {nbytes:,}: replicas would differ [trace-wrong-group]"
            )


def _replicas(axis: str) -> str:
    """Experts may be replicated over the ranks of everything else."""
    return axis.removeprefix("expert_")


def _axis_names(ctx: ParallelContext) -> dict[str, str]:
    """The axis of each process group by torch's name of the group."""
    names: dict[str, str] = {}
    experts = {"expert_shard": ctx.experts.shard, "expert_instances": ctx.experts.instances}
    for name in AXES:
        axis = experts[name] if name in experts else ctx.axis(name)
        if axis.group is not None:
            names.setdefault(axis.group.group_name, name)
    return names
