"""Data parallelism: flat buffers of gradients (and, sharded, of parameters), reduced and
gathered by bucket."""

from collections.abc import Iterable

import torch
from torch import nn

from megatron.config.plan.buckets import Assign
from megatron.parallel.context import ParallelContext
from megatron.parallel.flat_buffers import FlatBuffers
from megatron.parallel.gathering import Gathering
from megatron.parallel.reduction import Reduction
from megatron.parallel.single_stage import Backward


class GradBuffers(FlatBuffers):
    """The flat buffers of a data-parallel rank, their `reduction` and, sharded, `gathering`.

    A step: `zero`; the backward passes; `reduce`; an update of `owned`; `gathering.start`.
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
        super().__init__(parameters, ctx, grad_dtype, bucket_size, assign)
        self.reduction = Reduction(self, ctx, overlap_grad_reduce, fp32_accumulation)
        self.gathering = Gathering(self, overlap_param_gather)

    def zero(self, micro_batches: int = 1) -> None:
        """Zero all gradients, for a step of that many micro-batches, each with one gradient of
        every parameter."""
        super().zero()
        self.reduction.expect(micro_batches)

    def each_backward(self, backward: Backward) -> Backward:
        """What a schedule calls in place of `backward`."""
        return backward

    def reduce(self) -> None:
        """Sum over the ranks that saw other tokens, after copies that saw part of their gradient
        are summed. A rank then has the sums of `owned`."""
        self.complete()
        # the update that follows writes them
        self.gathering.wait()
        self.reduction.run()
