"""What attention is to be computed, and what a call of it has: all that an implementation gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

# What attention may have beside causality, in the words of messages: fields of AttentionSpec.
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
    softcap tanh(x / softcap). sink: each head has one more score, which is not capped, takes a
    share and gives no value. compiled: called inside a graph of torch.compile. Implementations
    refuse each of these unless they say that they take it.
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

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, scale: float, **features: Any) -> AttentionSpec:
        """That of q [s, b, n, d], k and v [s, b, g, d], with these FEATURES."""
        return cls(
            q.device,
            q.dtype,
            q.shape[0],
            q.shape[2],
            k.shape[2],
            q.shape[-1],
            v.shape[-1],
            scale,
            compiled=torch.compiler.is_compiling(),
            **features,
        )

    @property
    def features(self) -> dict[str, str]:
        """Those of FEATURES that it has: fields that are not their default, values that are not as
        wide as keys."""
        return {
            name: words
            for name, words in FEATURES.items()
            if getattr(self, name) != getattr(AttentionSpec, name, self.head_dim)
        }

    @property
    def feature_names(self) -> str:
        """Its features in words."""
        return " and ".join(self.features.values())


class AttentionCall(NamedTuple):
    """What a call of attention has beside queries, keys and values. A tensor or seed belongs to a
    feature of the spec: an implementation that does not take that one need not know it.

    document_ids [b, s] int: a position sees only positions of its own id. dropout_seed: the mask is
    a pure function of it, of the shape and of the implementation. sinks [n]: of each head the score
    that has no value.
    """

    spec: AttentionSpec
    document_ids: Tensor | None = None
    dropout_seed: int | Tensor | None = None
    sinks: Tensor | None = None


# q [s, b, n, d], k and v [s, b, g, d] -> [s, b, n, d]
Forward = Callable[[Tensor, Tensor, Tensor, AttentionCall], Tensor]
