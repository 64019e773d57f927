"""Stateless dropout seeds, and activation recomputation that repeats the same dropout.

A mask is a pure function of where it is used, so recompute, skipped ranges, rewinds and resumes in
another layout have nothing to save and nothing to restore.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TypeVar

import torch
from torch.utils.checkpoint import checkpoint

Result = TypeVar("Result")


def dropout_seed(
    seed: int, iteration: int, micro_batch: int, layer: int, site: str, shard: int | tuple[int, ...]
) -> int:
    """A stable 63-bit hash of one use of dropout: the same on every machine and Python.

    `layer` is the global layer number (-1: the embedding); `site` names the place in it; `shard`
    says which part of the global tensor this is, so that ranks with other rows or heads draw other
    masks.
    """
    key = f"{seed}/{iteration}/{micro_batch}/{layer}/{site}/{shard}"
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") >> 1


class DropoutSeeds:
    """The dropout streams of one micro-batch on one rank; `shard` is the rank among those that see
    other tokens."""

    def __init__(self, seed: int, iteration: int, micro_batch: int, shard: int = 0):
        self._use = (seed, iteration, micro_batch)
        self._shard = shard

    def seed(self, layer: int, site: str, tp_part: int = 0) -> int:
        """The seed of one site; `tp_part`: the tensor-parallel rank where the tensor is split over
        those ranks."""
        return dropout_seed(*self._use, layer, site, (self._shard, tp_part))


def recompute_input(
    layer: Callable[[torch.Tensor], torch.Tensor],
    function: Callable[..., torch.Tensor],
    *args: object,
) -> torch.Tensor:
    """`layer(function(*args))`. Of the function only `args` are kept, and not the result, which
    `layer` would save for backward: there it is computed again."""
    y = recompute(function, *args)
    memory = (y.data_ptr(), y.shape)

    def pack(saved: torch.Tensor) -> torch.Tensor | None:
        return None if (saved.data_ptr(), saved.shape) == memory else saved

    def unpack(saved: torch.Tensor | None) -> torch.Tensor:
        if saved is not None:
            return saved
        with torch.no_grad():
            return function(*args)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return layer(y)


def recompute(function: Callable[..., Result], *args: object) -> Result:
    """`function(*args)`, whose activations are not kept but computed again in backward. Masks
    repeat by themselves."""
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
