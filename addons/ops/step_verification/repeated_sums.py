"""The sums of gradients, computed twice for --verify-step-interval: what was wrong once gives
another result the second time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import torch

from megatron.parallel.ddp import GradBuffers
from megatron.parallel.fsdp import Piece, UnitReduction

Digest = TypeVar("Digest")


class RepeatedSum(NamedTuple, Generic[Digest]):
    """Digests of what this rank has of a bucket's sums, of both computations. `same` are the ranks
    that have the same sums, if there are others."""

    first: Digest
    second: Digest
    same: tuple[int, ...]


def reduce_twice(
    buffers: GradBuffers, digest: Callable[[torch.Tensor], Digest]
) -> list[RepeatedSum[Digest]]:
    """Sum as `buffers.reduce()` does, but bucket by bucket, each twice; needs the memory of a
    bucket."""
    sums = []
    for bucket in buffers.buckets:
        gradients, own = buffers.summed(bucket)
        local = gradients.clone()
        digests = []
        for _ in range(2):
            gradients.copy_(local)
            buffers.reduction.sum_over_ranks([bucket])
            digests.append(digest(own))
        same = bucket.replicas.instances
        ranks = same.ranks if same.size > 1 else ()
        sums.append(RepeatedSum(digests[0], digests[1], ranks))
    return sums


class UnitSums(Generic[Digest]):
    """Of gradients that ranks share: in place of `reduction.start`, digests of those of a unit,
    which are gone when all are complete, and its sum twice."""

    def __init__(self, reduction: UnitReduction, digest: Callable[[torch.Tensor], Digest]):
        self._start = type(reduction).start.__get__(reduction)
        self._digest = digest
        self.local: list[Digest] = []
        self.sums: list[RepeatedSum[Digest]] = []

    def __call__(self, piece: Piece) -> Callable[[], torch.Tensor]:
        """As `UnitReduction.start`, but the sum is there then."""
        self.local += [self._digest(p.main_grad) for p in piece.bucket.params]
        once = self._digest(self._start(piece._replace(grads=piece.grads.clone()))())
        total = self._start(piece)()
        self.sums.append(RepeatedSum(self._digest(total), once, ()))
        return lambda: total
