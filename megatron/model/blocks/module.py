"""What every block computes with, and what its module answers to the layer, to torch.compile and to
generation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from megatron.parallel.random import DropoutSeeds

if TYPE_CHECKING:
    from megatron.model.blocks.cache import Cache
    from megatron.model.blocks.moe.module import RouterStep

Rotary = tuple[torch.Tensor, torch.Tensor]
Seeds = Mapping[str, torch.Tensor]  # of dropout, by site


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


class BlockModule(nn.Module, ABC):
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
