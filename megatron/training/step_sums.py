"""The sums of one step: losses, tokens and counts, first over micro-batches, then over ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron.training.agreement import Requests


class Totals(NamedTuple):
    """The sums over micro-batches and ranks, on the host."""

    loss: float
    tokens: float
    requests: Requests
    data_hash: tuple[float, ...]
    subsets: list[float]


class StepSums:
    """Named sums in one float64 tensor `values`, so that one collective sums them all.

    Each name is a view [n] of `values`: `loss` and `tokens` [1], `requests` one per field of
    `Requests`, `data_hash` the low and the high 32 bits of the hash of --data-ledger (without
    `data_hash` [0]), `subsets` the counts of `RowCounts` [`subsets`].
    """

    def __init__(self, device: torch.device, data_hash: bool = False, subsets: int = 0) -> None:
        sizes = [1, 1, len(Requests._fields), 2 * data_hash, subsets]
        self.values = torch.zeros(sum(sizes), dtype=torch.float64, device=device)
        self._sizes = sizes
        self.loss, self.tokens, self.requests, self.data_hash, self.subsets = self.values.split(
            sizes
        )

    def totals(self) -> Totals:
        """All sums by name. It waits for the device, once."""
        values = iter(self.values.tolist())
        loss, tokens, requests, data_hash, subsets = (
            [next(values) for _ in range(size)] for size in self._sizes
        )
        return Totals(loss[0], tokens[0], Requests(*map(int, requests)), tuple(data_hash), subsets)


def set_counts(slots: torch.Tensor, counts: tuple[float, ...]) -> None:
    """Write counts [n] into slots that are zeros; only those that are not 0, since on a GPU each
    one written takes a kernel."""
    for slot, count in enumerate(counts):
        if count:
            slots[slot] = count
