"""Rotary position embedding: tables of angles and their application; knows tensors, no attention."""

import torch
from torch import Tensor


def rotary_tables(
    positions_or_length: Tensor | int,
    dim: int,
    base: float = 10000.0,
    *,
    interpolation_factor: float | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles (Su et al. 2021).

    positions_or_length: a length s (positions 0..s-1), positions [s], or positions per sample [b, s]. `dim` is the
    even number of rotated dimensions of a head (kv_channels * rotary percent). Positions are divided by
    `interpolation_factor` (--rotary-seq-len-interpolation-factor) if it is given.

    Returns (cos, sin), each [s, dim / 2], or [s, b, dim / 2] for positions per sample, as `apply_rotary` takes them.
    Angles are computed in fp64, so that a long position is exact in `dtype`.
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
    angles = positions.unsqueeze(-1) * torch.pow(float(base), -exponents)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate the first 2 * cos.shape[-1] dimensions of each head, pass the others through.

    x [s, b, n, d]; cos and sin [s, dim / 2] or [s, b, dim / 2] with dim <= d. Pairs are (i, i + dim / 2), or
    (2 i, 2 i + 1) if `interleaved`. Computed in the wider of the dtypes of x and cos, returned in x's.
    """
    half = cos.shape[-1]
    while cos.dim() < x.dim():
        cos, sin = cos.unsqueeze(1 if cos.dim() == 2 else 2), sin.unsqueeze(1 if sin.dim() == 2 else 2)
    rotated, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        first, second = rotated.unflatten(-1, (half, 2)).unbind(-1)
    else:
        first, second = rotated.chunk(2, -1)
    parts = (first * cos - second * sin, second * cos + first * sin)
    out = (torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)).to(x.dtype)
    return torch.cat((out, rest), -1) if rest.shape[-1] else out
