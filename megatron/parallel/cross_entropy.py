"""Cross entropy of logits that are split over the vocabulary (--tensor-model-parallel-size above
1)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from megatron.kernels.cross_entropy import (
    log_softmax,
    loss_dtype,
    one_pass,
    overwrite,
    row_chunks,
    with_z_loss,
)
from megatron.parallel.collectives import all_reduce
from megatron.parallel.context import Axis


def parallel_cross_entropy(  # noqa: PLR0913
    logits: Tensor,
    labels: Tensor,
    *,
    vocab_size: int,
    tp: Axis,
    dtype: torch.dtype | None = None,
    smoothing: float = 0.0,
    right: Tensor | None = None,
    plain: Tensor | None = None,
    z_loss: float = 0.0,
    log_z: Tensor | None = None,
    reduce: Callable[[Tensor, Axis, str], Tensor] = all_reduce,
) -> Tensor:
    """As `kernels.cross_entropy`, for logits [n, v/tp]: column j holds id tp.rank * v/tp + j.

    `reduce` is called once with the [n] local logsumexps (with `right` [2, n], the largest logits
    too) and once with the [2, n] stacked sums and target logits (with `smoothing` [3, n], the sums
    of the logits too).
    """
    assert not z_loss or not smoothing, (z_loss, smoothing)
    vocab_start = tp.rank * logits.shape[1]
    valid = min(max(vocab_size - vocab_start, 0), logits.shape[1])
    return _ParallelCrossEntropy.apply(
        logits,
        labels - vocab_start,
        valid,
        dtype or loss_dtype(logits),
        tp,
        reduce,
        smoothing,
        smoothing / vocab_size,
        right,
        plain,
        z_loss,
        log_z,
    )


class _ParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913
        ctx,
        logits: Tensor,
        targets: Tensor,
        valid: int,
        dtype: torch.dtype,
        tp,
        reduce,
        smoothing: float,
        uniform: float,
        right: Tensor | None,
        plain: Tensor | None,
        z_loss: float,
        log_z: Tensor | None,
    ) -> Tensor:
        is_local = (targets >= 0) & (targets < valid)
        columns = torch.where(is_local, targets, 0)
        ops = one_pass(logits, dtype)
        if valid and ops is not None:
            _, sums = ops.row_losses(logits, columns, valid, 0.0)
            largest, logit_sum, target = sums[0], sums[2], sums[3]
            local = largest + sums[1]
        else:
            local = torch.full((logits.shape[0],), -torch.inf, dtype=dtype, device=logits.device)
            target = torch.zeros_like(local)
            logit_sum = torch.zeros_like(local)
            largest = local.clone() if right is not None else None
        for rows in row_chunks(logits) if valid and ops is None else []:
            chunk = logits[rows, :valid]
            picked = columns[rows, None]
            target[rows] = chunk.gather(1, picked).squeeze(1).to(dtype)
            if right is not None:
                largest[rows] = chunk.amax(-1).to(dtype)
            if smoothing:
                logit_sum[rows] = chunk.sum(-1, dtype=dtype)
            # torch's log-softmax makes one pass, its logsumexp four; any column gives the sum of
            # its row.
            local[rows] = target[rows] - log_softmax(chunk, dtype).gather(1, picked).squeeze(1)
        if right is None:
            peak = reduce(local.clone(), tp, "max")
        else:
            peak, largest = reduce(torch.stack((local, largest)), tp, "max")
        sums = [(local - peak).exp(), torch.where(is_local, target, 0)] + [logit_sum] * (
            smoothing > 0.0
        )
        total, target, *extra = reduce(torch.stack(sums), tp, "sum")
        log_total = total.log() + peak
        if right is not None:
            torch.ge(target, largest, out=right)
        if plain is not None:
            torch.sub(log_total, target, out=plain)
        if log_z is not None:
            log_z.copy_(log_total)
        ctx.save_for_backward(logits, columns, is_local, log_total)
        ctx.valid = valid
        ctx.smoothing = smoothing
        ctx.uniform = uniform
        ctx.z_loss = z_loss
        if not smoothing:
            return log_total - target
        return log_total - (1.0 - smoothing) * target - uniform * extra[0]

    @staticmethod
    def backward(ctx, grad_loss: Tensor):
        logits, columns, is_local, log_total = ctx.saved_tensors
        grad_loss = grad_loss.to(log_total.dtype)
        hits = torch.where(is_local, grad_loss, 0)
        grads = with_z_loss(grad_loss, ctx.z_loss, log_total)
        label = (columns, grads, hits, 1.0 - ctx.smoothing, ctx.uniform)
        ops = one_pass(logits, log_total.dtype)
        if ops is not None:
            none = torch.zeros_like(log_total)
            ops.loss_grad(logits, ctx.valid, log_total, none, *label)
            increment_version(logits)
        else:
            exp = lambda chunk, rows: chunk.sub_(log_total[rows, None]).exp_()  # noqa: E731
            overwrite(logits, ctx.valid, log_total.dtype, *label, exp)
        return logits, *[None] * 11
