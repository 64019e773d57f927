"""What attention is to be computed, and what an implementation of it says of itself."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# What attention may have beside causality, in the words of messages.
FEATURES = {
    "dropout": "attention dropout",
    "documents": "document masks",
    "window": "sliding windows",
    "softcap": "soft-capped scores",
    "sink": "attention sinks",
}


@dataclass(frozen=True)
class AttentionSpec:
    """softmax(scale q k^T, causal) v of local heads: all that the choice of an implementation
    depends on.

    `heads` query heads of width `head_dim` (0 where values have another width) share `groups` key
    and value heads. dropout: of the probabilities. documents: no position sees another document.
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
        width = q.shape[-1]
        return AttentionSpec(
            q.device,
            q.dtype,
            q.shape[0],
            q.shape[2],
            k.shape[2],
            width if width == v.shape[-1] else 0,
            scale,
            dropout,
            documents,
            window,
            compiled=torch.compiler.is_compiling(),
        )

    @property
    def features(self) -> list[str]:
        """Those of FEATURES that it has."""
        return [
            name
            for name, there in (
                ("dropout", self.dropout > 0.0),
                ("documents", self.documents),
                ("window", self.window is not None),
                ("softcap", self.softcap is not None),
                ("sink", self.sink),
            )
            if there
        ]

    @property
    def said(self) -> str:
        """Its features in words."""
        return " and ".join(FEATURES[name] for name in self.features)


# q, k, v, spec, document ids [b, s] or None, seed of dropout or None -> [s, b, n, d]
Forward = Callable[
    [Tensor, Tensor, Tensor, AttentionSpec, Tensor | None, int | Tensor | None], Tensor
]


def lacking(spec: AttentionSpec, takes: Collection[str]) -> str | None:
    """The features of `spec` that are not among these, as a reason; None if there are none."""
    names = [FEATURES[name] for name in spec.features if name not in takes]
    return f"does not support {' and '.join(names)}" if names else None


def always(spec: AttentionSpec) -> None:
    """Nothing is against it."""


@dataclass(frozen=True)
class Implementation:
    """One way to compute attention.

    name: that by which it is requested. title: that in the table of kernels. takes: the FEATURES
    that it has. unavailable: why it cannot compute a spec of these (library, device, dtype,
    sizes). slower: why it is not the best although it can. why: why it is, where it is.
    """

    name: str
    title: str
    forward: Forward
    takes: frozenset[str] = frozenset()
    unavailable: Callable[[AttentionSpec], str | None] = always
    slower: Callable[[AttentionSpec], str | None] = always
    why: Callable[[AttentionSpec], str] = lambda spec: "fastest here"

    def supports(self, spec: AttentionSpec) -> str | None:
        """None, or why it cannot compute this."""
        return lacking(spec, self.takes) or self.unavailable(spec)


class Choice(NamedTuple):
    """The implementation that runs, and why."""

    implementation: Implementation
    why: str


def choose(
    implementations: Sequence[Implementation], spec: AttentionSpec, requested: str = "auto"
) -> Choice:
    """The requested one, or the first that supports the spec and is not slower than a later one.
    Raises ValueError where the requested one does not support it."""
    for each in implementations:
        if requested not in ("auto", each.name):
            continue
        if why_not := each.supports(spec):
            if requested != "auto":
                raise ValueError(
                    f"attention implementation {requested!r}: {why_not}; use 'auto' or 'chunked'"
                )
        elif requested != "auto":
            return Choice(each, "requested")
        elif each.slower(spec) is None:
            return Choice(each, each.why(spec))
    names = ("auto", *(each.name for each in implementations))
    raise ValueError(f"attention implementation {requested!r} is unknown: use one of {names}")
