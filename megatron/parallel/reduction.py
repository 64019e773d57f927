"""Sums of gradients over the ranks that saw other tokens, bucket by bucket, behind the backward
pass or after it."""

from collections.abc import Callable, Sequence
from functools import partial

from megatron.parallel.collectives import (
    Pending,
    all_reduce_,
    start_all_reduce,
    start_reduce_scatter_,
    start_reduce_shards_,
)
from megatron.parallel.context import ParallelContext
from megatron.parallel.flat_buffers import FlatBuffers, GradBucket
from megatron.parallel.sharding import Parameter


class Reduction:
    """Sums the buckets of `buffers`: reduce-scatter over `ctx.shard`, all-reduce over
    `ctx.instances`; of experts, which fewer ranks hold, over those of `ctx.experts`.

    With `overlap` that starts as soon as each parameter of a bucket has the gradients of all
    micro-batches. With `fp32_accumulation` a reduce-scatter of 16-bit gradients adds in fp32 and
    rounds once. Of a bucket of whole parameters the sums are reduced to their owners.
    """

    def __init__(
        self, buffers: FlatBuffers, ctx: ParallelContext, overlap: bool, fp32_accumulation: bool
    ):
        self._buffers = buffers
        self._ctx = ctx
        self._fp32_accumulation = fp32_accumulation
        # what has started, by bucket
        self._started: dict[GradBucket, Pending] = {}
        # gradients still to come by parameter, and parameters that wait for some by bucket; empty
        # where they are not counted
        self._expected: dict[Parameter, int] = {}
        self._missing: dict[GradBucket, int] = {}
        # the first bucket whose reduction has not started
        self._next = 0
        # called by `run`, which then sums nothing itself; while it is set no sum starts earlier, so
        # it sees this rank's own gradients
        self.instead: Callable[[], None] | None = None
        if overlap and ctx.dp_cp.size > 1:
            for bucket in buffers.buckets:
                for p in bucket.params:
                    p.register_post_accumulate_grad_hook(partial(self._gradient_ready, bucket))
                    self._expected[p] = 0

    def expect(self, micro_batches: int) -> None:
        """A step begins, of that many micro-batches, each with one gradient of every parameter."""
        for bucket in self._buffers.buckets:
            self._missing[bucket] = len(bucket.params)
        for p in self._expected:
            self._expected[p] = micro_batches

    def run(self) -> None:
        """Sum all buckets; what overlaps the backward pass is only waited for."""
        if self.instead:
            self.instead()
        else:
            self.sum_over_ranks(self._buffers.buckets)

    def sum_over_ranks(self, buckets: Sequence[GradBucket]) -> None:
        """Sum the gradients of these buckets, of which the first `_next` have started, and wait."""
        for bucket in buckets[self._next :]:
            for axis in bucket.layout.partial:
                all_reduce_(self._buffers.flat[bucket.range], self._ctx.axis(axis))
            self._start(bucket)
            self._collect(wait=not self._expected)
        self._collect(wait=True)
        self._next = 0
        self._reduce_over_instances(buckets)

    def _reduce_over_instances(self, buckets: Sequence[GradBucket]) -> None:
        """Add up the shards of all instances, which have their own sums: all buckets at once."""
        reductions = []
        for bucket in buckets:
            _, shard, instances = bucket.replicas
            if shard.size > 1 and instances.size > 1 and bucket.shard.start < bucket.shard.stop:
                reductions.append(start_all_reduce(self._buffers.flat[bucket.shard], instances))
        for reduction in reductions:
            reduction()

    def _gradient_ready(self, bucket: GradBucket, p: Parameter) -> None:
        """Count a micro-batch's gradient of `p`, and reduce the buckets that are complete.

        Buckets start in their own order, also where a later one is complete first: autograd may
        deliver gradients in another order on another rank, and collectives match by the order in
        which ranks start them. The order is that of backward (`lay_out`), so little is lost. A
        bucket with `partial` axes needs a sum before this one, and waits for `reduce`.
        """
        if self.instead:
            return
        self._expected[p] -= 1
        assert self._expected[p] >= 0, (
            f"{p.sharding.name}: more gradients than the micro-batches announced by zero()"
        )
        if self._expected[p] == 0:
            self._missing[bucket] -= 1
        while self._next < len(self._buffers.buckets):
            bucket = self._buffers.buckets[self._next]
            if self._missing[bucket] or bucket.layout.partial:
                break
            self._next += 1
            self._start(bucket)

    def _start(self, bucket: GradBucket) -> None:
        """Start to reduce a bucket over shard, or over instances where there is only one shard."""
        self._collect(wait=False)
        flat = self._buffers.flat
        _, shard, instances = bucket.replicas
        if bucket.layout.whole_params and shard.size > 1:
            self._started[bucket] = start_reduce_shards_(bucket.shards(flat), shard)
        elif shard.size > 1:
            self._started[bucket] = start_reduce_scatter_(
                flat[bucket.range], shard, self._fp32_accumulation
            )
        elif instances.size > 1:
            self._started[bucket] = start_all_reduce(flat[bucket.range], instances)

    def _collect(self, wait: bool) -> None:
        """Finish the sums that have arrived, or all; that frees their additional memory."""
        for bucket, reduction in list(self._started.items()):
            if wait or reduction.arrived:
                self._started.pop(bucket)()
