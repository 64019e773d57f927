"""Saving a run: its tensors and its state, handed to the checkpoint store."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from megatron import log
from megatron.checkpoint import store, tensor_slices
from megatron.checkpoint.filesystem import CheckpointError
from megatron.checkpoint.sharded import TensorSlice
from megatron.checkpoint.state import OWN_MODEL, RunState
from megatron.config import args_text
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.run_directory import latest
from megatron.parallel.collectives import gather_objects
from megatron.parallel.context import Axis, ParallelContext
from megatron.parallel.sharding import Box, Sharding, is_primary_copy, local_box, sharding_of
from megatron.training.checkpointing.hardware import hardware
from megatron.training.launch.initialize import Runtime
from megatron.training.logging.flops import flops_per_sample
from megatron.training.run import Run


@dataclass(frozen=True)
class Constants:
    """What every checkpoint of a run says alike: the text of its `args`, the ranks along each axis,
    processor, device and kernels, and the floating-point operations of a sample."""

    args: str
    layout: dict[str, int]
    hardware: dict[str, Any]
    flops_per_sample: int


def constants_of(run: Run) -> Constants:
    """To be made once."""
    return Constants(
        args_text.to_text(run.config, ("local_rank",), run.script_flags),
        layout_of(run.runtime),
        hardware(run.kernels, run.runtime.device),
        flops_per_sample(run.config, run.plan),
    )


class Target(Protocol):
    """Where a save goes: a run directory, or directories of the nodes. All ranks call this."""

    def begin(self) -> Path:
        """The directory in which this rank may write now. Raises CheckpointError."""

    def commit(self, pending: PendingSave, write: Callable[[], None]) -> None:
        """Make it the newest save, say so, and remove older ones; `write` returns when this rank's
        tensors are on the disk. Raises CheckpointError, and then nothing of it is there."""


@dataclass(frozen=True)
class PendingSave:
    """A save that has begun: all that is written of it except the tensors, and the message when it
    is complete."""

    target: Target
    temporary: Path
    iteration: int
    state: RunState
    args: str
    message: str
    is_snapshot: bool


class SharedDirectory:
    """A save that all ranks write into one run directory."""

    def __init__(self, run: Run, directory: str):
        self._run = run
        self._directory = directory
        self._gather = functools.partial(gather_objects, axis=run.runtime.ctx.world)

    def begin(self) -> Path:
        return store.begin(
            self._directory,
            self._run.progress.iteration,
            rank=self._run.runtime.rank,
            gather=self._gather,
            fence=self._run.services.fence,
        )

    def commit(self, pending: PendingSave, write: Callable[[], None]) -> None:
        store.commit(
            pending.temporary,
            pending.iteration,
            write,
            pending.state,
            pending.args,
            rank=self._run.runtime.rank,
            world_size=self._run.runtime.world_size,
            gather=self._gather,
            fence=self._run.services.fence,
        )
        log.print_rank_0(pending.message)
        if self._run.runtime.rank == 0:
            _clean_up(self._run)


def own_tensors(run: Run) -> Iterator[tuple[str, Sharding, Axis, list[tuple[Box, torch.Tensor]]]]:
    """(name, its layout, axis of the ranks that hold the same, its parts with their places in the
    whole) of every tensor of the run on this rank: weights, then optimizer state."""
    ctx = run.runtime.ctx
    run.buffers.gathering.wait()
    for p in run.model.parameters():
        sharding = sharding_of(p)
        same = ctx.replicas(sharding.replicas)
        held = run.buffers.held(p)
        span = getattr(held, "span", None)
        axis = same.data if span is None else same.instances
        yield sharding.name, sharding, axis, boxes_of(sharding, ctx, held, span)
    # before the optimizer's, of which ranks have different numbers: `own_slices` counts
    for name, (sharding, tensor) in run.fp8.tensors().items() if run.fp8 else ():
        yield name, sharding, ctx.dp_cp, boxes_of(sharding, ctx, tensor)
    owned = {sharding_of(param).name: param for param in run.buffers.owned}
    for name, tensor in run.optimizer.tensors().items():
        param = owned[name.split(".", 2)[2]]
        sharding = sharding_of(param)
        yield (
            name,
            sharding,
            ctx.replicas(sharding.replicas).instances,
            boxes_of(sharding, ctx, tensor, getattr(param, "span", None)),
        )


def boxes_of(
    sharding: Sharding,
    ctx: ParallelContext,
    tensor: torch.Tensor,
    span: tuple[int, int] | None = None,
) -> list[tuple[Box, torch.Tensor]]:
    """(place in the whole tensor, view) of this rank's part, or of the elements `span` of it, which
    `tensor` then holds."""
    local = local_box(sharding, ctx)
    if span is None:
        return [(local, tensor)]
    boxes = []
    done = 0
    for box in tensor_slices.of_range(*span, tensor_slices.extent(local)):
        view = tensor[done : done + tensor_slices.volume(box)].view(tensor_slices.extent(box))
        done += view.numel()
        boxes.append(
            (
                tuple(
                    (start + low, start + high)
                    for (start, _), (low, high) in zip(local, box, strict=True)
                ),
                view,
            )
        )
    return boxes


def save_checkpoint(run: Run, constants: Constants | None = None) -> PendingSave | None:
    """Save a checkpoint of the current iteration, or start an asynchronous save (--async-save),
    which `finish_save` completes. `constants`: if they exist already. Raises CheckpointError if it
    cannot be written.
    """
    directory = save_directory(run.config.checkpoint)
    iteration = run.progress.iteration
    log.detail(f"saving checkpoint at iteration {iteration:7d} to {directory}")
    return begin_save(
        run,
        constants or constants_of(run),
        SharedDirectory(run, directory),
        own_slices(run),
        f" checkpoint of iteration {iteration} saved to {directory}"
        if run.config.logging.is_short
        else f"  successfully saved checkpoint at iteration {iteration:7d} to {directory}",
    )


def save_snapshot(run: Run, constants: Constants) -> PendingSave | None:
    """Like `save_checkpoint`, over the older of the two snapshots (--snapshot-interval)."""
    iteration = run.progress.iteration
    c = run.config.checkpoint
    from megatron.checkpoint import retention

    def choose() -> str:
        run.services.fence()
        return str(retention.free_slot(c.slots_of(save_directory(c)), iteration))

    slot = run.of_rank_0(choose)
    return begin_save(
        run,
        constants,
        SharedDirectory(run, slot),
        own_slices(run),
        f" snapshot of iteration {iteration} saved to {slot}"
        if run.config.logging.is_short
        else f"  saved snapshot at iteration {iteration:7d} to {slot}",
        is_snapshot=True,
    )


def save_directory(c: CheckpointConfig) -> str:
    """--save, in a run that saves."""
    assert c.save is not None
    return c.save


def begin_save(
    run: Run,
    constants: Constants,
    target: Target,
    slices: Sequence[TensorSlice],
    message: str,
    is_snapshot: bool = False,
) -> PendingSave | None:
    """Write this rank's `slices` and the state to a target; with --async-save only the copy is made
    here."""
    rank = run.runtime.rank
    iteration = run.progress.iteration
    temporary = target.begin()
    state = state_of(run)
    samples = state.consumed_train_samples - state.skipped_train_samples
    state = replace(
        state,
        num_floating_point_operations=constants.flops_per_sample * samples,
        layout=constants.layout,
        hardware=constants.hardware,
    )
    pending = PendingSave(target, temporary, iteration, state, constants.args, message, is_snapshot)
    if run.services.writer is None:
        target.commit(pending, lambda: store.write_rank_files(temporary, rank, slices, iteration))
        return None
    run.services.writer.start(slices, temporary, rank, iteration, run.runtime.device)
    log.detail(f"  scheduled an async save at iteration {iteration:7d} to {temporary.parent}")
    return pending


def finish_save(run: Run, pending: PendingSave) -> None:
    """Wait until all ranks have written the pending save of --async-save, and give it its final
    name; all ranks call this.

    Raises CheckpointError if it could not be written; it is no longer pending either way.
    """
    assert run.services.writer is not None  # it writes what is pending
    pending.target.commit(pending, run.services.writer.result)


def own_slices(run: Run) -> list[TensorSlice]:
    """What this rank saves: each tensor of the run is written by one rank."""
    config = run.config
    ctx = run.runtime.ctx
    slices = []
    for number, (name, sharding, copies, own) in enumerate(own_tensors(run)):
        is_writer = is_primary_copy(sharding, ctx) and number % copies.size == copies.rank
        if is_writer and not (config.checkpoint.no_save_optim and name.startswith("optimizer.")):
            slices += [
                TensorSlice(name, sharding.shape, tensor.dtype, box, tensor) for box, tensor in own
            ]
    return slices


def _clean_up(run: Run) -> None:
    """Remove what the checkpoint just written makes superfluous. A failure is a warning."""
    c = run.config.checkpoint
    directory = save_directory(c)
    try:
        run.services.fence()
        if c.keep_last:
            from megatron.checkpoint import retention

            removed = retention.prune(directory, c.keep_last, c.keep_every)
            if removed:
                log.print_rank_0(
                    f"  removed checkpoints of iterations {', '.join(map(str, removed))}"
                )
    except CheckpointError as error:
        log.print_rank_0(f"WARNING: older checkpoints stay: {error}")


def what_remains(c: CheckpointConfig) -> str:
    """What can be resumed from after a save that failed, for a message."""
    directory = save_directory(c)
    try:
        newest = latest(directory)
    except CheckpointError as error:
        return str(error)
    return (
        f"{directory} holds none yet"
        if newest is None
        else f"The last good one in {directory} is of iteration {newest}"
    )


def state_of(run: Run) -> RunState:
    """The counters and small states of the run as it is now."""
    progress = run.progress
    return RunState(
        iteration=progress.iteration,
        consumed_train_samples=progress.consumed_train_samples,
        consumed_valid_samples=progress.consumed_valid_samples,
        skipped_train_samples=progress.skipped_train_samples,
        scheduler=run.scheduler.state_dict(),
        optimizer=run.optimizer.counters(),
        data={
            "order": progress.data_order,
            "tokenizer": run.tokenizer,
            **({OWN_MODEL: run.plan.own_model} if run.plan.own_model else {}),
        },
        skips=[record.line() for record in progress.skip_records],
        skipped=[list(iterations) for iterations in progress.skipped],
        features=dict(progress.features),
        history=progress.history.dump(progress.iteration),
    )


def layout_of(runtime: Runtime) -> dict[str, int]:
    """How many ranks this run has along each axis."""
    ctx = runtime.ctx
    return {
        "world_size": runtime.world_size,
        "tp": ctx.tp.size,
        "pp": ctx.pp.size,
        "cp": ctx.cp.size,
        "dp": ctx.dp.size,
    }


def ranks_text(layout: dict[str, int]) -> str:
    """`layout` as text: the number of ranks, and the axes with more than one."""
    count = layout["world_size"]
    names = {"dp": "data", "tp": "tensor", "pp": "pipeline", "cp": "context"}
    sizes = [f"{name} {layout[axis]}" for axis, name in names.items() if layout[axis] != 1]
    return f"{count} rank{'s' * (count != 1)}" + f" ({' x '.join(sizes)})" * bool(sizes)
