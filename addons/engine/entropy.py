"""Entropy of each token's distribution, of logits that are split over the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron.kernels.cross_entropy import soft_cap
from megatron.model.gpt import GPTModel
from megatron.parallel.collectives import all_reduce, copy_to, reduce_from
from megatron.parallel.context import Axis


def entropy_of(logits: torch.Tensor, vocab_size: int, tp: Axis) -> torch.Tensor:
    """[s, b] of logits [s, b, padded vocabulary / tp], with gradients; fp32 at least.

    log Z is the same on all ranks and is used with the columns of each: its gradient is their sum
    (`copy_to`), as that of the logits is each rank's own (`reduce_from`)."""
    columns = logits.shape[-1]
    valid = min(max(vocab_size - tp.rank * columns, 0), columns)
    own = logits[..., :valid].to(torch.promote_types(logits.dtype, torch.float32))
    largest = own.detach().amax(-1) if valid else own.new_full(own.shape[:-1], -torch.inf)
    peak = all_reduce(largest, tp, "max")
    log_z = reduce_from((own - peak[..., None]).exp().sum(-1), tp).log() + peak
    shares = (own - copy_to(log_z, tp)[..., None]).exp()
    return log_z - reduce_from((shares * own).sum(-1), tp)


class LogitsSeen:
    """The logits of a forward pass that computes losses, which overwrite them later: a copy."""

    def __init__(self) -> None:
        self.logits: torch.Tensor | None = None

    @contextmanager
    def of(self, model: GPTModel) -> Iterator[None]:
        """Inside it the copy is made."""

        def keep(module: Any, args: Any, output: torch.Tensor) -> None:
            self.logits = output.clone()

        assert model.output_layer is not None, "a chunk with the last layer"
        handle = model.output_layer.register_forward_hook(keep)
        try:
            yield
        finally:
            handle.remove()

    def entropy(self, model: GPTModel) -> torch.Tensor:
        """[b, s]."""
        assert self.logits is not None, "the output layer was called"
        logits = self.logits if model.softcap is None else soft_cap(self.logits, model.softcap)
        self.logits = None
        return entropy_of(logits, model.vocab_size, model.ctx.tp).t()
