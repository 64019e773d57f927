"""The sums of gradients, computed twice for --verify-step-interval: what was wrong once gives
another result the second time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import torch

from megatron.parallel.ddp import GradBuffers

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
        gradients = buffers.flat[bucket.range]
        local = gradients.clone()
        digests = []
        for _ in range(2):
            gradients.copy_(local)
            buffers.reduction.sum_over_ranks([bucket])
            sharded = bucket.replicas.shard.size > 1
            digests.append(digest(buffers.flat[bucket.shard] if sharded else gradients))
        same = bucket.replicas.instances
        ranks = same.ranks if same.size > 1 else ()
        sums.append(RepeatedSum(digests[0], digests[1], ranks))
    return sums
