"""Stateless dropout seeds.

A mask is a pure function of where it is used, so recompute, skipped ranges, rewinds and resumes in
another layout have nothing to save and nothing to restore.
"""

import hashlib

import torch


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

    def tensor(self, layer: int, site: str, tp_part: int = 0) -> torch.Tensor:
        """The same without dimensions on the CPU: a compiled graph would hold an integer."""
        return torch.tensor(self.seed(layer, site, tp_part))


Place = tuple[int, str, int]  # layer, site, tp_part
