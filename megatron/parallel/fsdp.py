"""Sharded gradients (ZeRO-2) and weights (ZeRO-3) by unit: the embedding, a layer, or final norm
and output layer.

Rajbhandari et al. 2020 (ZeRO), by unit as Zhao et al. 2023 (FSDP). What is there for a while only
lies in storages that are emptied and filled again, so views of it (parameters, `main_grad`, what
autograd saved) stay what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

from megatron.config.plan.buckets import Assign, UnitName, unit_of
from megatron.config.plan.units import Use, uses
from megatron.parallel.collectives import (
    Pending,
    all_reduce_,
    start_all_gather_,
    start_all_reduce,
    start_broadcast_shards_,
    start_reduce_scatter_,
    start_reduce_shards_,
)
from megatron.parallel.context import ParallelContext
from megatron.parallel.ddp import GradBuffers
from megatron.parallel.flat_buffers import FlatBuffers, GradBucket, Placed, Spans, part_of
from megatron.parallel.gathering import Gathering
from megatron.parallel.reduction import Reduction
from megatron.parallel.sharding import Parameter
from megatron.parallel.single_stage import Backward


class Piece(NamedTuple):
    """A bucket that several ranks share. `grads`, `weights`: all of it, for a while (None: the
    weights stay); `total`, `part`: this rank's range of it, all the time."""

    bucket: GradBucket
    grads: torch.Tensor
    total: torch.Tensor
    weights: torch.Tensor | None
    part: torch.Tensor

    @property
    def own(self) -> slice:
        """This rank's range of `grads` and `weights`."""
        start = self.bucket.range.start
        return slice(self.bucket.shard.start - start, self.bucket.shard.stop - start)

    def shards(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The ranges of all ranks."""
        cuts = [cut - self.bucket.range.start for cut in self.bucket.layout.cuts]
        return [flat[start:stop] for start, stop in pairwise(cuts)]


class Unit:
    """What is gathered and reduced together. missing: parameters without a gradient in this
    backward pass, None outside of it. gathers: under way, None where weights are not there."""

    def __init__(self) -> None:
        self.params: list[Parameter] = []
        self.pieces: list[Piece] = []
        self.missing: int | None = None
        self.gathers: list[Pending] | None = None


class ShardedBuffers(GradBuffers):
    """GradBuffers of a rank that keeps of gradients, and with `frees_weights` of weights, its own
    shard.

    A unit's `main_grad` is there from the start of its backward until all its gradients have
    arrived; their sums over the ranks are then added to this rank's range in `flat`. Instances of
    the optimizer, and copies that saw part of their gradient, are summed once in a step.
    `initialize` gives parameters that had no memory their values, when a bucket of them is there.
    """

    reduction: UnitReduction
    gathering: UnitGathering

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        ctx: ParallelContext,
        grad_dtype: torch.dtype,
        *,
        frees_weights: bool,
        initialize: Callable[[Sequence[Parameter]], None] = lambda params: None,
        overlap_grad_reduce: bool = False,
        overlap_param_gather: bool = False,
        assign: Assign | None = None,
        fp32_accumulation: bool = False,
    ):
        self.frees_weights = frees_weights
        self._initialize = initialize
        self.units: dict[UnitName, Unit] = {}
        self._held: dict[nn.Parameter, torch.Tensor] = {}
        FlatBuffers.__init__(self, parameters, ctx, grad_dtype, None, assign, units=True)
        self.totals = dict(zip(self.buckets, self.flat.split(self._ranges()), strict=True))
        self.reduction = UnitReduction(self, ctx, overlap_grad_reduce, fp32_accumulation)
        self.gathering = UnitGathering(self, overlap_param_gather)

    def _ranges(self) -> list[int]:
        return [bucket.shard.stop - bucket.shard.start for bucket in self.buckets]

    @torch.no_grad()
    def _place(self, params: list[Parameter], dtype: torch.dtype, spans: Spans | None) -> Placed:
        assert spans is not None, "without shards there are plain GradBuffers"
        ranges = self._ranges()
        weights = self._like.new_zeros(sum(ranges) if self.frees_weights else self.layout.size)
        if self.frees_weights:
            parts = list(weights.split(ranges))
        else:
            parts = [weights[bucket.shard] for bucket in self.buckets]
        whole: list[torch.Tensor | None] = []
        for bucket, part in zip(self.buckets, parts, strict=True):
            all_weights = part if self.frees_weights else weights[bucket.range]
            frees = self.frees_weights and bucket.replicas.shard.size > 1
            if frees:
                all_weights = part.new_zeros(bucket.range.stop - bucket.range.start)
            for p, view in self._views(all_weights, bucket):
                if p.untyped_storage().nbytes():
                    view.copy_(p)
                p.data = view
            if frees:
                self._initialize(bucket.params)
                start = bucket.range.start
                part.copy_(all_weights[bucket.shard.start - start : bucket.shard.stop - start])
                _empty(all_weights)
            whole.append(all_weights if frees else None)
        # after the weights: the parameters' own memory is free by then
        flat = torch.zeros(sum(ranges), dtype=dtype, device=self._like.device)
        for bucket, total, all_weights, part in zip(
            self.buckets, flat.split(ranges), whole, parts, strict=True
        ):
            unit = self.units.setdefault(unit_of(bucket.params[0].sharding.name), Unit())
            unit.params += bucket.params
            grads = total
            if bucket.replicas.shard.size > 1:
                grads = total.new_empty(bucket.range.stop - bucket.range.start)
                unit.pieces.append(Piece(bucket, grads, total, all_weights, part))
            for p, view in self._views(grads, bucket):
                p.main_grad = view
            if grads is not total:
                _empty(grads)
            for number in bucket.layout.members:
                start, stop = spans[number]
                first = self.layout.starts[number] + start - bucket.shard.start if stop else 0
                own = slice(first, first + stop - start)
                p = params[number]
                self._held[p] = part_of(p, spans[number], part[own], total[own])
        return weights, flat, [self._held[p] for p in params]

    def _views(
        self, flat: torch.Tensor, bucket: GradBucket
    ) -> Iterator[tuple[Parameter, torch.Tensor]]:
        """Each parameter of a bucket with its part of `flat`."""
        for number, p in zip(bucket.layout.members, bucket.params, strict=True):
            start = self.layout.starts[number] - bucket.range.start
            yield p, flat[start : start + p.numel()].view(p.shape)

    def held(self, p: nn.Parameter) -> torch.Tensor:
        """As FlatBuffers'."""
        return self._held.get(p, p.data) if self.frees_weights else p.data

    def summed(self, bucket: GradBucket) -> tuple[torch.Tensor, torch.Tensor]:
        """As FlatBuffers', of what is summed once in a step."""
        return self.totals[bucket], self.totals[bucket]

    def zero(self, micro_batches: int = 1) -> None:
        """Zero all sums."""
        for name, unit in self.units.items():
            assert unit.missing is None and unit.gathers is None, (
                f"unit {name} is there between two steps"
            )
        self.reduction.wait()  # of passes without `reduce`, as a step that is verified has them
        self.flat.zero_()

    def reduce(self) -> None:
        """As GradBuffers'."""
        self.gathering.wait()
        self.reduction.run()

    def each_backward(self, backward: Backward) -> Backward:
        """As GradBuffers': after each backward pass its gradients are reduced."""

        def whole(*args: Any) -> None:
            backward(*args)
            self.reduction.close()

        return whole


class UnitReduction(Reduction):
    """Adds up a unit's gradients over the ranks that saw other tokens as soon as they are complete,
    in each micro-batch. With `overlap` it waits for a sum when the next one starts.

    Units start in the order in which their backward passes begin, whatever gradients arrive first:
    collectives match by their order.
    """

    def __init__(
        self, buffers: ShardedBuffers, ctx: ParallelContext, overlap: bool, fp32_accumulation: bool
    ):
        self.instead = None
        self._buffers: ShardedBuffers = buffers
        self._ctx = ctx
        self._fp32_accumulation = fp32_accumulation
        self._overlap = overlap
        self._in_pass = False
        self._queue: list[Unit] = []
        self._under_way: list[tuple[Piece, Callable[[], torch.Tensor]]] = []
        for unit in buffers.units.values():
            for p in unit.params:
                p.register_post_accumulate_grad_hook(partial(self._arrived, unit))

    def open(self, unit: Unit, is_last: bool) -> None:
        """The backward pass of a module of `unit` begins, of the last one that it has."""
        if not self._in_pass:  # what the pass before left under way may be this unit's
            self.wait()
            self._in_pass = True
        if unit.missing is None:
            unit.missing = len(unit.params)
            for piece in unit.pieces:
                _fill(piece.grads)
                stale = {p for p in piece.bucket.params if getattr(p, "overwrites", False)}
                for p in stale:
                    p.is_stale = True
                if not stale:
                    piece.grads.zero_()
                    continue
                for p in piece.bucket.params:
                    if p not in stale:
                        p.main_grad.zero_()
        if is_last and unit not in self._queue:  # an output layer is called again for each depth
            self._queue.append(unit)

    def _arrived(self, unit: Unit, p: Parameter) -> None:
        assert unit.missing, f"{p.sharding.name}: a gradient outside of its unit's backward pass"
        unit.missing -= 1
        while self._queue and not self._queue[0].missing:
            self._begin(self._queue.pop(0))

    def close(self) -> None:
        """A backward pass ends: reduce the units of which some parameters had no gradient."""
        for unit in self._queue:
            self._begin(unit)
        self._queue.clear()
        self._in_pass = False

    def _begin(self, unit: Unit) -> None:
        self.wait()
        unit.missing = None
        self._buffers.gathering.release(unit)
        for piece in unit.pieces:
            for p in piece.bucket.params:
                if getattr(p, "is_stale", False):
                    p.main_grad.zero_()
                    p.is_stale = False
            self._under_way.append((piece, self.start(piece)))
            if not self._overlap:
                self.wait()

    def start(self, piece: Piece) -> Callable[[], torch.Tensor]:
        """Start to sum the gradients of a piece; the function waits and returns this rank's range
        of them."""
        axis = piece.bucket.replicas.shard
        if piece.bucket.layout.whole_params:
            return start_reduce_shards_(piece.shards(piece.grads), axis)
        return start_reduce_scatter_(piece.grads, axis, self._fp32_accumulation)

    def wait(self) -> None:
        """Wait for the sums under way, and add them up."""
        for piece, work in self._under_way:
            piece.total.add_(work())
            _empty(piece.grads)
        self._under_way.clear()

    def run(self) -> None:
        """All micro-batches are done: sum the shards over what has not been summed yet."""
        self.wait()
        super().run()

    def sum_over_ranks(self, buckets: Sequence[GradBucket]) -> None:
        """Sum the shards of copies that saw part of their gradient and of all instances."""
        started = []
        for bucket in buckets:
            total = self._buffers.totals[bucket]
            for axis in bucket.layout.partial:
                all_reduce_(total, self._ctx.axis(axis))
            if bucket.replicas.instances.size > 1 and total.numel():
                started.append(start_all_reduce(total, bucket.replicas.instances))
        for reduction in started:
            reduction()


class UnitGathering(Gathering):
    """Weights of the modules that compute, and with `overlap` of the next ones; where the buffers
    keep all weights they are gathered after the update, as Gathering does."""

    _buffers: ShardedBuffers

    def start(self) -> None:
        """As Gathering's; freed weights are gathered when they are needed."""
        if not self._buffers.frees_weights:
            super().start()

    def release(self, unit: Unit) -> None:
        """Free the weights of a unit, if they are there."""
        if unit.gathers is None:
            return
        self._arrive(unit)  # gathered ahead and not used: the memory is still written
        unit.gathers = None
        for piece in unit.pieces:
            assert piece.weights is not None
            _empty(piece.weights)

    def _gather(self, unit: Unit) -> None:
        """Start to gather the weights of a unit that are not there."""
        if unit.gathers is not None:
            return
        unit.gathers = []
        for piece in unit.pieces:
            assert piece.weights is not None
            _fill(piece.weights)
            piece.weights[piece.own].copy_(piece.part)
            axis = piece.bucket.replicas.shard
            if piece.bucket.layout.whole_params:
                work = start_broadcast_shards_(piece.shards(piece.weights), axis)
            else:
                work = start_all_gather_(piece.weights, axis)
            unit.gathers.append(work)

    def _arrive(self, unit: Unit) -> None:
        """Wait for the weights of a unit."""
        assert unit.gathers is not None
        for gather in unit.gathers:
            gather()
        unit.gathers.clear()

    def _need(self, units: Iterable[Unit], following: Iterable[Unit]) -> None:
        """Wait for the weights of units; start to gather those of `following`."""
        if not self._buffers.frees_weights:
            return
        for unit in units:
            self._gather(unit)
            self._arrive(unit)
        if self._overlap:
            for unit in following:
                self._gather(unit)

    def wait_in_forward(self, model: nn.Module) -> None:
        """From now on each unit has its weights and `main_grad` while its modules compute. `model`
        has the chunks of this rank, each with its `calls` (`GPTModel`)."""
        units = self._buffers.units
        name_of: dict[Any, UnitName] = {p: name for name in units for p in units[name].params}
        if not self._buffers.frees_weights:
            super().wait_in_forward(model)
        chunk: Any
        for chunk in model.children():
            modules = []
            names = []
            for called in chunk.calls():
                params = [p for module in called for p in module.parameters() if p in name_of]
                if params:
                    modules.append(called[0])
                    names.append(tuple(dict.fromkeys(name_of[p] for p in params)))
            last = chunk.output_layer is not None
            for module, in_names in zip(modules, uses(names, last), strict=True):
                use = Use(*(tuple(units[name] for name in each) for each in in_names))
                if self._buffers.frees_weights:
                    module.register_forward_pre_hook(partial(self._before_forward_of, use))
                module.register_forward_hook(partial(self._after_forward_of, use))

    @torch.no_grad()
    def _before_forward_of(self, use: Use[Unit], module: nn.Module, args: Any) -> None:
        self._need(use.units, () if _in_backward() else use.ahead)

    def _after_forward_of(
        self, use: Use[Unit], module: nn.Module, args: Any, output: torch.Tensor
    ) -> None:
        if _in_backward():  # recomputed: its backward, whose hook is there, frees it
            return
        keeps: tuple[Unit, ...] = ()
        if output.requires_grad:
            output.register_hook(partial(self._before_backward_of, use))
            keeps = use.keeps
        for unit in use.units:
            if unit not in keeps:
                self.release(unit)

    @torch.no_grad()
    def _before_backward_of(self, use: Use[Unit], grad: torch.Tensor) -> None:
        for unit in use.frees:
            self.release(unit)
        for unit in use.units:
            self._buffers.reduction.open(unit, unit in use.closes)
        self._need(use.again, use.behind)


def _in_backward() -> bool:
    """Is this called by autograd, as where activations are recomputed?"""
    return torch._C._current_graph_task_id() != -1


def _fill(flat: torch.Tensor) -> None:
    """Give a flat tensor its memory, if it has none."""
    storage = flat.untyped_storage()
    if not storage.nbytes():
        storage.resize_(flat.numel() * flat.itemsize)


def _empty(flat: torch.Tensor) -> None:
    flat.untyped_storage().resize_(0)
