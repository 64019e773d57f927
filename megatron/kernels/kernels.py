"""`Kernels`: the record of the implementations that the layers of a model use, made by
select.py."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.kernels.transformer_engine import TransformerEngine


@dataclass(frozen=True)
class Kernels:
    """The implementation that each layer requests; the defaults are this suite's and torch's own.

    attention: "auto", "sdpa", "chunked", "plain" or "flash" (kernels/attention.py), or
    "transformer_engine". accumulation: may a linear layer add its weight gradient to `main_grad`
    itself? apex_norms: are norms apex's? transformer_engine: Transformer Engine's modules, or None.
    """

    attention: str = "auto"
    fused_swiglu: bool = True
    fused_rotary: bool = True
    accumulation: bool = True
    apex_norms: bool = False
    transformer_engine: TransformerEngine | None = None

    def without_transformer_engine(self) -> Kernels:
        """The same without Transformer Engine, for layers outside the transformer layers."""
        return replace(self, transformer_engine=None)


@dataclass(frozen=True)
class KernelRow:
    """One row of the table: an implementation of an operation, whether it is selected, and the
    reason."""

    operation: str
    implementation: str
    on: bool
    reason: str


def pair(
    operation: str, names: tuple[str, str], first: bool, reasons: tuple[str, str]
) -> list[KernelRow]:
    """Two implementations, one of them selected (`first`: the first). `reasons`: why the selected
    one is, and why the other is not."""
    chosen = 0 if first else 1
    why, why_not = reasons
    return [
        KernelRow(operation, names[chosen], True, why),
        KernelRow(operation, names[1 - chosen], False, why_not),
    ]
