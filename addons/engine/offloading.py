"""Tensors of a run whose memory is on the host for a while: their storages are emptied and filled,
so that every view of them stays what it is."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megatron.training.checkpointing.save import own_tensors
from megatron.training.run import Run

Storage = torch.UntypedStorage


def memory_of(run: Run) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(what a run keeps from step to step, what is made again in each) on this rank."""
    kept = [tensor for *_, parts in own_tensors(run) for _, tensor in parts]
    kept += [*run.model.parameters(), *run.model.buffers()]
    return kept, [run.buffers.flat]


class Offloaded:
    """`kept` tensors on the host (unless not `copies`: then they stay), `free` ones nowhere."""

    def __init__(
        self, kept: Iterable[torch.Tensor], free: Iterable[torch.Tensor], copies: bool = True
    ):
        self._sizes: list[tuple[Storage, int]] = []
        self._copies: list[tuple[Storage, torch.Tensor]] = []
        freed = _storages(free)
        for storage in freed.values():
            self._empty(storage)
        for place, storage in _storages(kept).items() if copies else ():
            if place not in freed:
                self._copies.append((storage, _bytes(storage).to("cpu", copy=True)))
                self._empty(storage)

    def _empty(self, storage: Storage) -> None:
        self._sizes.append((storage, storage.nbytes()))
        storage.resize_(0)

    def back(self) -> None:
        """Fill the storages again; those that were freed with zeros."""
        for storage, size in self._sizes:
            storage.resize_(size)
            _bytes(storage).zero_()
        for storage, values in self._copies:
            _bytes(storage).copy_(values)


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, Storage]:
    """Each that has memory, once."""
    found = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            found[storage.data_ptr()] = storage
    return found


def _bytes(storage: Storage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
