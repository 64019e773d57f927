"""Hooks that end a run whose weights are wrong: data-parallel ranks differ (memory or a processor
may be faulty), or a model of a script's own breaks what training takes for granted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from megatron.parallel.collectives import all_reduce, gather_objects
from megatron.parallel.context import Axis
from megatron.parallel.sharding import GIVEN, sharding_of
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

    def __init__(self, run: Run):
        self._run = run
        interval = run.config.training.check_weight_hash_across_dp_replicas_interval
        assert interval is not None
        self._interval = interval

    def after_step(self, result: IterationResult) -> None:
        if result.iteration % self._interval == 0:
            compare_weights(self._run, result.iteration)


class OwnModelChecks(Hook):
    """What training a model of a script's own takes for granted: that its buffers are constants,
    which a resume makes anew, and, after the first step, that tensor-parallel ranks which hold the
    same parameter have the same gradient of it."""

    def __init__(self, run: Run):
        self._run = run
        self._first = True
        self._buffers = self._versions()

    def _versions(self) -> list[tuple[str, int, int]]:
        """Of each persistent buffer what changes when it is written or replaced."""
        state = self._run.model[0].state_dict(keep_vars=True)
        return [
            (name, id(value), value._version)
            for name, value in state.items()
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
        ]

    def after_step(self, result: IterationResult) -> None:
        changed = set(self._versions()) ^ set(self._buffers)
        if changed:
            raise ValueError(
                f"model_provider: buffer {min(changed)[0]} of {self._run.plan.own_model} has "
                "changed in a step, and checkpoints keep parameters alone; make it one with "
                "requires_grad=False, or register it with persistent=False if it may be made anew "
                "[model-buffer-changed]"
            )
        if self._first and self._run.runtime.ctx.tp.size > 1:
            self._check_gradients()
        self._first = False

    def _check_gradients(self) -> None:
        tp = self._run.runtime.ctx.tp
        for p in self._run.buffers.params:
            if p.sharding.init != GIVEN:
                continue
            own = p.main_grad.double()
            mean = all_reduce(own, tp) / tp.size
            apart = torch.stack([(own - mean).norm(), mean.norm()])
            most, norm = all_reduce(apart, tp, "max").tolist()
            if most > 1e-2 * norm:
                raise ValueError(
                    f"model_provider: the gradient of {p.sharding.name} differs between "
                    "tensor-parallel ranks, which all hold it: it is used where the tensor is "
                    "split. With --sequence-parallel mark it with sequence_parallel = True, and "
                    "its gradient is summed; inside a split layer use none "
                    "[replicated-gradient]"
                )
