"""SwiGLU, rotary positions and dropout as one kernel each on CUDA, by Triton, which comes with
torch's CUDA builds for Linux.

They are operations of torch (`megatron::...`): a trace on the meta device counts each as the one
launch that it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

LIBRARY = torch.library.Library("megatron", "FRAGMENT")  # others may define operations there too
LIBRARY.define("swiglu(Tensor gate_up) -> Tensor")
LIBRARY.define("swiglu_backward(Tensor gate_up, Tensor grad) -> Tensor")
LIBRARY.define(
    "rotate(Tensor x, Tensor cos, Tensor sin, int sign, bool interleaved, bool batch_first) "
    "-> Tensor"
)
LIBRARY.define("move(Tensor x, bool batch_first) -> Tensor")
LIBRARY.define("drop(Tensor x, float p, Tensor seed) -> Tensor")
LIBRARY.impl("swiglu", lambda x: x.new_empty(*x.shape[:-2], x.shape[-1]), "Meta")
LIBRARY.impl("swiglu_backward", lambda x, grad: x.new_empty(x.shape), "Meta")
LIBRARY.impl("rotate", lambda x, *more: empty_heads(x, more[-1]), "Meta")
LIBRARY.impl("move", lambda x, batch_first: empty_heads(x, batch_first), "Meta")
LIBRARY.impl("drop", lambda x, *_: x.new_empty(x.shape), "Meta")


def empty_heads(x: Tensor, batch_first: bool) -> Tensor:
    """Memory for a tensor like x [s, b, n, d], without gaps: sample by sample if `batch_first`,
    else position by position."""
    s, b, n, d = x.shape
    return x.new_empty(b, s, n, d).transpose(0, 1) if batch_first else x.new_empty(x.shape)


class SwiGlu(torch.autograd.Function):
    """Keeps its input alone."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return torch.ops.megatron.swiglu(gate_up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.ops.megatron.swiglu_backward(*ctx.saved_tensors, grad)


class Rotary(torch.autograd.Function):
    """Keeps nothing of its input: backward rotates the gradient the other way round."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, batch_first: bool
    ) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return torch.ops.megatron.rotate(x, cos, sin, 1, interleaved, batch_first)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        grad_x = torch.ops.megatron.rotate(grad, *ctx.saved_tensors, -1, ctx.interleaved, False)
        return grad_x, None, None, None, None


class Dropout(torch.autograd.Function):
    """Draws its mask again in backward. `seed`: int64 on the CPU, without dimensions; a graph would
    hold an integer as a constant, and be compiled anew for the next."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, seed: Tensor) -> Tensor:
        ctx.save_for_backward(seed)
        ctx.p = p
        return torch.ops.megatron.drop(x, p, seed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        return torch.ops.megatron.drop(grad, ctx.p, *ctx.saved_tensors), None, None
