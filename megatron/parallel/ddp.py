"""Flat gradient buffers of one replica and their reduction over the ranks that hold other parts. Knows no model."""
from __future__ import annotations

from collections.abc import Iterable

import torch

from megatron.parallel.collectives import all_reduce_
from megatron.parallel.context import Axis, ParallelContext

_ALIGN_BYTES = 64


class GradBuffers:
    """One flat buffer of `grad_dtype` in which every parameter has a 64-byte aligned view, `p.main_grad`.

    Parameters lie in reverse order of registration, which is about the order in which their gradients are ready.
    A kernel may add a weight gradient to `p.main_grad` itself; what autograd delivers as `p.grad` is added by a hook
    (or, where the number formats agree, `p.grad` is the view and autograd adds in place).
    """

    def __init__(self, params: Iterable[torch.nn.Parameter], ctx: ParallelContext, grad_dtype: torch.dtype):
        self.params = [p for p in reversed(list(params)) if p.requires_grad]
        self._axis = ctx.dp_cp
        per = _ALIGN_BYTES // grad_dtype.itemsize
        starts, total = [], 0
        for p in self.params:
            starts.append(total)
            total += -(-p.numel() // per) * per
        device = self.params[0].device
        self.flat = torch.zeros(total, dtype=grad_dtype, device=device)
        for p, start in zip(self.params, starts, strict=True):
            p.main_grad = self.flat[start:start + p.numel()].view(p.shape)
            if p.dtype == grad_dtype:
                p.grad = p.main_grad
            else:
                p.register_post_accumulate_grad_hook(_add_to_main_grad)
        self._partial = _partial(self.params, ctx)

    def zero(self) -> None:
        """Forget all gradients, before the first micro-batch of a step."""
        self.flat.zero_()
        for p in self.params:
            if p.dtype == self.flat.dtype:
                p.grad = p.main_grad

    def reduce(self) -> None:
        """Sum over the ranks that saw other tokens, after copies that saw part of their gradient are summed."""
        for axis, grads in self._partial:
            together = torch.cat([grad.flatten() for grad in grads])
            sizes = [grad.numel() for grad in grads]
            for grad, whole in zip(grads, all_reduce_(together, axis).split(sizes), strict=True):
                grad.copy_(whole.view(grad.shape))
        all_reduce_(self.flat, self._axis)


def _partial(params: Iterable[torch.nn.Parameter], ctx: ParallelContext) -> list[tuple[Axis, list[torch.Tensor]]]:
    """(axis, main_grads to sum over it), small tensors together, for each axis of more than one rank that has any."""
    found: dict[str, list[torch.Tensor]] = {}
    for p in params:
        for name in p.sharding.partial:
            found.setdefault(name, []).append(p.main_grad)
    return [(ctx.axis(name), grads) for name, grads in found.items() if ctx.axis(name).size > 1]


def _add_to_main_grad(p: torch.nn.Parameter) -> None:
    if p.grad is None:                # the kernel added to main_grad itself
        return
    p.main_grad.add_(p.grad)
    p.grad = None
