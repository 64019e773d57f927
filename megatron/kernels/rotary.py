"""Rotary position embedding: tables of angles and their application."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.config.rope import LLAMA3_CONTEXT, LLAMA3_HIGH, LLAMA3_LOW, Yarn
from megatron.kernels.cpu import native
from megatron.kernels.cpu.blocking import for_each, row_blocks
from megatron.kernels.rows import Row, rivals


def rotary_tables(
    positions_or_length: Tensor | int,
    dim: int,
    base: float = 10000.0,
    *,
    interpolation_factor: float | None = None,
    scaling_factor: float | None = None,
    yarn: Yarn | None = None,
    divisors: Sequence[float] | None = None,
    length: float = 1.0,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles (Su et al. 2021).

    positions_or_length: a length s (positions 0..s-1), positions [s], or positions per sample [b,
    s]. `dim` is the even number of rotated dimensions of a head (kv_channels * rotary percent).
    Positions are divided by `interpolation_factor` (--rotary-seq-len-interpolation-factor) if it is
    given, and slow frequencies by `scaling_factor` (`slowed`) or as `yarn` says (`lengthened`), or
    each by its own number in `divisors` [dim / 2]. Cosines and sines are multiplied by `length`, or
    by that of `yarn`.

    Returns (cos, sin), each [s, dim / 2], or [s, b, dim / 2] for positions per sample, as
    `apply_rotary` takes them. Angles are computed in fp64, so that a long position is exact in
    `dtype`.
    """
    assert dim % 2 == 0 and dim > 0, f"rotary dimensions must be even, got {dim}"
    if isinstance(positions_or_length, Tensor):
        positions = positions_or_length.to(device=device, dtype=torch.float64)
    else:
        positions = torch.arange(positions_or_length, device=device, dtype=torch.float64)
    if positions.dim() == 2:
        positions = positions.t()
    if interpolation_factor is not None:
        positions = positions / interpolation_factor
    exponents = torch.arange(0, dim, 2, device=positions.device, dtype=torch.float64) / dim
    frequencies = torch.pow(float(base), -exponents)
    if scaling_factor is not None:
        frequencies = slowed(frequencies, scaling_factor)
    if yarn is not None:
        frequencies = lengthened(frequencies, float(base), yarn)
        length = yarn.length
    if divisors is not None:
        frequencies = frequencies / frequencies.new_tensor(divisors)
    angles = positions.unsqueeze(-1) * frequencies
    return (angles.cos() * length).to(dtype), (angles.sin() * length).to(dtype)


def slowed(frequencies: Tensor, factor: float) -> Tensor:
    """Llama 3.1's frequencies (Dubey et al. 2024; the numbers are those of its code), in radians
    per position.

    With c = 8,192 positions: those that turn more than 4 times in c stay, those that turn less than
    once are divided by `factor`, and between the two the result goes over linearly in the number of
    turns.
    """
    turns = frequencies * LLAMA3_CONTEXT / (2 * torch.pi)
    unchanged = ((turns - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW)).clamp(0, 1)
    return frequencies * (unchanged + (1 - unchanged) / factor)


def lengthened(frequencies: Tensor, base: float, yarn: Yarn) -> Tensor:
    """YaRN's frequencies [dim / 2], as transformers defines them: between the channels that turn
    `fast` and `slow` times in the old context they go over to those divided by `factor`."""
    channels = len(frequencies)

    def channel(turns: float) -> float:
        return channels * math.log(yarn.context / (turns * 2 * math.pi)) / math.log(base)

    first, last = channel(yarn.fast), channel(yarn.slow)
    if yarn.rounded:
        first, last = math.floor(first), math.ceil(last)
    first = max(first, 0)
    last = min(last, 2 * channels - 1)
    if first == last:
        last += 0.001
    numbers = torch.arange(channels, dtype=frequencies.dtype, device=frequencies.device)
    slow = ((numbers - first) / (last - first)).clamp(0, 1)
    return frequencies * (1 - slow + slow / yarn.factor)


def _on_heads(x: Tensor, table: Tensor) -> Tensor:
    """A table that is multiplied with the heads of `x`."""
    while table.dim() < x.dim():
        table = table.unsqueeze(1 if table.dim() == 2 else 2)
    return table


def _plain(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, batch_first: bool) -> Tensor:
    cos, sin = _on_heads(x, cos), _on_heads(x, sin)
    half = cos.shape[-1]
    first, second = _pairs(x, half, interleaved)
    turned = (first * cos - second * sin, second * cos + first * sin)
    out = (torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)).to(
        x.dtype
    )
    return torch.cat((out, x[..., 2 * half :]), -1) if x.shape[-1] > 2 * half else out


def _in_blocks(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, batch_first: bool) -> Tensor:
    return _Rotary.apply(x, _on_heads(x, cos), _on_heads(x, sin), interleaved)


def _in_cpp(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, batch_first: bool) -> Tensor:
    return _NativeRotary.apply(x, _on_heads(x, cos), _on_heads(x, sin))


def _in_triton(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, batch_first: bool) -> Tensor:
    from megatron.kernels.cuda.fused_ops import Rotary

    tables = _on_heads(x, cos), _on_heads(x, sin)
    return Rotary.apply(x, *tables, interleaved, batch_first)


def _pairs(x: Tensor, half: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Views of the first and the second numbers of all pairs, each [..., half]."""
    if interleaved:
        return x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    return x[..., :half], x[..., half : 2 * half]


class _Rotary(torch.autograd.Function):
    """Keeps nothing of its input: backward rotates the gradient the other way round."""

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rotate(x, cos, sin, 1, interleaved)

    @staticmethod
    def backward(ctx, grad_out: Tensor):
        cos, sin = ctx.saved_tensors
        return _rotate(grad_out, cos, sin, -1, ctx.interleaved), None, None, None


class _NativeRotary(torch.autograd.Function):
    """The same by the C++."""

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return native.rotate(x, cos, sin, 1)

    @staticmethod
    def backward(ctx, grad_out: Tensor):
        cos, sin = ctx.saved_tensors
        return native.rotate(grad_out, cos, sin, -1), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: int, interleaved: bool) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    wide = torch.promote_types(x.dtype, cos.dtype)
    half = cos.shape[-1]

    def work(rows: slice) -> None:
        block = x[rows].to(wide)
        result = out[rows] if wide == x.dtype else torch.empty_like(block)
        result[..., 2 * half :] = block[..., 2 * half :]
        first, second = _pairs(block, half, interleaved)
        to_first, to_second = _pairs(result, half, interleaved)
        torch.mul(first, cos[rows], out=to_first).addcmul_(second, sin[rows], value=-sign)
        torch.mul(second, cos[rows], out=to_second).addcmul_(first, sin[rows], value=sign)
        if result.dtype != x.dtype:
            out[rows] = result

    for_each(row_blocks(x.shape[0], out[0].numel()), x.device, work)
    return out


ROTARY: tuple[Row, ...] = rivals(
    _plain,
    _in_blocks,
    _in_cpp,
    _in_triton,
    takes=frozenset({"interleaved", "other_shape"}),
    plain_takes=frozenset({"no_rope_fusion"}),
)
