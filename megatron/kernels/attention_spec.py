"""What attention is to be computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# What attention may have beside causality, in the words of messages.
FEATURES = {
    "dropout": "attention dropout",
    "documents": "document masks",
    "window": "sliding windows",
    "softcap": "soft-capped scores",
    "sink": "attention sinks",
    "value_dim": "values of another width than keys",
}


@dataclass(frozen=True)
class AttentionSpec:
    """softmax(scale q k^T, causal) v of local heads: all that the choice of an implementation
    depends on.

    `heads` query heads of width `head_dim` share `groups` key heads, and value heads of width
    `value_dim`. dropout: of the probabilities. documents: no position sees another document.
    window: a position sees itself and the `window` - 1 before it. softcap: scores x become
    softcap tanh(x / softcap). sink: each head has one more score that takes a share and gives no
    value. compiled: called inside a graph of torch.compile. Implementations refuse each of these
    unless they say that they take it.
    """

    device: torch.device
    dtype: torch.dtype
    seq_length: int
    heads: int
    groups: int
    head_dim: int
    value_dim: int
    scale: float
    dropout: float = 0.0
    documents: bool = False
    window: int | None = None
    softcap: float | None = None
    sink: bool = False
    compiled: bool = False

    @staticmethod
    def of(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        dropout: float = 0.0,
        documents: bool = False,
        window: int | None = None,
    ) -> AttentionSpec:
        """That of q [s, b, n, d], k and v [s, b, g, d]."""
        return AttentionSpec(
            q.device,
            q.dtype,
            q.shape[0],
            q.shape[2],
            k.shape[2],
            q.shape[-1],
            v.shape[-1],
            scale,
            dropout,
            documents,
            window,
            compiled=torch.compiler.is_compiling(),
        )

    @property
    def features(self) -> dict[str, str]:
        """Those of FEATURES that it has."""
        return {
            name: FEATURES[name]
            for name, present in (
                ("dropout", self.dropout > 0.0),
                ("documents", self.documents),
                ("window", self.window is not None),
                ("softcap", self.softcap is not None),
                ("sink", self.sink),
                ("value_dim", self.value_dim != self.head_dim),
            )
            if present
        }

    @property
    def feature_names(self) -> str:
        """Its features in words."""
        return " and ".join(self.features.values())


# q, k, v, spec, document ids [b, s] or None, seed of dropout or None -> [s, b, n, d]
Forward = Callable[
    [Tensor, Tensor, Tensor, AttentionSpec, Tensor | None, int | Tensor | None], Tensor
]
