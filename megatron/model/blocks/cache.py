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
    those up to itself. lengths: how many tokens of each row count, the others are padding.
    """

    def __init__(
        self,
        row: int,
        length: int,
        starts: Sequence[int] | None,
        positions: torch.Tensor,
        end: int,
        lengths: Sequence[int] | None = None,
    ):
        b, s = positions.shape
        device = positions.device
        self.starts = starts
        self.positions = positions
        self.lengths = [s] * b if lengths is None else lengths
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
    rewinds = True  # may a call begin at any position that was read?

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

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def remember(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Store values [s, b, *shape] of the call's tokens; all of its sequences so far, [b, end,
        *shape]."""
        stored = self._tensors[name]
        stored.flatten(0, 1).index_copy_(0, self.tokens.slots, values.transpose(0, 1).flatten(0, 1))
        return stored[self.tokens.rows, : self.tokens.end]

    @property
    def seen(self) -> tuple[torch.Tensor | None, bool]:
        """(mask, causal): which of the positions of `remember` the call's tokens see, as of
        CachedTokens."""
        return self.tokens.visible, self.tokens.causal

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of the sequence `source` to the sequence `target`."""
        for tensor in self._tensors.values():
            tensor[target, :length] = tensor[source, :length]


class WindowCache(Cache):
    """Of a block whose tokens see `window` positions, themselves among them: no more are kept,
    position p where position p - `window` was."""

    rewinds = False

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        rows: int,
        window: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        super().__init__(shapes, rows, window, dtype, device)
        self.window = window

    def remember(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Store values [s, b, *shape] of the call's last tokens; of a single token all that is kept
        then, [b, up to window, *shape], else what was kept and all values, [b, window + s,
        *shape]."""
        tokens = self.tokens
        positions = tokens.positions
        stored = self._tensors[name]
        values = values.transpose(0, 1)
        rows = torch.arange(tokens.rows.start, tokens.rows.stop, device=positions.device)
        slots = rows.unsqueeze(1) * self.window + positions % self.window
        if positions.shape[1] == 1:
            stored.flatten(0, 1).index_copy_(0, slots.flatten(), values.flatten(0, 1))
            return stored[tokens.rows, : tokens.end]
        both = torch.cat((stored[tokens.rows], values), 1)
        ends = torch.tensor(tokens.lengths, device=positions.device).unsqueeze(1)
        offsets = torch.arange(positions.shape[1], device=positions.device)
        last = (offsets < ends) & (offsets >= ends - self.window)
        stored.flatten(0, 1)[slots[last]] = values[last]
        return both

    @property
    def seen(self) -> tuple[torch.Tensor | None, bool]:
        """As of Cache."""
        visible = self.tokens.visible
        positions = self.tokens.positions
        b, s = positions.shape
        if s == 1:  # a place is filled if its position of the first round is no later one
            return None if visible is None else visible[..., : self.window], False
        offsets = torch.arange(s, device=positions.device)
        back = offsets.unsqueeze(1) - offsets
        among = ((back >= 0) & (back < self.window)).expand(b, -1, -1)
        starts = positions[:, :1]
        places = torch.arange(self.window, device=positions.device)
        ages = (starts - 1 - places) % self.window + 1  # of what is kept, before the first token
        kept = (ages <= starts).unsqueeze(1) & (
            ages.unsqueeze(1) + offsets.unsqueeze(1) < self.window
        )
        return torch.cat((kept, among), 2).unsqueeze(1), False


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, because what is masked must be finite; on a CPU they take no memory before they are
    written, so that a long context costs nothing until it is used."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    data = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(data).view(dtype).view(shape)
