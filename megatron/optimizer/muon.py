"""Muon: the momentum of each matrix of the layers, orthogonalized by Newton-Schulz steps, is its
update; AdamW updates everything else.

A matrix is always orthogonalized whole. Tensor-parallel ranks gather the parts of its update and
each keep theirs of the result, so that every layout trains the same model. With the distributed
optimizer a rank owns whole weights (`zero_partition.whole_matrices`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.config.muon import COEFFICIENTS, MuonConfig
from megatron.config.optimizer import OptimizerConfig
from megatron.config.plan.muon_matrices import at_a_time
from megatron.config.plan.parameter_spec import Matrices
from megatron.optimizer import adam
from megatron.parallel.collectives import all_gather, my_slice
from megatron.parallel.context import Axis, ParallelContext
from megatron.parallel.sharding import Sharding, local_box

EPS = 1e-7  # the least norm that an update is divided by
NEURON_EPS = 1e-8  # the least second moment of a neuron


class Kind(NamedTuple):
    """How weights are updated together: the shape of this rank's part, the axis that the matrices
    are split over and their dim that it splits (None: none), and which they are."""

    shape: tuple[int, ...]
    axis: str | None
    dim: int
    matrices: Matrices


class Muon:
    """Muon with these flags, on a rank of `ctx`."""

    def __init__(self, config: MuonConfig, ctx: ParallelContext) -> None:
        assert config.muon_momentum is not None, "config/checks/muon.py refuses this"
        self.momentum = config.muon_momentum
        self.nesterov = config.muon_use_nesterov
        self.neuron_beta2 = config.muon_neuron_beta2
        self._config = config
        self._ctx = ctx
        sets = COEFFICIENTS[config.muon_coefficient_type]
        self._steps = [sets[step % len(sets)] for step in range(config.muon_num_ns_steps)]

    def build(
        self,
        groups: Sequence[dict[str, Any]],
        config: OptimizerConfig,
        shardings: Mapping[str, Sharding],
    ) -> MuonAndAdam:
        """The optimizer of `groups`, whose `params` are main weights: whole local parts or some of
        their experts, also flat, of the parameters `names`, which have these records."""
        return MuonAndAdam(self, groups, config, shardings)

    def kind(self, sharding: Sharding, elements: int) -> Kind:
        """How the weight is updated, of which this rank owns so many elements: of experts perhaps
        not all."""
        shape = tuple(stop - start for start, stop in local_box(sharding, self._ctx))
        assert sharding.matrices is not None, sharding
        if sharding.matrices.stacked:
            shape = (elements // math.prod(shape[1:]), *shape[1:])
        split = [(name, dim) for name, dim in sharding.splits if self._axis(name).size > 1]
        # experts are whole matrices: which ranks have which does not matter
        split = [(name, dim) for name, dim in split if name != "ep"]
        assert len(split) <= 1, sharding
        axis, dim = split[0] if split else (None, 0)
        split_parts = self._config.muon_split_qkv
        matrices = sharding.matrices if split_parts else sharding.matrices._replace(parts=())
        return Kind(shape, axis, dim, matrices)

    def _axis(self, name: str) -> Axis:
        return self._ctx.axis(name)

    def directions(
        self, kind: Kind, updates: Sequence[Tensor], moments: Sequence[Tensor] = ()
    ) -> Tensor:
        """The scaled orthogonal matrices of weights of one kind, [1, n, *kind.shape], of their
        momenta (this rank's parts, of `kind.shape`); with NorMuon's moments these behind them, one
        step on, [2, n, *kind.shape]."""
        stacked = torch.stack([tensor.view(kind.shape) for tensor in (*updates, *moments)])
        stacked = stacked.unflatten(0, (-1, len(updates)))
        if kind.axis is None:
            return self._orthogonalized(kind, stacked)
        axis = self._axis(kind.axis)
        gathered = all_gather(stacked, axis, kind.dim + 2).contiguous()
        return my_slice(self._orthogonalized(kind, gathered), axis, kind.dim + 2)

    def _orthogonalized(self, kind: Kind, stacked: Tensor) -> Tensor:
        """The same of whole weights [1 or 2, n, ...]."""
        columns = stacked.shape[-1]
        parts = kind.matrices.parts
        if parts:
            groups = stacked.view(*stacked.shape[:2], -1, sum(parts), columns)
            pieces = groups.split(parts, 3)
            done: dict[int, list[Tensor]] = {}
            for rows in dict.fromkeys(parts):  # parts of one shape are one batch
                alike = torch.cat([piece for piece in pieces if piece.shape[3] == rows], 1)
                scaled = self.scaled(*alike.flatten(2, 3)).unflatten(2, alike.shape[2:4])
                done[rows] = [*scaled.split(stacked.shape[1], 1)]
            return torch.cat([done[rows].pop(0) for rows in parts], 3).view(stacked.shape)
        stacks = stacked.flatten(1, 2) if kind.matrices.stacked else stacked
        matrices = stacks.reshape(*stacks.shape[:2], -1, columns)
        return self.scaled(*matrices).view(stacked.shape)

    def scaled(self, stack: Tensor, moments: Tensor | None = None) -> Tensor:
        """Matrices [n, rows, columns] -> their orthogonal factors times the scale, [1, n, ...],
        in the dtype of the products; with NorMuon's moments these behind them, [2, n, ...], in
        that of the matrices."""
        dtype = self.product_dtype(stack)
        rows, columns = stack.shape[-2:]
        factor = scale(self._config.muon_scale_mode, rows, columns)
        factor *= self._config.muon_extra_scale_factor
        if moments is None and dtype != stack.dtype:
            # as a factor of the last step it costs neither another pass nor another rounding
            *steps, (a, b, c) = self._steps
            last = (factor * a, factor * b, factor * c)
            return orthogonalize(stack, [*steps, last], dtype)[None]
        orthogonal = orthogonalize(stack, self._steps, dtype).to(stack.dtype)
        if moments is None:
            return orthogonal.mul_(factor)[None]
        assert self.neuron_beta2 is not None
        moments = neuron_moments(orthogonal, moments, self.neuron_beta2)
        return torch.stack([normalized(orthogonal, moments).mul_(factor), moments])

    def product_dtype(self, stack: Tensor) -> torch.dtype:
        """The dtype of the Newton-Schulz steps of these matrices. Without the flag bf16 on CUDA,
        where fp32 has no tensor cores; fp64, for parity, stays."""
        precision = self._config.muon_fp32_matmul_prec
        if precision is None and stack.device.type == "cuda" and stack.dtype == torch.float32:
            precision = "medium"
        return torch.bfloat16 if precision == "medium" else stack.dtype


class MuonAndAdam:
    """Updates the groups with `muon` by Muon, the others by AdamW; both have their lr and
    weight_decay, decoupled. The state of a matrix is `momentum_buffer`, and NorMuon's
    `neuron_exp_avg_sq` (a neuron's number in each of its elements, which lies and is split as the
    weight is), in the dtype of its main weight."""

    def __init__(
        self,
        muon: Muon,
        groups: Sequence[dict[str, Any]],
        config: OptimizerConfig,
        shardings: Mapping[str, Sharding],
    ) -> None:
        self._muon = muon
        by_adam = [group for group in groups if not group["muon"]]
        self.adam = adam.build_adam(by_adam or [{"params": []}], config)  # --train-only: of nothing
        adam_groups = iter(self.adam.param_groups)
        self.param_groups = [group if group["muon"] else next(adam_groups) for group in groups]
        self.state: dict[Tensor, dict[str, Tensor]] = dict(self.adam.state)
        self._batches: list[tuple[dict[str, Any], Kind, list[Tensor]]] = []
        keys = [adam.MOMENTUM] + [adam.NEURONS] * (muon.neuron_beta2 is not None)
        for group in self.param_groups:
            if group["muon"]:
                group["lr"] = group["weight_decay"] = 0.0
                for param in group["params"]:
                    self.state[param] = {key: torch.zeros_like(param) for key in keys}
                kinds = [
                    muon.kind(shardings[name], param.numel())
                    for name, param in zip(group["names"], group["params"], strict=True)
                ]
                batches = _batches(kinds, group["params"], muon)
                self._batches += [(group, *batch) for batch in batches]

    @torch.no_grad()
    def step(self) -> None:
        """One update with the gradients in `.grad`. Every rank of a tensor-parallel group calls it:
        they own parts of the same weights."""
        self.adam.step()
        m = self._muon.momentum
        for group, kind, params in self._batches:
            grads = [_gradient(param) for param in params]
            momenta = [self.state[param][adam.MOMENTUM] for param in params]
            torch._foreach_lerp_(momenta, grads, 1.0 - m)
            nesterov = self._muon.nesterov
            updates = torch._foreach_lerp(grads, momenta, m) if nesterov else momenta
            normalizes = self._muon.neuron_beta2 is not None
            moments = [self.state[param][adam.NEURONS] for param in params if normalizes]
            directions, *moved = self._muon.directions(kind, updates, moments)
            for moment, now in zip(moments, *moved, strict=True):
                moment.copy_(now.view(moment.shape))
            torch._foreach_mul_(params, 1.0 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(
                params,
                [
                    direction.view(param.shape)
                    for direction, param in zip(directions, params, strict=True)
                ],
                alpha=-group["lr"],
            )


def _batches(
    kinds: Sequence[Kind], params: Sequence[Tensor], muon: Muon
) -> Iterator[tuple[Kind, list[Tensor]]]:
    """Weights of one kind, as many as are updated at a time."""
    for kind in dict.fromkeys(kinds):
        alike = [param for param, k in zip(params, kinds, strict=True) if k == kind]
        ranks = 1 if kind.axis is None else muon._axis(kind.axis).size
        count = at_a_time(ranks * math.prod(kind.shape))
        for start in range(0, len(alike), count):
            yield kind, alike[start : start + count]


def _gradient(param: Tensor) -> Tensor:
    assert param.grad is not None, "MixedPrecisionOptimizer attaches it"
    return param.grad


def scale(mode: str, rows: int, columns: int) -> float:
    """--muon-scale-mode: what an orthogonal [rows, columns] is multiplied by."""
    if mode == "spectral":
        return math.sqrt(max(rows, columns))
    ratio = rows / columns
    return math.sqrt(ratio if mode == "unit_rms_norm" else max(1.0, ratio))


def neuron_moments(orthogonal: Tensor, moments: Tensor, beta2: float) -> Tensor:
    """The moments of matrices [n, rows, columns] one step on: of each row, or where there are more
    columns than rows of each column, whose elements all have it."""
    rows, columns = orthogonal.shape[-2:]
    squares = orthogonal.square().mean(-1 if rows >= columns else -2, keepdim=True)
    return moments.lerp(squares.expand_as(moments), 1.0 - beta2)


def normalized(orthogonal: Tensor, moments: Tensor) -> Tensor:
    """Matrices with their neurons divided by the roots of these moments, and the norms they had."""
    result = orthogonal * moments.clamp(min=NEURON_EPS).rsqrt()
    norms = [torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True) for x in (orthogonal, result)]
    return result.mul_(norms[0] / norms[1].clamp(min=EPS))


def orthogonalize(
    stack: Tensor, steps: Sequence[tuple[float, float, float]], dtype: torch.dtype
) -> Tensor:
    """Matrices U S V^T of a stack [n, rows, columns] -> about U V^T: X <- a X + (b G + c G^2) X
    with G = X X^T for each (a, b, c), from X with Frobenius norm 1. The steps, and what is
    returned, are in `dtype`; the norm is of the matrices as they are."""
    tall = stack.shape[-2] > stack.shape[-1]
    x = stack.mT if tall else stack
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=EPS)
    x = torch.div(x, norm, out=torch.empty_like(x, dtype=dtype))
    for a, b, c in steps:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).contiguous()
