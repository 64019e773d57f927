"""`Kernels`: the record of the implementations that the layers of a model use, made by
select.py."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from megatron.kernels.rows import RowSpec, spec_of

if TYPE_CHECKING:
    from megatron.kernels.transformer_engine import TransformerEngine


@dataclass(frozen=True)
class Kernels:
    """The implementation that each layer requests; the defaults are this suite's and torch's own.

    attention: "auto", "sdpa", "chunked", "plain" or "flash" (kernels/attention.py), or
    "transformer_engine". accumulation: may a linear layer add its weight gradient to `main_grad`
    itself? transformer_engine: Transformer Engine's modules, or None. compiled: is a layer a
    graph of torch.compile?
    """

    attention: str = "auto"
    fused_swiglu: bool = True
    fused_rotary: bool = True
    accumulation: bool = True
    transformer_engine: TransformerEngine | None = None
    compiled: bool = False

    def without_transformer_engine(self) -> Kernels:
        """The same without Transformer Engine, for layers outside the transformer layers."""
        return replace(self, transformer_engine=None)

    def in_layers(self, x: torch.Tensor, **asked: bool) -> RowSpec:
        """What an operation on tensors like `x` in a transformer layer asks for."""
        return spec_of(x, **asked)._replace(compiled=self.compiled)

    def activation(self, name: str, x: torch.Tensor) -> RowSpec:
        """What the activation function asks for."""
        return self.in_layers(x, no_swiglu_fusion=name == "swiglu" and not self.fused_swiglu)

    def rotary(self, x: torch.Tensor, interleaved: bool) -> RowSpec:
        """What rotary positions ask for."""
        return self.in_layers(x, no_rope_fusion=not self.fused_rotary, interleaved=interleaved)


@dataclass(frozen=True)
class KernelRow:
    """One row of the table: an implementation of an operation, whether it is selected, and the
    reason."""

    operation: str
    implementation: str
    on: bool
    reason: str
