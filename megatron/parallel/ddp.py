"""Data parallelism: flat buffers of gradients (and, sharded, of parameters), reduced and
gathered by bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from megatron.config.plan import buckets as flat_buckets
from megatron.config.plan.zero_partition import Assign, Partition, Shared
from megatron.parallel.collectives import (
    Pending,
    all_reduce_,
    start_all_gather_,
    start_all_reduce,
    start_broadcast_shards_,
    start_reduce_scatter_,
    start_reduce_shards_,
)
from megatron.parallel.context import ParallelContext, Replicas
from megatron.parallel.sharding import Parameter


class BucketState:
    """A bucket of the layout in a step: its missing gradients, its communication in progress.

    range, shard: of the flat buffers, that of the bucket and that of this rank's shard of it.
    """

    def __init__(self, layout: flat_buckets.Bucket, params: list[Parameter], replicas: Replicas):
        self.layout = layout
        self.replicas = replicas
        self.params = params
        self.range = slice(layout.start, layout.stop)
        self.shard = slice(*layout.shard(replicas.shard.rank))
        self.missing = 0  # parameters that wait for gradients of this step
        self.reduction: Pending | None = None
        self.gather: Pending | None = None


class GradBuffers:
    """One flat buffer of `grad_dtype` in which every parameter has a 64-byte aligned view,
    `p.main_grad`.

    One collective over a range of one buffer replaces one for each parameter, which would be all
    latency. The buffer is cut into buckets in the order in which backward completes gradients, the
    last layer first: a bucket is then complete while backward still computes those after it, and
    its sum is hidden behind that.

    A step: `zero`; the backward passes; `reduce`; an update of `owned`; `gather_weights`.

    Backward: a kernel may add a weight gradient to `p.main_grad` itself; what autograd delivers as
    `p.grad` is added by a hook (or, where the dtypes agree, `p.grad` is the view and autograd adds
    in place). Where `p.overwrites`, the kernel replaces what is in `p.main_grad` as long as
    `p.is_stale`, which `zero` sets instead of writing zeros.

    Reduction: a bucket's gradients are summed over the ranks that saw other tokens: reduce-scatter
    over `ctx.shard`, all-reduce over `ctx.instances`; of experts, which fewer ranks hold, over
    those of `ctx.experts`. With `overlap_grad_reduce` that starts as soon as each of its parameters
    has the gradients of all micro-batches. With `fp32_accumulation` a reduce-scatter of 16-bit
    gradients adds in fp32 and rounds once.

    Update: without shards every rank has all sums and updates all weights (`owned` are the
    parameters). With shards it has those of its range of each bucket: `owned` are flat views of
    that range, parameter by parameter, each with the `sharding` of its parameter and a `span`
    (start, stop) in its elements; weights live in a flat buffer too (`weights`), which
    `gather_weights` fills. Where `assign` gives whole parameters to ranks, a rank's range of a
    bucket are those; its sums are then reduced to it, and its weights broadcast.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        ctx: ParallelContext,
        grad_dtype: torch.dtype,
        *,
        bucket_size: int | None = None,
        overlap_grad_reduce: bool = False,
        overlap_param_gather: bool = False,
        assign: Assign | None = None,
        fp32_accumulation: bool = False,
    ):
        params = [cast(Parameter, p) for p in parameters if p.requires_grad]
        self._ctx = ctx
        sharded = max(ctx.shard.size, ctx.experts.shard.size) > 1
        experts_apart = ctx.experts is not ctx.dense
        experts = [experts_apart and p.sharding.replicas == "experts" for p in params]
        partition = _partition(assign, params, experts, ctx) if assign and sharded else None
        layout = flat_buckets.lay_out(
            [p.numel() for p in params],
            [tuple(axis for axis in p.sharding.partial if ctx.axis(axis).size > 1) for p in params],
            bucket_size=bucket_size,
            shards=ctx.shard.size,
            itemsize=min(grad_dtype.itemsize, params[0].dtype.itemsize),
            partition=partition,
            experts=experts,
            expert_shards=ctx.experts.shard.size,
        )
        self.layout = layout
        self.buckets = []
        for bucket in layout.buckets:
            members = [params[number] for number in bucket.members]
            replicas = ctx.experts if bucket.experts else ctx.dense
            self.buckets.append(BucketState(bucket, members, replicas))
        self.params = [p for bucket in self.buckets for p in bucket.params]
        # weights first: a parameter's own memory is free before the gradients take theirs
        self.weights = _flatten(params, layout) if sharded else None
        self.flat = torch.zeros(layout.size, dtype=grad_dtype, device=params[0].device)
        for p, start in zip(params, layout.starts, strict=True):
            p.main_grad = self.flat[start : start + p.numel()].view(p.shape)
            if p.dtype == grad_dtype:
                p.grad = p.main_grad
            else:
                p.register_post_accumulate_grad_hook(_add_to_main_grad)
        self.owned: Sequence[torch.Tensor] = params
        if sharded:
            self.owned = _owned(params, layout.spans(ctx.shard.rank, ctx.experts.shard.rank))
        self._overlap_gather = overlap_param_gather
        self._fp32_accumulation = fp32_accumulation
        # gradients still to come, when they are counted
        self._expected: dict[Parameter, int] = {}
        # the first bucket whose reduction has not started
        self._next = 0
        # called by `reduce`, which then sums nothing itself; while it is set no sum starts earlier,
        # so it sees this rank's own gradients
        self.reduce_instead: Callable[[], None] | None = None
        if overlap_grad_reduce and ctx.dp_cp.size > 1:
            self._count_gradients()

    def _count_gradients(self) -> None:
        """Reduce each bucket during the backward pass, as soon as its gradients are complete."""
        for bucket in self.buckets:
            for p in bucket.params:
                p.register_post_accumulate_grad_hook(partial(self._gradient_ready, bucket))
                self._expected[p] = 0

    def zero(self, micro_batches: int = 1) -> None:
        """Zero all gradients, for a step of that many micro-batches, each with one gradient of
        every parameter."""
        overwritten = {p for p in self.params if getattr(p, "overwrites", False)}
        for p in overwritten:
            p.is_stale = True
        if overwritten:
            for p in self.params:
                if p not in overwritten:
                    p.main_grad.zero_()
        else:
            self.flat.zero_()
        for bucket in self.buckets:
            bucket.missing = len(bucket.params)
        for p in self._expected:
            self._expected[p] = micro_batches
        for p in self.params:
            if p.dtype == self.flat.dtype:
                p.grad = p.main_grad

    def complete(self) -> None:
        """After the backward passes: zero the gradients of `overwrites` that none has written."""
        for p in self.params:
            if getattr(p, "is_stale", False):
                p.main_grad.zero_()
                p.is_stale = False

    def reduce(self) -> None:
        """Sum over the ranks that saw other tokens, after copies that saw part of their gradient
        are summed.

        What overlaps the backward pass is only waited for. A rank then has the sums of `owned`.
        """
        self.complete()
        # the update that follows writes them
        self.wait_for_weights()
        if self.reduce_instead:
            self.reduce_instead()
        else:
            self.sum_over_ranks(self.buckets)

    def sum_over_ranks(self, buckets: Sequence[BucketState]) -> None:
        """Sum the gradients of these buckets, of which the first `_next` have started, and wait."""
        for bucket in buckets[self._next :]:
            for axis in bucket.layout.partial:
                all_reduce_(self.flat[bucket.range], self._ctx.axis(axis))
            self._start(bucket)
            self._collect(wait=not self._expected)
        self._collect(wait=True)
        self._next = 0
        self._reduce_over_instances(buckets)

    def _reduce_over_instances(self, buckets: Sequence[BucketState]) -> None:
        """Add up the shards of all instances, which have their own sums: all buckets at once."""
        reductions = []
        for bucket in buckets:
            _, shard, instances = bucket.replicas
            if shard.size > 1 and instances.size > 1 and bucket.shard.start < bucket.shard.stop:
                reductions.append(start_all_reduce(self.flat[bucket.shard], instances))
        for reduction in reductions:
            reduction()

    def _gradient_ready(self, bucket: BucketState, p: Parameter) -> None:
        """Count a micro-batch's gradient of `p`, and reduce the buckets that are complete.

        Buckets start in their own order, also where a later one is complete first: autograd may
        deliver gradients in another order on another rank, and collectives match by the order in
        which ranks start them. The order is that of backward (`lay_out`), so little is lost. A
        bucket with `partial` axes needs a sum before this one, and waits for `reduce`.
        """
        if self.reduce_instead:
            return
        self._expected[p] -= 1
        assert self._expected[p] >= 0, (
            f"{p.sharding.name}: more gradients than the micro-batches announced by zero()"
        )
        if self._expected[p] == 0:
            bucket.missing -= 1
        while self._next < len(self.buckets):
            bucket = self.buckets[self._next]
            if bucket.missing or bucket.layout.partial:
                break
            self._next += 1
            self._start(bucket)

    def _start(self, bucket: BucketState) -> None:
        """Start to reduce a bucket over shard, or over instances where there is only one shard."""
        self._collect(wait=False)
        _, shard, instances = bucket.replicas
        if bucket.layout.whole_params and shard.size > 1:
            bucket.reduction = start_reduce_shards_(self._shards(bucket, self.flat), shard)
        elif shard.size > 1:
            bucket.reduction = start_reduce_scatter_(
                self.flat[bucket.range], shard, self._fp32_accumulation
            )
        elif instances.size > 1:
            bucket.reduction = start_all_reduce(self.flat[bucket.range], instances)

    def _collect(self, wait: bool) -> None:
        """Finish the sums that have arrived, or all; that frees their additional memory."""
        for bucket in self.buckets:
            if bucket.reduction is not None and (wait or bucket.reduction.arrived):
                bucket.reduction()
                bucket.reduction = None

    def gather_weights(self) -> None:
        """Give every rank all weights after an update of `owned`; with overlap they are only under
        way then."""
        if self.weights is None:
            return
        for bucket in reversed(self.buckets):  # the first layers lie last
            shard = bucket.replicas.shard
            if bucket.layout.whole_params and shard.size > 1:
                shards = self._shards(bucket, self.weights)
                bucket.gather = start_broadcast_shards_(shards, shard)
            elif shard.size > 1:
                bucket.gather = start_all_gather_(self.weights[bucket.range], shard)
            if not self._overlap_gather:
                _wait_for([bucket])

    def _shards(self, bucket: BucketState, flat: torch.Tensor) -> Sequence[torch.Tensor]:
        """Of each rank that shares the optimizer its range of a bucket."""
        ranks = range(bucket.layout.shards)
        return [flat[slice(*bucket.layout.shard(rank))] for rank in ranks]

    def wait_for_weights(self) -> None:
        """Wait for weights under way, before something other than a forward pass reads them."""
        _wait_for(self.buckets)

    def wait_in_forward(self, model: nn.Module) -> None:
        """From now on each module of `model`, when called, waits for its own weights; a compiled
        one for all inside it."""
        if self.weights is None or not self._overlap_gather:
            return
        bucket_of: dict[nn.Parameter, BucketState] = {
            p: bucket for bucket in self.buckets for p in bucket.params
        }

        def visit(module: nn.Module) -> None:
            compiled = module._compiled_call_impl is not None
            params = [p for p in module.parameters(recurse=compiled) if p in bucket_of]
            buckets = list(dict.fromkeys(bucket_of[p] for p in params))
            hook = partial(_before_forward, buckets)
            if buckets:
                module.register_forward_pre_hook(torch.compiler.disable(hook) if compiled else hook)
            if not compiled:
                for child in module.children():
                    visit(child)

        visit(model)


def _partition(
    assign: Assign, params: Sequence[Parameter], experts: Sequence[bool], ctx: ParallelContext
) -> Partition:
    """Which rank owns which parameter; of experts, among the ranks that share the experts."""
    shared = [
        Shared(
            p.sharding.name,
            p.shape,
            p.sharding.shape,
            ctx.experts.shard.size if of_experts else ctx.shard.size,
            of_experts,
            p.sharding.matrices,
        )
        for p, of_experts in zip(params, experts, strict=True)
    ]
    return assign(shared)


@torch.no_grad()
def _flatten(params: list[Parameter], layout: flat_buckets.Layout) -> torch.Tensor:
    """The weights in one flat buffer, of which the parameters are views from then on; padding is
    0."""
    assert len({p.dtype for p in params}) == 1, "one buffer holds one dtype"
    flat = params[0].new_zeros(layout.size)
    for p, start in zip(params, layout.starts, strict=True):
        view = flat[start : start + p.numel()].view(p.shape)
        view.copy_(p)
        p.data = view
    return flat


def _owned(params: list[Parameter], spans: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    """Of each parameter the flat view that this rank updates (perhaps empty), with its part of
    `main_grad`."""
    owned = []
    for p, (start, stop) in zip(params, spans, strict=True):
        shard: Any = p.detach().view(-1)[start:stop]
        shard.main_grad = p.main_grad.view(-1)[start:stop]
        shard.sharding = p.sharding
        shard.span = (start, stop)
        owned.append(shard)
    return owned


def _wait_for(buckets: Iterable[BucketState]) -> None:
    for bucket in buckets:
        if bucket.gather is not None:
            bucket.gather()
            bucket.gather = None


def _before_forward(buckets: list[BucketState], module: nn.Module, args: Any) -> None:
    _wait_for(buckets)


def _add_to_main_grad(p: Parameter) -> None:
    if p.grad is None:  # the kernel added to main_grad itself
        return
    p.main_grad.add_(p.grad)
    p.grad = None
