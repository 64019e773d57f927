"""The operations of fused_ops.py and loss_ops.py as Triton kernels, for CUDA."""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.kernels.cuda import fused_ops
from megatron.kernels.cuda.fused_ops import (
    ROWS_OF_SUMS,
    empty_column_sums,
    empty_heads,
    empty_norm_backward,
    power_of_two,
    row_blocks,
    rows_of_norm,
)
from megatron.kernels.cuda.loss_ops import LIBRARY

BLOCK = 1024
COLUMNS = 4096  # of a row of logits that a block takes at a time
COLUMNS_OF_SUMS = 256
TILE = 128, 256, 64  # outputs, inputs and rows of a group's weight gradient
INTERPRETED = triton.knobs.runtime.interpret


@triton.jit
def _swiglu_kernel(gate_up, weights, out, width, BLOCK: tl.constexpr):
    """A block of a row; 64-bit integers have no division, so no program has several rows."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=inside).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    if weights is not None:
        value *= tl.load(weights + row)
    tl.store(out + row * width + column, value, mask=inside)


@triton.jit
def _swiglu_backward_kernel(gate_up, weights, grad, out, of_weights, width, BLOCK: tl.constexpr):
    """A row, and the gradient of its weight."""
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        offset = row * 2 * width + column
        gate = tl.load(gate_up + offset, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up + offset + width, mask=inside, other=0.0).to(tl.float32)
        slope = tl.load(grad + row * width + column, mask=inside, other=0.0).to(tl.float32)
        s = tl.sigmoid(gate)
        total += slope * gate * s * up
        if weights is not None:
            slope *= tl.load(weights + row)
        tl.store(out + offset, slope * up * s * (1.0 + gate * (1.0 - s)), mask=inside)
        tl.store(out + offset + width, slope * gate * s, mask=inside)
    tl.store(of_weights + row, tl.sum(total, 0))


@triton.jit
def _sum_rows_kernel(x, places, out, width, COPIES: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(COPIES):
        place = tl.load(places + row * COPIES + i)
        inside = (column < width) & (place >= 0)
        total += tl.load(x + place * width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, total, mask=column < width)


@triton.jit
def _add_grouped_product_kernel(
    total,
    rows_out,
    rows_in,
    ends,
    outputs,
    inputs,
    ADD: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """A tile [M, N] of a group's matrix [outputs, inputs], K of the group's rows at a time."""
    group = tl.program_id(1)
    tiles = tl.cdiv(inputs, N)
    m = tl.program_id(0) // tiles * M + tl.arange(0, M)
    n = tl.program_id(0) % tiles * N + tl.arange(0, N)
    start = tl.load(ends + group - 1, mask=group > 0, other=0)
    end = tl.load(ends + group)
    product = tl.zeros([M, N], tl.float32)
    for first in range(start, end, K):
        row = (first + tl.arange(0, K)[:, None]).to(tl.int64)
        a = tl.load(
            rows_out + row * outputs + m[None, :], mask=(row < end) & (m < outputs), other=0.0
        )
        b = tl.load(rows_in + row * inputs + n[None, :], mask=(row < end) & (n < inputs), other=0.0)
        product = tl.dot(tl.trans(a), b, product)
    matrix = total + group.to(tl.int64) * outputs * inputs
    tile = matrix + m[:, None].to(tl.int64) * inputs + n[None, :]
    inside = (m[:, None] < outputs) & (n[None, :] < inputs)
    if ADD:
        inside &= start < end
        product += tl.load(tile, mask=inside, other=0.0).to(tl.float32)
    tl.store(tile, product, mask=inside)


@triton.jit
def _rotate_kernel(  # noqa: PLR0913 (a kernel has no records)
    x,
    cos,
    sin,
    out,
    lines,
    batch,
    step_s,
    step_b,
    step_n,
    out_s,
    out_b,
    out_n,
    table_s,
    table_b,
    sign,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    LINES: tl.constexpr,
    WIDTH: tl.constexpr,
    REST: tl.constexpr,
):
    """Of LINES heads, each a line of DIM numbers, rotates HALF pairs and copies the others. WIDTH
    and REST are powers of two; 64-bit integers are only multiplied, as they have no division."""
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)
    inside = (line < lines)[:, None]
    row = line // HEADS
    n = (line % HEADS).to(tl.int64)
    s = (row // batch).to(tl.int64)
    b = (row % batch).to(tl.int64)
    source = x + (s * step_s + b * step_b + n * step_n)[:, None]
    target = out + (s * out_s + b * out_b + n * out_n)[:, None]
    if HALF:
        pair = tl.arange(0, WIDTH)[None, :]
        paired = inside & (pair < HALF)
        angle = (s * table_s + b * table_b)[:, None] + pair
        c = tl.load(cos + angle, mask=paired, other=1.0).to(tl.float32)
        z = tl.load(sin + angle, mask=paired, other=0.0).to(tl.float32) * sign
        if INTERLEAVED:
            column = tl.arange(0, 2 * WIDTH)[None, :]
            paired = inside & (column < 2 * HALF)
            both = tl.load(source + column, mask=paired, other=0.0).to(tl.float32)
            first, second = tl.split(tl.reshape(both, (LINES, WIDTH, 2)))
            turned = tl.join(first * c - second * z, second * c + first * z)
            tl.store(target + column, tl.reshape(turned, (LINES, 2 * WIDTH)), mask=paired)
        else:
            first = tl.load(source + pair, mask=paired, other=0.0).to(tl.float32)
            second = tl.load(source + HALF + pair, mask=paired, other=0.0).to(tl.float32)
            tl.store(target + pair, first * c - second * z, mask=paired)
            tl.store(target + HALF + pair, second * c + first * z, mask=paired)
    if REST:
        column = 2 * HALF + tl.arange(0, REST)[None, :]
        others = inside & (column < DIM)
        tl.store(target + column, tl.load(source + column, mask=others), mask=others)


@triton.jit
def _uniform(seed, offset, WIDE: tl.constexpr):
    """tl.rand(seed, offset) for int32 offsets. `WIDE`: both halves of a product by one instruction
    of PTX, where Triton has two; the interpreter knows no PTX."""
    if WIDE:
        key_0 = (seed & 0xFFFFFFFF).to(tl.uint32)
        key_1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
        c0 = offset.to(tl.uint32, bitcast=True)
        c1 = c0 * 0
        c2 = c1
        c3 = c1
        for _ in tl.static_range(10):  # Philox 4x32 (Salmon et al. 2011)
            a = tl.inline_asm_elementwise(
                "mul.wide.u32 $0, $1, 0xD2511F53;", "=l,r", [c0], tl.uint64, True, 1
            )
            b = tl.inline_asm_elementwise(
                "mul.wide.u32 $0, $1, 0xCD9E8D57;", "=l,r", [c2], tl.uint64, True, 1
            )
            c0 = (b >> 32).to(tl.uint32) ^ c1 ^ key_0
            c2 = (a >> 32).to(tl.uint32) ^ c3 ^ key_1
            c1 = b.to(tl.uint32)
            c3 = a.to(tl.uint32)
            key_0 = (key_0 + 0x9E3779B9).to(tl.uint32)
            key_1 = (key_1 + 0xBB67AE85).to(tl.uint32)
        return tl.uint_to_uniform_float(c0)
    return tl.rand(seed, offset)


@triton.jit(do_not_specialize=["seed"])
def _drop_kernel(  # noqa: PLR0913
    x,
    residual,
    out,
    total,
    p,
    scale,
    seed,
    LOAD: tl.constexpr,
    ADD: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`LOAD`: the seed is on the device."""
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < total
    keep = _uniform(tl.load(seed) if LOAD else seed, offset.to(tl.int32), WIDE) >= p
    value = tl.load(x + offset, mask=inside).to(tl.float32) * scale
    value = tl.where(keep, value, 0.0)
    if ADD:  # rounded before, as without
        value = value.to(x.dtype.element_ty).to(tl.float32)
        value += tl.load(residual + offset, mask=inside).to(tl.float32)
    tl.store(out + offset, value, mask=inside)


@triton.jit
def _norm_backward_kernel(  # noqa: PLR0913
    grad,
    x,
    weight,
    means,
    scales,
    grad_x,
    sums,
    rows,
    width,
    steps,
    CENTERED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """ROWS rows at a time, `steps` times; each program has its row of the sums for the gradients of
    weight and, if CENTERED (LayerNorm), bias."""
    column = tl.arange(0, BLOCK)[None, :]
    w = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    of_weight = tl.zeros([1, BLOCK], tl.float32)
    of_bias = tl.zeros([1, BLOCK], tl.float32)
    row = tl.program_id(0) * steps * ROWS + tl.arange(0, ROWS)[:, None]
    for _ in range(steps):
        inside = (row < rows) & (column < width)
        offset = row.to(tl.int64) * width + column
        g = tl.load(grad + offset, mask=inside, other=0.0).to(tl.float32)
        y = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scales + row, mask=row < rows, other=0.0).to(tl.float32)
        if CENTERED:
            mean = tl.load(means + row, mask=row < rows, other=0.0).to(tl.float32)
            y = tl.where(inside, y - mean, 0.0)
            of_bias += tl.sum(g, 0, keep_dims=True)
        y *= scale
        of_weight += tl.sum(g * y, 0, keep_dims=True)
        g *= w
        result = g - y * (tl.sum(g * y, 1, keep_dims=True) / width)
        if CENTERED:
            result -= tl.sum(g, 1, keep_dims=True) / width
        tl.store(grad_x + offset, result * scale, mask=inside)
        row += ROWS
    line = sums + tl.program_id(0) * width + column
    tl.store(line, of_weight, mask=column < width)
    if CENTERED:
        tl.store(line + tl.num_programs(0) * width, of_bias, mask=column < width)


@triton.jit
def _column_sums_kernel(x, sums, rows, width, steps, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    row = tl.program_id(0) * steps * ROWS + tl.arange(0, ROWS)[:, None]
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for _ in range(steps):
        offset = row.to(tl.int64) * width + column
        inside = (row < rows) & (column < width)
        total += tl.load(x + offset, mask=inside, other=0.0).to(tl.float32)
        row += ROWS
    line = sums + tl.program_id(0) * width + column
    tl.store(line, tl.sum(total, 0, keep_dims=True), mask=column < width)


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


def _swiglu(gate_up: Tensor, weights: Tensor | None = None) -> Tensor:
    gate_up = gate_up.contiguous()
    width = gate_up.shape[-1]
    out = gate_up.new_empty(*gate_up.shape[:-2], width)
    grid = out.numel() // width, triton.cdiv(width, BLOCK)
    _swiglu_kernel[grid](gate_up, weights, out, width, BLOCK=BLOCK)
    return out


def _swiglu_backward(
    gate_up: Tensor, grad: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    gate_up = gate_up.contiguous()
    out = torch.empty_like(gate_up)
    of_weights = out.new_empty(out.shape[:-2], dtype=torch.float32)
    _swiglu_backward_kernel[of_weights.numel(),](
        gate_up, weights, grad.contiguous(), out, of_weights, out.shape[-1], BLOCK=BLOCK
    )
    return out, of_weights


def _sum_rows(x: Tensor, places: Tensor) -> Tensor:
    rows, copies = places.shape
    out = x.new_empty(rows, x.shape[1])
    grid = rows, triton.cdiv(x.shape[1], BLOCK)
    _sum_rows_kernel[grid](x.contiguous(), places, out, x.shape[1], COPIES=copies, BLOCK=BLOCK)
    return out


def _add_grouped_product(
    total: Tensor, rows_out: Tensor, rows_in: Tensor, ends: Tensor, add: bool
) -> None:
    groups, outputs, inputs = total.shape
    m, n, k = TILE
    grid = triton.cdiv(outputs, m) * triton.cdiv(inputs, n), groups
    _add_grouped_product_kernel[grid](
        total,
        rows_out,
        rows_in,
        ends,
        outputs,
        inputs,
        ADD=add,
        M=m,
        N=n,
        K=k,
        num_warps=8,
    )


def _rotate(
    x: Tensor, cos: Tensor, sin: Tensor, sign: int, interleaved: bool, batch_first: bool
) -> Tensor:
    s, b = x.shape[:2]
    cos = cos.expand(s, b, 1, cos.shape[-1])
    return _moved(x, cos, sin.expand(cos.shape), cos.shape[-1], sign, interleaved, batch_first)


def _move(x: Tensor, batch_first: bool) -> Tensor:
    return _moved(x, x, x, 0, 1, False, batch_first)


def _moved(
    x: Tensor, cos: Tensor, sin: Tensor, half: int, sign: int, interleaved: bool, batch_first: bool
) -> Tensor:
    """x [s, b, n, d] with the first `half` pairs of each head rotated, in new memory."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    _, b, n, d = x.shape
    out = empty_heads(x, batch_first)
    lines = max(1, 2 * BLOCK // triton.next_power_of_2(d))
    _rotate_kernel[(triton.cdiv(x.numel() // d, lines),)](
        x,
        cos,
        sin,
        out,
        x.numel() // d,
        b,
        *x.stride()[:3],
        *out.stride()[:3],
        *cos.stride()[:2],
        float(sign),
        HEADS=n,
        DIM=d,
        HALF=half,
        INTERLEAVED=interleaved,
        LINES=lines,
        WIDTH=triton.next_power_of_2(half),
        REST=triton.next_power_of_2(d - 2 * half) if d > 2 * half else 0,
    )
    return out


def _drop(x: Tensor, p: float, seed: Tensor, residual: Tensor | None = None) -> Tensor:
    x = x.contiguous()
    added = x if residual is None else residual.contiguous()
    out = torch.empty_like(added)
    on_device = seed.device.type != "cpu"
    _drop_kernel[_grid(x.numel())](
        x,
        added,
        out,
        x.numel(),
        p,
        1.0 / (1.0 - p),
        seed if on_device else int(seed),
        LOAD=on_device,
        ADD=residual is not None,
        WIDE=not INTERPRETED,
        BLOCK=BLOCK,
    )
    return out


def _norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, means: Tensor | None, scales: Tensor
) -> tuple[Tensor, Tensor]:
    grad = grad.contiguous()
    x = x.contiguous()
    width = x.shape[-1]
    rows = x.numel() // width
    block = power_of_two(width)
    programs, steps = row_blocks(rows, rows_of_norm(width), fused_ops.PROGRAMS_OF_NORM)
    out = empty_norm_backward(grad, x, weight, means)
    _norm_backward_kernel[(programs,)](
        grad,
        x,
        weight,
        scales if means is None else means,
        scales,
        *out,
        rows,
        width,
        steps,
        CENTERED=means is not None,
        ROWS=rows_of_norm(width),
        BLOCK=block,
        num_warps=max(4, min(block // 512, 16)),
    )
    return out


def _column_sums(x: Tensor) -> Tensor:
    x = x.contiguous()
    rows, width = x.shape
    programs, steps = row_blocks(rows, ROWS_OF_SUMS, fused_ops.PROGRAMS_OF_SUMS)
    sums = empty_column_sums(x)
    _column_sums_kernel[(programs, triton.cdiv(width, COLUMNS_OF_SUMS))](
        x, sums, rows, width, steps, ROWS=ROWS_OF_SUMS, BLOCK=COLUMNS_OF_SUMS
    )
    return sums


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
    "sum_rows": _sum_rows,
    "add_grouped_product_": _add_grouped_product,
    "rotate": _rotate,
    "move": _move,
    "drop": _drop,
    "norm_backward": _norm_backward,
    "column_sums": _column_sums,
    "row_losses": _row_losses,
    "loss_grad_": _loss_grad,
}
for _name, _run in RUNS.items():
    LIBRARY.impl(_name, _run, "CUDA")
