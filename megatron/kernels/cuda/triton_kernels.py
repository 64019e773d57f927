"""The operations of fused_ops.py and loss_ops.py as Triton kernels, for CUDA."""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.kernels.cuda.loss_ops import LIBRARY

BLOCK = 1024
COLUMNS = 4096  # of a row of logits that a block takes at a time


@triton.jit
def _swiglu_kernel(gate_up, out, total, width, BLOCK: tl.constexpr):
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < total
    gate_offset = offset // width * 2 * width + offset % width
    gate = tl.load(gate_up + gate_offset, mask=inside).to(tl.float32)
    up = tl.load(gate_up + gate_offset + width, mask=inside).to(tl.float32)
    tl.store(out + offset, gate * tl.sigmoid(gate) * up, mask=inside)


@triton.jit
def _swiglu_backward_kernel(gate_up, grad, out, total, width, BLOCK: tl.constexpr):
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < total
    gate_offset = offset // width * 2 * width + offset % width
    gate = tl.load(gate_up + gate_offset, mask=inside).to(tl.float32)
    up = tl.load(gate_up + gate_offset + width, mask=inside).to(tl.float32)
    slope = tl.load(grad + offset, mask=inside).to(tl.float32)
    s = tl.sigmoid(gate)
    tl.store(out + gate_offset, slope * up * s * (1.0 + gate * (1.0 - s)), mask=inside)
    tl.store(out + gate_offset + width, slope * gate * s, mask=inside)


@triton.jit
def _rotate_kernel(  # noqa: PLR0913 (a kernel has no records)
    x,
    cos,
    sin,
    out,
    total,
    batch,
    heads,
    dim,
    half,
    step_s,
    step_b,
    step_n,
    table_s,
    table_b,
    sign,
    INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < total
    d = offset % dim
    row = offset // dim
    b = row // heads % batch
    s = row // heads // batch
    rotated = d < 2 * half
    if INTERLEAVED:
        pair = d // 2
        first = d % 2 == 0
        partner_d = tl.where(first, d + 1, d - 1)
    else:
        pair = tl.where(d < half, d, d - half)
        first = d < half
        partner_d = tl.where(first, d + half, d - half)
    base = x + s * step_s + b * step_b + row % heads * step_n
    value = tl.load(base + d, mask=inside).to(tl.float32)
    partner = tl.load(base + tl.where(rotated, partner_d, d), mask=inside).to(tl.float32)
    angle = s * table_s + b * table_b + tl.where(rotated, pair, 0)
    c = tl.load(cos + angle, mask=inside & rotated, other=1.0).to(tl.float32)
    z = tl.load(sin + angle, mask=inside & rotated, other=0.0).to(tl.float32) * sign
    tl.store(out + offset, value * c + tl.where(first, -partner, partner) * z, mask=inside)


@triton.jit(do_not_specialize=["seed"])
def _drop_kernel(x, out, total, p, scale, seed, BLOCK: tl.constexpr):
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < total
    keep = tl.rand(seed, offset.to(tl.int32)) >= p
    value = tl.load(x + offset, mask=inside).to(tl.float32) * scale
    tl.store(out + offset, tl.where(keep, value, 0.0), mask=inside)


@triton.jit
def _row_losses_kernel(
    logits,
    columns,
    loss,
    sums,
    rows,
    width,
    valid,
    smoothing,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each thread keeps the largest and the sums of its own columns, rescaled once a vector;
    threads meet at the end of the row."""
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * width
    offset = tl.arange(0, BLOCK // VECTOR)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    top = tl.full([BLOCK // VECTOR], float("-inf"), tl.float32)
    of_exp = tl.zeros([BLOCK // VECTOR], tl.float32)
    linear = tl.zeros([BLOCK // VECTOR], tl.float32)
    for start in range(0, width, BLOCK):
        # a mask by `valid`, which may be odd, would make the loads scalar
        x = tl.load(line + start + offset, mask=start + offset < width, other=0.0).to(tl.float32)
        real = start + offset < valid
        linear += tl.sum(tl.where(real, x, 0.0), 1)
        x = tl.where(real, x, float("-inf"))
        higher = tl.maximum(top, tl.max(x, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # no difference of infinities
        of_exp = of_exp * tl.exp(top - base) + tl.sum(tl.exp(x - base[:, None]), 1)
        top = higher
    largest = tl.max(top, 0)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    log = tl.log(tl.sum(of_exp * tl.exp(top - base), 0))
    total = tl.sum(linear, 0)
    label = tl.load(line + tl.load(columns + row)).to(tl.float32)
    plain = log + (largest - label)
    uniform_loss = log + (largest - total / valid)
    smooth = plain * (1.0 - smoothing) + uniform_loss * smoothing
    tl.store(loss + row, tl.where(smoothing > 0.0, smooth, plain))
    tl.store(sums + row, largest)
    tl.store(sums + rows + row, log)
    tl.store(sums + 2 * rows + row, total)
    tl.store(sums + 3 * rows + row, label)


@triton.jit
def _loss_grad_kernel(  # noqa: PLR0913
    logits,
    largest,
    logs,
    columns,
    grads,
    hits,
    share,
    uniform,
    width,
    valid,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pointer = logits + row * width + column
    x = tl.load(pointer, mask=column < width, other=0.0).to(tl.float32)
    p = tl.exp(x - tl.load(largest + row) - tl.load(logs + row))
    hit = tl.load(hits + row) * share
    grad = (p - uniform) * tl.load(grads + row)
    grad -= tl.where(column == tl.load(columns + row), hit, 0.0)
    tl.store(pointer, tl.where(column < valid, grad, 0.0), mask=column < width)


def _grid(total: int) -> tuple[int]:
    return (triton.cdiv(total, BLOCK),)


def _swiglu(gate_up: Tensor) -> Tensor:
    gate_up = gate_up.contiguous()
    out = gate_up.new_empty(*gate_up.shape[:-2], gate_up.shape[-1])
    _swiglu_kernel[_grid(out.numel())](gate_up, out, out.numel(), out.shape[-1], BLOCK=BLOCK)
    return out


def _swiglu_backward(gate_up: Tensor, grad: Tensor) -> Tensor:
    gate_up = gate_up.contiguous()
    grad = grad.contiguous()
    out = torch.empty_like(gate_up)
    _swiglu_backward_kernel[_grid(grad.numel())](
        gate_up, grad, out, grad.numel(), grad.shape[-1], BLOCK=BLOCK
    )
    return out


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: int, interleaved: bool) -> Tensor:
    x = x if x.stride(-1) == 1 else x.contiguous()
    s, b, n, d = x.shape
    cos = cos.expand(s, b, 1, cos.shape[-1])
    sin = sin.expand(cos.shape)
    out = x.new_empty(x.shape)
    _rotate_kernel[_grid(out.numel())](
        x,
        cos,
        sin,
        out,
        out.numel(),
        b,
        n,
        d,
        cos.shape[-1],
        *x.stride()[:3],
        *cos.stride()[:2],
        float(sign),
        INTERLEAVED=interleaved,
        BLOCK=BLOCK,
    )
    return out


def _drop(x: Tensor, p: float, seed: Tensor) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    scale = 1.0 / (1.0 - p)
    _drop_kernel[_grid(x.numel())](x, out, x.numel(), p, scale, int(seed), BLOCK=BLOCK)
    return out


def _row_losses(
    logits: Tensor, columns: Tensor, valid: int, smoothing: float
) -> tuple[Tensor, Tensor]:
    n, width = logits.shape
    loss = logits.new_empty(n, dtype=torch.float32)
    sums = logits.new_empty(4, n, dtype=torch.float32)
    _row_losses_kernel[(n,)](
        logits,
        columns.contiguous(),
        loss,
        sums,
        n,
        width,
        valid,
        float(smoothing),
        VECTOR=16 // logits.element_size(),
        BLOCK=COLUMNS,
        num_warps=8,
    )
    return loss, sums


def _loss_grad(  # noqa: PLR0913
    logits: Tensor,
    valid: int,
    largest: Tensor,
    logs: Tensor,
    columns: Tensor,
    grads: Tensor,
    hits: Tensor,
    share: float,
    uniform: float,
) -> Tensor:
    n, width = logits.shape
    _loss_grad_kernel[(n, triton.cdiv(width, COLUMNS))](
        logits,
        *(t.contiguous() for t in (largest, logs, columns, grads, hits)),
        float(share),
        float(uniform),
        width,
        valid,
        BLOCK=COLUMNS,
        num_warps=8,
    )
    return logits


RUNS: dict[str, Callable[..., Any]] = {
    "swiglu": _swiglu,
    "swiglu_backward": _swiglu_backward,
    "rotate": _rotate,
    "drop": _drop,
    "row_losses": _row_losses,
    "loss_grad_": _loss_grad,
}
for _name, _run in RUNS.items():
    LIBRARY.impl(_name, _run, "CUDA")
