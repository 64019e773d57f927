"""Reads FP8 weights with a scale for each block of rows and columns, as DeepSeek-V3's files have
them, in full precision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .links import ConversionError, Header

if TYPE_CHECKING:
    import torch

SCALE = "_scale_inv"  # behind the name of a weight: the name of its scales
Block = tuple[int, int]


def block_of(config: Mapping[str, Any]) -> Block | None:
    """Rows and columns of a block by config.json; None where its weights are not such ones."""
    how = config.get("quantization_config")
    if not isinstance(how, dict) or how.get("quant_method") != "fp8":
        return None
    match how.get("weight_block_size"), how.get("fmt", "e4m3"):
        case [int(rows), int(columns)], "e4m3" if rows > 0 and columns > 0:
            return rows, columns
    return None


def full_precision(headers: Mapping[str, Header], config: Mapping[str, Any]) -> dict[str, Header]:
    """Headers of a folder whose weights with scales have the dtype of config.json (bfloat16 if it
    says none), without the scales. Raises ConversionError for scales of another number than blocks.
    """
    import torch

    block = block_of(config)
    if block is None:
        return dict(headers)
    dtype = dtype_of(config)
    found = {}
    for name, (own, shape) in headers.items():
        if name.removesuffix(SCALE) != name and name.removesuffix(SCALE) in headers:
            continue
        scales = headers.get(name + SCALE)
        if scales is not None:
            blocks = tuple(-(-size // of) for size, of in zip(shape, block, strict=False))
            if own != torch.float8_e4m3fn or len(shape) != 2 or scales[1] != blocks:
                raise ConversionError(
                    f"{name} is {own} {list(shape)}, and {name + SCALE} has {list(scales[1])} "
                    f"scales, should have {list(blocks)} of blocks {list(block)} of float8_e4m3fn"
                )
        found[name] = (own if scales is None else dtype, shape)
    return found


def dtype_of(config: Mapping[str, Any]) -> torch.dtype:
    """That of the weights in full precision."""
    import torch

    dtype = getattr(torch, str(config.get("dtype") or config.get("torch_dtype")), None)
    return dtype if isinstance(dtype, torch.dtype) else torch.bfloat16


def dequantized(
    weight: torch.Tensor, scales: torch.Tensor, block: Block, dtype: torch.dtype
) -> torch.Tensor:
    """weight [out, in] times the scale of its block, a float32 product rounded once to `dtype`."""
    import torch

    rows, columns = weight.shape
    wide = scales.float().repeat_interleave(block[1], 1)[:, :columns]
    found = torch.empty(weight.shape, dtype=dtype)
    for number, row in enumerate(wide):  # a block of rows at a time
        part = slice(number * block[0], (number + 1) * block[0])
        found[part] = weight[part].float() * row
    return found
