"""Cross entropy of logits that are split over the vocabulary (--tensor-model-parallel-size above
1)."""

from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from megatron.kernels.cross_entropy import (
    NO_OUTPUTS,
    RowOutputs,
    capped,
    log_softmax,
    loss_dtype,
    one_pass,
    overwrite,
    row_chunks,
    with_z_loss,
)
from megatron.parallel.collectives import all_reduce
from megatron.parallel.context import Axis

Reduce = Callable[[Tensor, Axis, str], Tensor]


class _Loss(NamedTuple):
    """What is computed: the maths' dtype, the share of the label that is spread over all ids (of
    each: `uniform`), the coefficient of the z-loss, the cap of the logits; and by what
    (`one_pass`)."""

    dtype: torch.dtype
    smoothing: float
    uniform: float
    z_loss: float
    softcap: float | None
    ops: ModuleType | None


def parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    vocab_size: int,
    tp: Axis,
    dtype: torch.dtype | None = None,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    outputs: RowOutputs = NO_OUTPUTS,
    reduce: Reduce = all_reduce,
) -> Tensor:
    """As `kernels.cross_entropy`, for logits [n, v/tp]: column j holds id tp.rank * v/tp + j.

    `reduce` is called once with the [n] local logsumexps (with `outputs.correct` [2, n], the
    largest logits too) and once with the [2, n] stacked sums and target logits (with `smoothing`
    [3, n], the sums of the logits too).
    """
    assert not z_loss or not smoothing, (z_loss, smoothing)
    vocab_start = tp.rank * logits.shape[1]
    valid = min(max(vocab_size - vocab_start, 0), logits.shape[1])
    dtype = dtype or loss_dtype(logits)
    ops = one_pass(logits, dtype, softcap)
    loss = _Loss(dtype, smoothing, smoothing / vocab_size, z_loss, softcap, ops)
    return _ParallelCrossEntropy.apply(
        logits, labels - vocab_start, valid, loss, tp, reduce, *outputs
    )


class _ParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913
        ctx,
        logits: Tensor,
        targets: Tensor,
        valid: int,
        loss: _Loss,
        tp: Axis,
        reduce: Reduce,
        correct: Tensor | None,
        unsmoothed: Tensor | None,
        log_z: Tensor | None,
    ) -> Tensor:
        is_local = (targets >= 0) & (targets < valid)
        columns = torch.where(is_local, targets, 0)
        sums = _local_sums(logits, columns, valid, loss, correct is not None)
        if sums.largest is None:
            peak = reduce(sums.log_sum.clone(), tp, "max")
        else:
            peak, largest = reduce(torch.stack((sums.log_sum, sums.largest)), tp, "max")
        # exp(local - peak) cannot overflow, and a rank of padding alone (-inf) adds 0
        added = [(sums.log_sum - peak).exp(), torch.where(is_local, sums.target, 0)]
        if loss.smoothing:
            added.append(sums.logit_sum)
        total, target, *logit_sum = reduce(torch.stack(added), tp, "sum")
        log_total = total.log() + peak
        if correct is not None:
            torch.ge(target, largest, out=correct)
        if unsmoothed is not None:
            torch.sub(log_total, target, out=unsmoothed)
        if log_z is not None:
            log_z.copy_(log_total)
        ctx.save_for_backward(logits, columns, is_local, log_total)
        ctx.valid = valid
        ctx.loss = loss
        if not loss.smoothing:
            return log_total - target
        return log_total - (1.0 - loss.smoothing) * target - loss.uniform * logit_sum[0]

    @staticmethod
    def backward(ctx, grad_loss: Tensor):
        logits, columns, is_local, log_total = ctx.saved_tensors
        grad_loss = grad_loss.to(log_total.dtype)
        hits = torch.where(is_local, grad_loss, 0)
        grads = with_z_loss(grad_loss, ctx.loss.z_loss, log_total)
        label = (columns, grads, hits, 1.0 - ctx.loss.smoothing, ctx.loss.uniform)
        ops = ctx.loss.ops
        if ops is not None:
            none = torch.zeros_like(log_total)
            ops.loss_grad(logits, ctx.valid, log_total, none, *label)
            increment_version(logits)
        else:
            exp = lambda chunk, rows: chunk.sub_(log_total[rows, None]).exp_()  # noqa: E731
            overwrite(logits, ctx.valid, log_total.dtype, *label, exp, ctx.loss.softcap)
        return logits, *[None] * 8


class _LocalSums(NamedTuple):
    """Of the columns of this rank, by row [n]: logsumexp, the logit of the label where it is among
    them, the sum of the logits (for smoothing), the largest logit (None unless it is wanted)."""

    log_sum: Tensor
    target: Tensor
    logit_sum: Tensor
    largest: Tensor | None


def _local_sums(
    logits: Tensor, columns: Tensor, valid: int, loss: _Loss, wants_largest: bool
) -> _LocalSums:
    if valid and loss.ops is not None:
        _, sums = loss.ops.row_losses(logits, columns, valid, 0.0)
        largest, logs, logit_sum, target = sums[0], sums[1], sums[2], sums[3]
        return _LocalSums(largest + logs, target, logit_sum, largest if wants_largest else None)
    log_sum = torch.full((logits.shape[0],), -torch.inf, dtype=loss.dtype, device=logits.device)
    target = torch.zeros_like(log_sum)
    logit_sum = torch.zeros_like(log_sum)
    largest = log_sum.clone() if wants_largest else None
    for rows in row_chunks(logits) if valid else []:
        chunk = capped(logits[rows, :valid], loss.softcap, loss.dtype)
        picked = columns[rows, None]
        target[rows] = chunk.gather(1, picked).squeeze(1).to(loss.dtype)
        if largest is not None:
            largest[rows] = chunk.amax(-1).to(loss.dtype)
        if loss.smoothing:
            logit_sum[rows] = chunk.sum(-1, dtype=loss.dtype)
        # torch's log-softmax makes one pass, its logsumexp four; any column gives the sum of its
        # row.
        log_probs = log_softmax(chunk, loss.dtype).gather(1, picked).squeeze(1)
        log_sum[rows] = target[rows] - log_probs
    return _LocalSums(log_sum, target, logit_sum, largest)
