"""Tensors of random bits, in every dtype and shape that a file of safetensors may hold."""

import torch

from megatron.checkpoint.safetensors_file import DTYPES, bytes_of

SHAPES = [(), (0,), (1,), (3, 5), (7, 0, 2), (2, 3, 4), (129,)]


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Random bits (NaNs included) of any dtype."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    length = torch.Size(shape).numel() * dtype.itemsize
    return (
        torch.randint(0, 256, (length,), generator=generator, dtype=torch.uint8)
        .view(dtype)
        .reshape(shape)
    )


def of_all_kinds() -> dict[str, torch.Tensor]:
    """One tensor of every dtype and shape, by a name with both."""
    return {
        f"layer é {name} {shape}": random_tensor(dtype, shape, 7)
        for name, dtype in DTYPES.items()
        for shape in SHAPES
    }


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and bytes_of(a.contiguous()) == bytes_of(b.contiguous())
    )
