"""SwiGLU, rotary positions, dropout, the backward of norms, sums of columns, sums of copies and the
weight gradients of experts as one kernel each on CUDA, by Triton, which comes with torch's CUDA
builds for Linux.

They are operations of torch (`megatron::...`): a trace on the meta device counts each as the one
launch that it is.
"""

from typing import Any

import torch
from torch import Tensor

LIBRARY = torch.library.Library("megatron", "FRAGMENT")  # others may define operations there too
LIBRARY.define("swiglu(Tensor gate_up, Tensor? weights=None) -> Tensor")
LIBRARY.define(
    "swiglu_backward(Tensor gate_up, Tensor grad, Tensor? weights=None) -> (Tensor, Tensor)"
)
LIBRARY.define(
    "rotate(Tensor x, Tensor cos, Tensor sin, int sign, bool interleaved, bool batch_first) "
    "-> Tensor"
)
LIBRARY.define("move(Tensor x, bool batch_first) -> Tensor")
LIBRARY.define("drop(Tensor x, float p, Tensor seed, Tensor? residual=None) -> Tensor")
LIBRARY.define(
    "norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor? means, Tensor scales) "
    "-> (Tensor, Tensor)"
)
LIBRARY.define("column_sums(Tensor x) -> Tensor")
LIBRARY.define("sum_rows(Tensor x, Tensor places) -> Tensor")
LIBRARY.define(
    "add_grouped_product_(Tensor(a!) total, Tensor rows_out, Tensor rows_in, Tensor ends, "
    "bool add) -> ()"
)
LIBRARY.define("rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)")
LIBRARY.impl("swiglu", lambda x, *_: x.new_empty(*x.shape[:-2], x.shape[-1]), "Meta")
LIBRARY.impl(
    "swiglu_backward",
    lambda x, *_: (x.new_empty(x.shape), x.new_empty(x.shape[:-2], dtype=torch.float32)),
    "Meta",
)
LIBRARY.impl("sum_rows", lambda x, places: x.new_empty(len(places), x.shape[1]), "Meta")
LIBRARY.impl("add_grouped_product_", lambda *_: None, "Meta")
LIBRARY.impl("rotate", lambda x, *more: empty_heads(x, more[-1]), "Meta")
LIBRARY.impl("move", lambda x, batch_first: empty_heads(x, batch_first), "Meta")
LIBRARY.impl(
    "drop",
    lambda x, p, seed, residual=None: torch.empty_like(x if residual is None else residual),
    "Meta",
)

# Sums of many rows: for fewer, torch's kernels take the host less time.
MANY_ROWS = 4096
# At most so many programs share the rows; results depend on the shape alone.
PROGRAMS_OF_NORM = 256
PROGRAMS_OF_SUMS = 128
ROWS_OF_SUMS = 16  # that a program of column_sums takes at a time
WIDEST_NORM = 8192  # in registers


def power_of_two(n: int) -> int:
    """The least that is not below n."""
    return 1 << (n - 1).bit_length()


def rows_of_norm(width: int) -> int:
    """That a program of norm_backward takes at a time: some 4,096 numbers."""
    return max(1, 4096 // power_of_two(width))


def row_blocks(rows: int, at_a_time: int, most: int) -> tuple[int, int]:
    """(programs, at most so many, steps of each) that take so many rows at a time."""
    tiles = -(-rows // at_a_time)
    steps = -(-tiles // most)
    return -(-tiles // steps), steps


def empty_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, means: Tensor | None, *_: Tensor
) -> tuple[Tensor, Tensor]:
    """Memory for the gradient of x, and for each program's sums [1 or 2, programs, width]."""
    width = x.shape[-1]
    programs, _steps = row_blocks(x.numel() // width, rows_of_norm(width), PROGRAMS_OF_NORM)
    sums = x.new_empty(1 if means is None else 2, programs, width, dtype=torch.float32)
    return x.new_empty(x.shape), sums


def empty_column_sums(x: Tensor) -> Tensor:
    """Memory for each program's sums, [programs, width]."""
    programs, _ = row_blocks(len(x), ROWS_OF_SUMS, PROGRAMS_OF_SUMS)
    return x.new_empty(programs, x.shape[1], dtype=torch.float32)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Torch's, and 1 / rms of each row."""
    return torch.ops.aten._fused_rms_norm(x, weight.shape, weight, eps)


LIBRARY.impl("rms_norm", _rms_norm, "CompositeExplicitAutograd")
LIBRARY.impl(
    "rms_norm",
    lambda x, *_: (
        x.new_empty(x.shape),
        x.new_empty(*x.shape[:-1], 1, dtype=torch.float32),
    ),
    "Meta",
)
LIBRARY.impl("norm_backward", empty_norm_backward, "Meta")
LIBRARY.impl("column_sums", empty_column_sums, "Meta")


def empty_heads(x: Tensor, batch_first: bool) -> Tensor:
    """Memory for a tensor like x [s, b, n, d], without gaps: sample by sample if `batch_first`,
    else position by position."""
    s, b, n, d = x.shape
    return x.new_empty(b, s, n, d).transpose(0, 1) if batch_first else x.new_empty(x.shape)


class SwiGlu(torch.autograd.Function):
    """Keeps its inputs alone. gate_up [..., 2, ffn], `weights` [...] of the results or None."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weights: Tensor | None = None) -> Tensor:
        ctx.save_for_backward(gate_up, weights)
        return torch.ops.megatron.swiglu(gate_up, weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        gate_up, weights = ctx.saved_tensors
        grads = torch.ops.megatron.swiglu_backward(gate_up, grad, weights)
        return grads[0], None if weights is None else grads[1]


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
    """Draws its mask again in backward. `seed`: int64 without dimensions, on the CPU or on the
    device; a graph would hold an integer as a constant. `residual`: the result is added to it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, seed: Tensor, residual: Tensor | None) -> Tensor:
        ctx.save_for_backward(seed)
        ctx.p = p
        ctx.dtype = x.dtype
        return torch.ops.megatron.drop(x, p, seed, residual)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        of_x = torch.ops.megatron.drop(grad.to(ctx.dtype), ctx.p, *ctx.saved_tensors)
        return of_x, None, None, grad if ctx.needs_input_grad[3] else None


class FusedNorm(torch.autograd.Function):
    """LayerNorm with a bias, RMSNorm without. Forward is torch's, and so is what it keeps; backward
    reads it and the gradient once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        means = None
        if bias is None:
            out, scales = torch.ops.megatron.rms_norm(x, weight, eps)
        else:
            out, means, scales = torch.native_layer_norm(x, weight.shape, weight, bias, eps)
        ctx.save_for_backward(x, weight, means, scales)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        grad_x, parts = torch.ops.megatron.norm_backward(grad, *ctx.saved_tensors)
        of_weight, *of_bias = parts.sum(1).to(ctx.saved_tensors[1].dtype)
        return grad_x, of_weight, *(of_bias or [None]), None
