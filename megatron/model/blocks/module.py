"""What every block computes with, and what its module answers to the layer, to torch.compile and to
generation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megatron.kernels.rows import RowModule
from megatron.parallel.random import DropoutSeeds

if TYPE_CHECKING:
    from megatron.model.blocks.cache import Cache

Rotary = tuple[torch.Tensor, torch.Tensor]
Seeds = Mapping[str, torch.Tensor]  # of dropout, by site


class AddLoss(torch.autograd.Function):
    """`x` itself; in backward `loss` gets the gradient `scale`, as if it were added to the loss."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, loss: torch.Tensor, scale: float | torch.Tensor
    ) -> torch.Tensor:
        ctx.scale = scale
        ctx.dtype = loss.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        if isinstance(ctx.scale, torch.Tensor):
            return grad, ctx.scale.to(ctx.dtype), None
        return grad, torch.full((), ctx.scale, dtype=ctx.dtype, device=grad.device), None


@dataclass(frozen=True)
class RouterStep:
    """What the routers of one micro-batch exchange with the training step.

    loss_mask [b, s/cp]: tokens that train, None for all; only these count. loss_scale: what the
    step multiplies its sum of token losses by; router losses, sums over tokens like it, have the
    same factor; None in an evaluation, which adds nothing. sums: by layer, of this rank's tokens
    the ROUTER_SUMS, without coefficients, and the number of tokens that selected each expert [sums
    + experts]. A recomputed layer writes the same values once more. latest: by layer, the counts of
    selections up to the last micro-batch; all micro-batches of an iteration share it. seeds: those
    of the input jitter.
    """

    loss_mask: torch.Tensor | None
    loss_scale: float | torch.Tensor | None
    latest: dict[int, torch.Tensor] = field(default_factory=dict)
    seeds: DropoutSeeds | None = None
    sums: dict[int, torch.Tensor] = field(default_factory=dict)
    _so_far: dict[int, torch.Tensor] = field(init=False, default_factory=dict)

    def add_earlier(self, layer: int, counts: torch.Tensor) -> torch.Tensor:
        """Counts of the selections of this micro-batch plus those of the earlier ones."""
        if layer not in self._so_far:
            self._so_far[layer] = self.latest[layer] = counts + self.latest.get(layer, 0)
        return self._so_far[layer]


@dataclass(frozen=True)
class LayerInputs:
    """What the blocks of a layer read of a micro-batch besides the residual stream; None stands for
    the plain case.

    rotary: (cos, sin) of the layer's positions, see `RotaryTables`. document_ids [b, s], whole also
    with context parallelism, keep attention inside documents. dropout_seeds: None for no dropout.
    router_step: with experts, what routers exchange with the training step; without one no token is
    dropped.
    """

    rotary: Rotary | None = None
    document_ids: torch.Tensor | None = None
    dropout_seeds: DropoutSeeds | None = None
    router_step: RouterStep | None = None


@dataclass(frozen=True)
class Recompute:
    """Activations that are recomputed in backward instead of being kept.

    granularity: None, "selective" (the `modules`) or "full". method (with full): "uniform" (every
    chunk of `num_layers` layers keeps only its input) or "block" (the first `num_layers` layers
    each keep only their input).
    """

    granularity: str | None = None
    method: str | None = None
    num_layers: int | None = None
    modules: Collection[str] = ("core_attn",)

    def includes(self, module: str) -> bool:
        """Whether this part of every layer is recomputed by itself."""
        return self.granularity == "selective" and module in self.modules

    def chunks(self, layers: int) -> list[tuple[int, int, bool]]:
        """(start, stop, recomputed) of each run of a stage's layers, in order."""
        if self.granularity != "full":
            return [(0, layers, False)]
        count = self.num_layers or 1
        if self.method == "uniform":
            return [(i, min(i + count, layers), True) for i in range(0, layers, count)]
        recomputed = min(count, layers)
        return [*((i, i + 1, True) for i in range(recomputed)), (recomputed, layers, False)]


class BlockModule(RowModule, ABC):
    """A block of a layer. Its constructor takes the block's facts, `params` (ParameterFactory, of
    its scope), `ctx`, `number` (the global one of its layer), `kernels` and `recompute`.

    It hands on nothing but its result: later blocks see it in the residual stream alone. cache: of
    the positions before those that it is called with; None in training.
    """

    cache: Cache | None = None

    @abstractmethod
    def forward(self, x: torch.Tensor, inputs: LayerInputs, seeds: Seeds) -> torch.Tensor:
        """x [s, b, h] ([s/tp, b, h] with sequence parallelism) -> the same shape. `seeds`: of its
        sites of dropout; a site without is not dropped."""

    def dropout_sites(self) -> dict[str, int]:
        """Its sites of dropout, each with the tensor-parallel part that it draws masks of."""
        return {}

    def outside_graph(self) -> list[tuple[nn.Module, str]]:
        """Methods that a graph of torch.compile cannot hold."""
        return []

    def new_cache(self, rows: int, length: int, dtype: torch.dtype) -> Cache | None:
        """A cache of `rows` sequences of up to `length` tokens in the dtype of the computation;
        None where a token depends on no others. Raises ValueError where it cannot compute with
        one."""
        return None
