"""The loss of each token from logits that may be split over the vocabulary."""

from __future__ import annotations

import torch

from megatron.kernels import functional
from megatron.parallel.collectives import all_reduce
from megatron.parallel.context import Axis


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    vocab_size: int,
    tp: Axis,
    dtype: torch.dtype | None = None,
    smoothing: float = 0.0,
    right: torch.Tensor | None = None,
    plain: torch.Tensor | None = None,
) -> torch.Tensor:
    """Cross entropy of each token: logits [s, b, v/tp], labels [b, s] -> [b, s].

    `vocab_size` is the real one: padded columns are outside the softmax. The result and the maths
    are fp32 (fp64 for fp64 logits) unless `dtype` says otherwise; `smoothing` is the share of a
    label that all ids have alike; `right` (bool [s b], the rows of the logits) is filled with
    whether the label is first, `plain` ([s b]) with the loss without smoothing. Backward overwrites
    the memory of `logits` with their gradient.
    """
    s, b, v = logits.shape

    def reduce(x: torch.Tensor, op: str, axis: Axis) -> torch.Tensor:
        return all_reduce(x, axis, op)

    loss = functional.cross_entropy(
        logits.view(s * b, v),
        labels.t().reshape(s * b),
        vocab_size=vocab_size,
        vocab_start=tp.rank * v,
        tp=tp,
        all_reduce=reduce,
        dtype=dtype,
        smoothing=smoothing,
        right=right,
        plain=plain,
    )
    return loss.view(s, b).t()
