"""Whether all data-parallel ranks hold the same weights (memory or a processor may be faulty)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from megatron.parallel.collectives import gather_objects
from megatron.parallel.context import Axis
from megatron.parallel.sharding import sharding_of
from megatron.training.hook import Hook
from megatron.training.launch.process import this_process
from megatron.training.result import IterationResult
from megatron.training.run import Run

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class WeightsDiffer(ArithmeticError):
    """Data-parallel ranks hold different weights; the text names ranks and parameters."""


@torch.no_grad()
def weight_hashes(parameters: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    """Two sums of each parameter's bits, modulo 2^64: of its elements as integers, and of their
    squares. One host sync.

    Any one changed element changes the first sum.
    """
    sums = []
    for parameter in parameters:
        bits = parameter.detach().view(_INTEGERS[parameter.itemsize])
        wide = bits.to(torch.int64)
        sums.append(torch.stack([wide.sum(), (wide * wide).sum()]))
    return [tuple(pair) for pair in torch.stack(sums).tolist()] if sums else []


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
    """All parameters, over the ranks that hold the same ones. Raises WeightsDiffer."""
    named = [pair for chunk in run.model for pair in chunk.named_parameters()]
    for kind in ("dense", "experts"):
        same = [pair for pair in named if sharding_of(pair[1]).replicas == kind]
        check_replicas(same, run.runtime.ctx.replicas(kind).data, iteration)


class WeightComparison(Hook):
    """--check-weight-hash-across-dp-replicas-interval. It comes before anything is saved."""

    def __init__(self, run: Run):
        self._run = run
        interval = run.config.training.check_weight_hash_across_dp_replicas_interval
        assert interval is not None
        self._interval = interval

    def after_step(self, result: IterationResult) -> None:
        if result.iteration % self._interval == 0:
            compare_weights(self._run, result.iteration)
