"""A hash of weights, and the hook that ends a run whose model, of a script's own, breaks what
training takes for granted."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from megatron.parallel.collectives import all_reduce
from megatron.parallel.sharding import GIVEN
from megatron.training.hook import Hook
from megatron.training.result import IterationResult
from megatron.training.run import Run

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def weight_hashes(parameters: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    """Two sums of each parameter's bits, modulo 2^64: of its elements as integers, and of their
    squares. One host sync.

    Any one changed element changes the first sum.
    """
    sums = []
    for parameter in parameters:
        wide = parameter.detach().view(_INTEGERS[parameter.itemsize]).to(torch.int64)
        sums.append(torch.stack([wide.sum(), (wide * wide).sum()]))
    return [tuple(pair) for pair in torch.stack(sums).tolist()] if sums else []


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
