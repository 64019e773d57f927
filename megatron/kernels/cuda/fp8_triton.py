"""The operations of fp8_ops.py as Triton kernels, for CUDA: the largest magnitude of a tensor,
the scale from it, and its cast, as it is and transposed, in one pass."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.kernels.cuda.fp8_ops import LIBRARY, empty_casts

BLOCK = 2048
STEPS = 8  # blocks of a program of the maximum
TILE = 128  # rows and columns of a program of the cast


@triton.jit
def _amax_kernel(x, amax, total, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    # Magnitudes are ordered as their bits are, NaN above infinity: the maximum keeps it.
    offset = tl.program_id(0).to(tl.int64) * (BLOCK * STEPS) + tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), tl.int32)
    for _ in range(STEPS):
        value = tl.load(x + offset, mask=offset < total, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, value.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        offset += BLOCK
    tl.atomic_max(amax, tl.max(largest, 0))


@triton.jit
def _scale_kernel(amax, fixed, out, inverse, largest, most, FIXED: tl.constexpr):
    x = tl.load(amax)
    if FIXED:
        scale = tl.load(fixed)
    else:
        # as torch divides a number by a tensor
        scale = tl.minimum(tl.where(x > 0, tl.div_rn(1.0, x) * largest, 1.0), most)
    scale += x - x
    tl.store(out, scale)
    tl.store(inverse, tl.div_rn(1.0, scale))


@triton.jit
def _cast_kernel(
    x, scale, rows, columns, m, n, limit, ROWS: tl.constexpr, COLUMNS: tl.constexpr, T: tl.constexpr
):
    i = tl.program_id(0) * T + tl.arange(0, T)
    j = tl.program_id(1) * T + tl.arange(0, T)
    inside = (i < m)[:, None] & (j < n)[None, :]
    start = tl.program_id(2).to(tl.int64) * m * n
    offset = start + i.to(tl.int64)[:, None] * n + j[None, :]
    value = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32) * tl.load(scale)
    value = tl.clamp(value, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    if ROWS:
        tl.store(rows + offset, value.to(rows.dtype.element_ty), mask=inside)
    if COLUMNS:
        offset = start + j.to(tl.int64)[:, None] * m + i[None, :]
        q = value.to(columns.dtype.element_ty)
        tl.store(columns + offset, tl.trans(q), mask=tl.trans(inside))


def _amax_(amax: Tensor, x: Tensor) -> None:
    grid = (triton.cdiv(x.numel(), BLOCK * STEPS),)
    _amax_kernel[grid](x.contiguous(), amax.view(torch.int32), x.numel(), BLOCK=BLOCK, STEPS=STEPS)


def _scale(amax: Tensor, fixed: Tensor | None, largest: float) -> tuple[Tensor, Tensor]:
    out = amax.new_empty(()), amax.new_empty(())
    most = torch.finfo(torch.float32).max
    known = amax if fixed is None else fixed
    _scale_kernel[(1,)](amax, known, *out, largest, most, FIXED=fixed is not None)
    return out


def _cast(
    x: Tensor, scale: Tensor, dtype: torch.dtype, rows: bool, columns: bool
) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    out = empty_casts(x, scale, dtype, rows, columns)
    if x.numel():
        m, n = x.shape[-2:]
        grid = (triton.cdiv(m, TILE), triton.cdiv(n, TILE), x.numel() // (m * n))
        limit = torch.finfo(dtype).max
        _cast_kernel[grid](
            x, scale, *out, m, n, limit, ROWS=rows, COLUMNS=columns, T=TILE, num_warps=8
        )
    return out


RUNS = {"fp8_amax_": _amax_, "fp8_scale": _scale, "fp8_cast": _cast}
for _name, _run in RUNS.items():
    LIBRARY.impl(_name, _run, "CUDA")
