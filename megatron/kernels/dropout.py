"""Dropout whose mask is a pure function of (seed, shape, device); keeps no generator state and no mask."""

import torch
from torch import Tensor


def seeded_generator(seed: int, device: torch.device) -> torch.Generator:
    """A fresh generator on `device` whose stream depends on `seed` alone."""
    return torch.Generator(device=device).manual_seed(seed)


def keep_mask(shape: torch.Size | tuple[int, ...], p: float, generator: torch.Generator) -> Tensor:
    """The next bool mask of `shape` of the generator: True (keep) with probability 1 - p."""
    return torch.empty(shape, dtype=torch.bool, device=generator.device).bernoulli_(1.0 - p, generator=generator)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, p: float, seed: int) -> Tensor:
        ctx.p, ctx.seed = p, seed
        return _drop(x, p, seed)

    @staticmethod
    def backward(ctx, grad_out: Tensor):
        return _drop(grad_out, ctx.p, ctx.seed), None, None


def _drop(x: Tensor, p: float, seed: int) -> Tensor:
    mask = keep_mask(x.shape, p, seeded_generator(seed, x.device))
    return x * (mask.to(x.dtype) * (1.0 / (1.0 - p)))


def dropout(x: Tensor, p: float, seed: int) -> Tensor:
    """Zero each element with probability p and scale the others by 1 / (1 - p). x: any shape.

    The mask is a pure function of (seed, shape, device type), drawn again in backward and never stored.
    """
    assert 0.0 <= p < 1.0, f"dropout probability must be in [0, 1), got {p}"
    return x if p == 0.0 else _Dropout.apply(x, p, seed)
