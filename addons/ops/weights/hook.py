"""The hook that ends a run whose data-parallel ranks hold different weights: memory or a processor
may be faulty."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from megatron.parallel.collectives import gather_objects
from megatron.parallel.context import Axis
from megatron.parallel.sharding import sharding_of
from megatron.training.hook import Hook
from megatron.training.launch.process import this_process
from megatron.training.result import IterationResult
from megatron.training.run import Run
from megatron.training.weight_check import weight_hashes


class WeightsDiffer(ArithmeticError):
    """Data-parallel ranks hold different weights; the text names ranks and parameters."""


def check_replicas(
    named: Sequence[tuple[str, torch.Tensor]], replicas: Axis, iteration: int
) -> None:
    """Compare weights of this rank, with their names, over the ranks that hold the same ones.

    Raises WeightsDiffer, on all of these ranks alike.
    """
    if replicas.size == 1 or not named:
        return
    own = weight_hashes(parameter for _, parameter in named), str(this_process())
    ranks, names = zip(*gather_objects(own, replicas), strict=True)
    different = [index for index in range(len(named)) if len({rank[index] for rank in ranks}) > 1]
    if not different:
        return
    first = different[0]
    votes = Counter(rank[first] for rank in ranks)
    usual, count = votes.most_common(1)[0]
    odd = [name for name, hashes in zip(names, ranks, strict=True) if hashes[first] != usual]
    suspects = odd if count > len(ranks) - count else names
    raise WeightsDiffer(
        f"iteration {iteration}: {len(different)} of {len(named)} parameters differ between "
        f"data-parallel ranks, first {named[first][0]}; {', '.join(suspects)} "
        f"{'differ' if len(suspects) > 1 else 'differs'}. Memory or a processor there may be "
        "faulty: test it, and resume from a checkpoint of before [weights-differ]"
    )


def compare_weights(run: Run, iteration: int) -> None:
    """All parameters, or this rank's shards of them, over the ranks that hold the same ones.
    Raises WeightsDiffer."""
    named = [pair for chunk in run.model for pair in chunk.named_parameters()]
    for kind in ("dense", "experts"):
        same = [(name, run.buffers.held(p)) for name, p in named if sharding_of(p).replicas == kind]
        replicas = run.runtime.ctx.replicas(kind)
        shares = run.runtime.ctx.shares_weights
        check_replicas(same, replicas.instances if shares else replicas.data, iteration)


class WeightComparison(Hook):
    """--check-weight-hash-across-dp-replicas-interval. It comes before anything is saved."""

    before = ("OwnModelChecks", "StoreReads", "SpikeDetection", "IterationLog")
    after = ("HangWatch", "Profiling")

    def __init__(self, run: Run, interval: int):
        self._run = run
        self._interval = interval

    def after_step(self, result: IterationResult) -> None:
        if result.iteration % self._interval == 0:
            compare_weights(self._run, result.iteration)
