"""What a step of packed samples says beside its loss: how its rows are filled, and loss and tokens of each subset.

It knows rows as the loader hands them out and sums; it must not know models, files or logs.
"""
from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.data.packed import POSITIONS
from megatron.parallel.context import ParallelContext
from megatron.training.batch import Batch

# Of the rows of data-parallel rank 0, as InternLM logs them: pieces, the longest one's tokens, the most and the fewest
# pieces of a row (facts/internlm.md 3).
FILLED = ("num_samples_in_batch", "largest_length", "largest_batch", "smallest_batch")


class RowCounts:
    """One rank's part of a step's counts; they travel with numbers that are summed anyway, in `size` slots."""

    def __init__(self, subsets: Sequence[str], ctx: ParallelContext, accuracy: bool = False) -> None:
        self.subsets = tuple(subsets)
        self.kinds = 3 if accuracy else 2       # losses, tokens, and labels that the model ranks first
        self.size = len(FILLED) + self.kinds * len(self.subsets)
        self._tells = not (ctx.dp.rank or ctx.cp.rank or ctx.tp.rank or ctx.pp.rank)
        self._sums = ctx.tp.rank == 0           # the others have the same losses
        self._rows: list[tuple[int, int]] = []

    def see(self, lines: torch.Tensor) -> None:
        """Take in a row [1, 4, s] of this rank, still on the host."""
        if self._tells:
            positions = lines[0, POSITIONS]
            self._rows.append((int((positions == 0).sum()), int(positions.max()) + 1))

    def add(self, slots: torch.Tensor, batch: Batch, loss: torch.Tensor, tokens: torch.Tensor | int,
            right: torch.Tensor | None = None) -> None:
        """Add a micro-batch's sum of losses and tokens, and of labels that are `right` (bool [s]), to its subset: a row
        holds one file, so one subset."""
        first, count = len(FILLED), len(self.subsets)
        subset = batch.subset_ids[0, :1]
        kinds = [loss.detach(), torch.as_tensor(tokens, device=loss.device)]
        if right is not None:
            kinds.append((right * batch.loss_mask.view(-1)).sum())
        slots[first:].view(self.kinds, count).index_add_(1, subset, torch.stack([k.to(slots.dtype) for k in kinds])[:, None])

    def close(self, slots: torch.Tensor) -> None:
        """The step is over: complete this rank's slots, and begin anew."""
        if not self._sums:
            slots.zero_()
        if self._tells:
            pieces, longest = zip(*self._rows, strict=True)
            slots[: len(FILLED)] = torch.tensor([sum(pieces), max(longest), max(pieces), min(pieces)], dtype=slots.dtype)
        self._rows.clear()

    def named(self, sums: Sequence[float]) -> dict[str, float | int | None]:
        """The sums of all ranks by name; the loss of a subset without tokens is None."""
        found: dict[str, float | int | None] = {name: int(value) for name, value in zip(FILLED, sums, strict=False)}
        count = len(self.subsets)
        losses, tokens, *right = (sums[len(FILLED) + kind * count :][:count] for kind in range(self.kinds))
        if right:
            found["acc"] = sum(right[0]) / max(1.0, sum(tokens))
            found |= {f"acc/{name}": hits / value if value else None
                      for name, hits, value in zip(self.subsets, right[0], tokens, strict=True)}
        found |= {f"tokens/{name}": int(value) for name, value in zip(self.subsets, tokens, strict=True)}
        found |= {f"loss/{name}": loss / value if value else None
                  for name, loss, value in zip(self.subsets, losses, tokens, strict=True)}
        return found
