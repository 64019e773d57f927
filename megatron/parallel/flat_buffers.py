"""Flat buffers of gradients and, sharded, of parameters: which range of them is a bucket, a view
of a parameter, or this rank's to update."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import nn

from megatron.config.plan import buckets as flat_buckets
from megatron.config.plan.buckets import Assign, Partition, Shared, unit_of
from megatron.parallel.context import ParallelContext, Replicas
from megatron.parallel.sharding import Parameter

Spans = Sequence[tuple[int, int]]
# flat weights (None: each parameter has its own memory), flat gradients, and `owned`
Placed = tuple[torch.Tensor | None, torch.Tensor, Sequence[torch.Tensor]]


class GradBucket:
    """A bucket of the layout on this rank.

    range, shard: of the flat buffers, that of the bucket and that of this rank's shard of it.
    replicas: the ranks that saw other tokens.
    """

    def __init__(self, layout: flat_buckets.Bucket, params: list[Parameter], replicas: Replicas):
        self.layout = layout
        self.replicas = replicas
        self.params = params
        self.range = slice(layout.start, layout.stop)
        self.shard = slice(*layout.shard(replicas.shard.rank))

    def shards(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Of each rank that shares the optimizer its range of this bucket."""
        return [flat[slice(*self.layout.shard(rank))] for rank in range(self.layout.shards)]


class FlatBuffers:
    """One flat buffer of `grad_dtype` in which every parameter has a 64-byte aligned view,
    `p.main_grad`.

    One collective over a range of one buffer replaces one for each parameter, which would be all
    latency. The buffer is cut into buckets in the order in which backward completes gradients, the
    last layer first: a bucket is then complete while backward still computes those after it, and
    its sum is hidden behind that.

    Backward: a kernel may add a weight gradient to `p.main_grad` itself; what autograd delivers as
    `p.grad` is added by a hook (or, where the dtypes agree, `p.grad` is the view and autograd adds
    in place). Where `p.overwrites`, the kernel replaces what is in `p.main_grad` as long as
    `p.is_stale`, which `zero` sets instead of writing zeros.

    Update: without shards every rank has all sums and updates all weights (`owned` are the
    parameters). With shards it has those of its range of each bucket: `owned` are flat views of
    that range, parameter by parameter, each with the `sharding` of its parameter and a `span`
    (start, stop) in its elements; weights live in a flat buffer too (`weights`). Where `assign`
    gives whole parameters to ranks, a rank's range of a bucket are those.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        ctx: ParallelContext,
        grad_dtype: torch.dtype,
        bucket_size: int | None = None,
        assign: Assign | None = None,
        units: bool = False,
    ):
        given = [cast(Parameter, p) for p in parameters]
        params = [p for p in given if p.requires_grad]
        self._like = given[0].new_empty(0)
        sharded = max(ctx.shard.size, ctx.experts.shard.size) > 1
        experts_apart = ctx.experts is not ctx.dense
        experts = [experts_apart and p.sharding.replicas == "experts" for p in params]
        partition = _partition(assign, params, experts, ctx) if assign and sharded else None
        layout = flat_buckets.lay_out(
            [p.numel() for p in params],
            [tuple(axis for axis in p.sharding.partial if ctx.axis(axis).size > 1) for p in params],
            bucket_size=bucket_size,
            shards=ctx.shard.size,
            itemsize=min(grad_dtype.itemsize, given[0].dtype.itemsize),
            partition=partition,
            experts=experts,
            expert_shards=ctx.experts.shard.size,
            units=[unit_of(p.sharding.name) for p in params] if units else (),
        )
        self.layout = layout
        self.buckets = []
        for bucket in layout.buckets:
            members = [params[number] for number in bucket.members]
            replicas = ctx.experts if bucket.experts else ctx.dense
            self.buckets.append(GradBucket(bucket, members, replicas))
        self.params = [p for bucket in self.buckets for p in bucket.params]
        spans = layout.spans(ctx.shard.rank, ctx.experts.shard.rank) if sharded else None
        self.weights, self.flat, self.owned = self._place(params, grad_dtype, spans)
        if not params:  # the optimizer of a stage in which nothing is trained has no element
            self.owned = [part_of(given[0], (0, 0), self._like, self.flat[:0])]
        for p in params:
            if p.dtype == grad_dtype:
                p.grad = p.main_grad
            else:
                p.register_post_accumulate_grad_hook(_add_to_main_grad)

    def _place(self, params: list[Parameter], dtype: torch.dtype, spans: Spans | None) -> Placed:
        """Give weights and gradients their memory. `spans`: what this rank updates of each
        parameter; None for all."""
        # weights first: a parameter's own memory is free before the gradients take theirs
        weights = None if spans is None else _flatten(params, self.layout, self._like)
        flat = torch.zeros(self.layout.size, dtype=dtype, device=self._like.device)
        for p, start in zip(params, self.layout.starts, strict=True):
            p.main_grad = flat[start : start + p.numel()].view(p.shape)
        return weights, flat, params if spans is None else _owned(params, spans)

    def held(self, p: nn.Parameter) -> torch.Tensor:
        """What this rank holds of a weight between steps: all of it; or a flat view with a `span`
        of its elements."""
        return p.data

    def summed(self, bucket: GradBucket) -> tuple[torch.Tensor, torch.Tensor]:
        """What a sum over ranks takes of a bucket, and where this rank has its result."""
        shares = bucket.replicas.shard.size > 1
        return self.flat[bucket.range], self.flat[bucket.shard if shares else bucket.range]

    def zero(self) -> None:
        """Zero all gradients, or mark those stale that a kernel overwrites."""
        overwritten = {p for p in self.params if getattr(p, "overwrites", False)}
        for p in overwritten:
            p.is_stale = True
        if overwritten:
            for p in self.params:
                if p not in overwritten:
                    p.main_grad.zero_()
        else:
            self.flat.zero_()
        for p in self.params:
            if p.dtype == self.flat.dtype:
                p.grad = p.main_grad

    def complete(self) -> None:
        """After the backward passes: zero the gradients of `overwrites` that none has written."""
        for p in self.params:
            if getattr(p, "is_stale", False):
                p.main_grad.zero_()
                p.is_stale = False


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
def _flatten(
    params: list[Parameter], layout: flat_buckets.Layout, like: torch.Tensor
) -> torch.Tensor:
    """The weights in one flat buffer, of which the parameters are views from then on; padding is
    0."""
    assert all(p.dtype == like.dtype for p in params), "one buffer holds one dtype"
    flat = like.new_zeros(layout.size)
    for p, start in zip(params, layout.starts, strict=True):
        view = flat[start : start + p.numel()].view(p.shape)
        view.copy_(p)
        p.data = view
    return flat


def _owned(params: list[Parameter], spans: Spans) -> list[torch.Tensor]:
    """Of each parameter the flat view that this rank updates (perhaps empty), with its part of
    `main_grad`."""
    owned = []
    for p, (start, stop) in zip(params, spans, strict=True):
        part = p.detach().view(-1)[start:stop]
        owned.append(part_of(p, (start, stop), part, p.main_grad.view(-1)[start:stop]))
    return owned


def part_of(
    p: Parameter, span: tuple[int, int], part: torch.Tensor, main_grad: torch.Tensor
) -> torch.Tensor:
    """`part`, the elements `span` of a parameter, as one of `FlatBuffers.owned`."""
    shard: Any = part
    shard.main_grad = main_grad
    shard.sharding = p.sharding
    shard.span = span
    return part


def _add_to_main_grad(p: Parameter) -> None:
    if p.grad is None:  # the kernel added to main_grad itself
        return
    p.main_grad.add_(p.grad)
    p.grad = None
