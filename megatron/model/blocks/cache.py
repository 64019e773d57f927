"""What generation keeps of earlier positions, and where the tokens of a call are among them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch


class CachedTokens:
    """Where the tokens of one call are in the cache and which positions they see; the same for
    every layer.

    starts: the first position of each row, of which some need no mask; None for a mask whatever
    they are. positions [b, s]. slots [b * s]: their places in the cache as a list of positions.
    visible [b, 1, s, end]: None where every token sees all of `end` positions, or with `causal`
    those up to itself.
    """

    def __init__(
        self,
        row: int,
        length: int,
        starts: Sequence[int] | None,
        positions: torch.Tensor,
        end: int,
    ):
        b, s = positions.shape
        device = positions.device
        self.positions = positions
        self.rows = slice(row, row + b)
        self.end = min(end, length)
        self.causal = starts is not None and max(starts) == 0 and s > 1
        alike = starts is not None and s == 1 and min(starts) == max(starts)
        rows = torch.arange(row, row + b, device=device).unsqueeze(1)
        self.slots = (rows * length + positions).flatten()
        self.visible = None
        if not (self.causal or alike):
            ids = torch.arange(self.end, device=device)
            self.visible = (ids <= positions.unsqueeze(-1)).unsqueeze(1)


class Cache:
    """Tensors [rows, length, *shape] of one block, by name, of `rows` sequences of up to `length`
    tokens. `tokens`: those of the call in progress."""

    tokens: CachedTokens

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        rows: int,
        length: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self._tensors = {
            name: _zeros((rows, length, *shape), dtype, device) for name, shape in shapes.items()
        }

    def append(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Store values [s, b, *shape] of the call's tokens; all of its sequences so far, [b, end,
        *shape]."""
        stored = self._tensors[name]
        stored.flatten(0, 1).index_copy_(0, self.tokens.slots, values.transpose(0, 1).flatten(0, 1))
        return stored[self.tokens.rows, : self.tokens.end]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of the sequence `source` to the sequence `target`."""
        for tensor in self._tensors.values():
            tensor[target, :length] = tensor[source, :length]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, because what is masked must be finite; on a CPU they take no memory before they are
    written, so that a long context costs nothing until it is used."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    data = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(data).view(dtype).view(shape)
