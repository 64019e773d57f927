"""Cross entropy of (possibly vocabulary-parallel) logits, row chunk by row chunk; knows one axis,
no model."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from megatron.kernels.cpu import native

CHUNK_ELEMENTS = 1 << 19  # of the rows taken at a time on a CPU, so that they stay in the cache
LAUNCH_ELEMENTS = 1 << 26  # elsewhere, where each operation is a launch


class VocabAxis(Protocol):
    """What is needed of the tensor-parallel axis: how many ranks share the vocabulary."""

    size: int


AllReduce = Callable[[Tensor, str, VocabAxis], Tensor]


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    vocab_size: int,
    vocab_start: int = 0,
    tp: VocabAxis | None = None,
    all_reduce: AllReduce | None = None,
    dtype: torch.dtype | None = None,
    smoothing: float = 0.0,
    right: Tensor | None = None,
    plain: Tensor | None = None,
) -> Tensor:
    """Loss of each row, logsumexp(row) - row[label], never holding a second copy of the logits.

    logits [n, v] (v = local columns), labels [n] int64 global ids in [0, vocab_size) -> [n]. Column
    j holds global id vocab_start + j; columns with an id >= vocab_size are padding: outside the
    softmax, gradient zero. The maths and the result are in `dtype`: by default fp32 (fp64 for fp64
    logits); --fp16-lm-cross-entropy passes torch.float16.

    With `smoothing` e the label counts 1 - e, and e is spread over all ids alike: (1 - e) of that
    loss and e of the mean over the ids of logsumexp(row) - row[id].

    `right` (bool [n]) is filled with whether the label's logit is the largest of its row, `plain`
    ([n], of the maths' dtype) with the loss without smoothing.

    Backward overwrites the storage of `logits` with their gradient: do not read them after it.

    Vocabulary-parallel: `tp` with size > 1 and `all_reduce(tensor, "max" | "sum", tp) -> tensor`,
    called once with the [n] local logsumexps (with `right` [2, n], the largest logits too) and once
    with the [2, n] stacked sums and target logits (with `smoothing` [3, n], the sums of the logits
    too).
    """
    assert logits.dim() == 2 and labels.shape == logits.shape[:1], (logits.shape, labels.shape)
    if dtype is None:
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    valid = min(max(vocab_size - vocab_start, 0), logits.shape[1])
    if tp is None or tp.size == 1:
        return _CrossEntropy.apply(
            logits, labels - vocab_start, valid, dtype, smoothing, right, plain
        )
    assert all_reduce is not None, "a vocabulary split over ranks needs all_reduce"
    return _ParallelCrossEntropy.apply(
        logits,
        labels - vocab_start,
        valid,
        dtype,
        tp,
        all_reduce,
        smoothing,
        smoothing / vocab_size,
        right,
        plain,
    )


def _chunks(logits: Tensor) -> list[slice]:
    elements = CHUNK_ELEMENTS if logits.device.type == "cpu" else LAUNCH_ELEMENTS
    rows = max(1, elements // max(1, logits.shape[1]))
    return [slice(start, start + rows) for start in range(0, logits.shape[0], rows)]


def _log_softmax(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """Of each row, in `dtype`, in as much new memory as the result takes."""
    part = logits.to(dtype)
    return torch.log_softmax(part, -1, out=None if logits.dtype == dtype else part)


def _native(logits: Tensor, dtype: torch.dtype) -> bool:
    """Whether the C++ reads and overwrites these logits: the same maths, in one pass over memory
    each way."""
    return dtype == torch.float32 and logits.is_contiguous() and native.runs(logits)


def _overwrite(
    logits: Tensor,
    valid: int,
    dtype: torch.dtype,
    columns: Tensor,
    grads: Tensor,
    hits: Tensor,
    to_probs,
    uniform: float = 0.0,
):
    """Put (probabilities - uniform) * grads - onehot(columns) * hits in the place of the logits,
    chunk by chunk.

    `to_probs(chunk, rows)` turns logits into probabilities in place; those of padding columns come
    out as zero.
    """
    for rows in _chunks(logits):
        part = logits[rows].to(dtype)  # the logits themselves if they are of this dtype
        part[:, valid:] = -torch.inf
        to_probs(part, rows)
        if uniform:
            part[:, :valid] -= uniform
        part.mul_(grads[rows, None]).scatter_add_(1, columns[rows, None], -hits[rows, None])
        if part.dtype != logits.dtype:
            logits[rows] = part
        del part


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        logits: Tensor,
        columns: Tensor,
        valid: int,
        dtype: torch.dtype,
        smoothing: float,
        right: Tensor | None,
        plain: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(logits, columns)
        ctx.valid = valid
        ctx.dtype = dtype
        ctx.smoothing = smoothing
        ctx.log_sums = None
        if _native(logits, dtype):
            largest, logs, sums = native.log_sums(logits, valid)
            target = logits[:, :valid].gather(1, columns[:, None]).squeeze(1).to(dtype)
            loss = logs + (largest - target)
            ctx.log_sums = (largest, logs)
            if plain is not None:
                plain.copy_(loss)
            if right is not None:
                torch.ge(target, largest, out=right)
            return (
                loss
                if not smoothing
                else loss * (1.0 - smoothing) + (logs + (largest - sums / valid)) * smoothing
            )
        loss = torch.empty(logits.shape[0], dtype=dtype, device=logits.device)
        for rows in _chunks(logits):
            log_probs = _log_softmax(logits[rows, :valid], dtype)
            target = log_probs.gather(1, columns[rows, None]).squeeze(1)
            loss[rows] = -target
            if plain is not None:
                plain[rows] = -target
            if right is not None:
                right[rows] = target >= log_probs.amax(-1)
            if smoothing:
                loss[rows].mul_(1.0 - smoothing).sub_(log_probs.mean(-1), alpha=smoothing)
            del log_probs  # before there are those of the next rows
        return loss

    @staticmethod
    def backward(ctx, grad_loss: Tensor):
        logits, columns = ctx.saved_tensors
        grad_loss = grad_loss.to(ctx.dtype)
        hits = grad_loss * (1.0 - ctx.smoothing)
        uniform = ctx.smoothing / ctx.valid
        if ctx.log_sums is not None:
            native.loss_grad(logits, ctx.valid, *ctx.log_sums, columns, grad_loss, hits, uniform)
        else:
            _overwrite(
                logits,
                ctx.valid,
                ctx.dtype,
                columns,
                grad_loss,
                hits,
                lambda part, rows: torch.softmax(part, -1, out=part),
                uniform,
            )
        return logits, *[None] * 6


class _ParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913
        ctx,
        logits: Tensor,
        targets: Tensor,
        valid: int,
        dtype: torch.dtype,
        tp,
        all_reduce,
        smoothing: float,
        uniform: float,
        right: Tensor | None,
        plain: Tensor | None,
    ) -> Tensor:
        mine = (targets >= 0) & (targets < valid)
        columns = torch.where(mine, targets, 0)
        local = torch.full((logits.shape[0],), -torch.inf, dtype=dtype, device=logits.device)
        target = torch.zeros_like(local)
        logit_sum = torch.zeros_like(local)
        largest = local.clone() if right is not None else None
        if valid and _native(logits, dtype):
            top, logs, logit_sum = native.log_sums(logits, valid)
            local = top + logs
            target = logits[:, :valid].gather(1, columns[:, None]).squeeze(1).to(dtype)
            largest = top if right is not None else None
        for rows in _chunks(logits) if valid and not _native(logits, dtype) else []:
            part = logits[rows, :valid]
            picked = columns[rows, None]
            target[rows] = part.gather(1, picked).squeeze(1).to(dtype)
            if right is not None:
                largest[rows] = part.amax(-1).to(dtype)
            if smoothing:
                logit_sum[rows] = part.sum(-1, dtype=dtype)
            # torch's log-softmax makes one pass, its logsumexp four; any column gives the sum of
            # its row.
            local[rows] = target[rows] - _log_softmax(part, dtype).gather(1, picked).squeeze(1)
        if right is None:
            peak = all_reduce(local.clone(), "max", tp)
        else:
            peak, largest = all_reduce(torch.stack((local, largest)), "max", tp)
        sums = [(local - peak).exp(), torch.where(mine, target, 0)] + [logit_sum] * (
            smoothing > 0.0
        )
        total, target, *rest = all_reduce(torch.stack(sums), "sum", tp)
        log_total = total.log() + peak
        if right is not None:
            torch.ge(target, largest, out=right)
        if plain is not None:
            torch.sub(log_total, target, out=plain)
        ctx.save_for_backward(logits, columns, mine, log_total)
        ctx.valid = valid
        ctx.smoothing = smoothing
        ctx.uniform = uniform
        if not smoothing:
            return log_total - target
        return log_total - (1.0 - smoothing) * target - uniform * rest[0]

    @staticmethod
    def backward(ctx, grad_loss: Tensor):
        logits, columns, mine, log_total = ctx.saved_tensors
        grad_loss = grad_loss.to(log_total.dtype)
        hits = torch.where(mine, grad_loss * (1.0 - ctx.smoothing), 0)
        if _native(logits, log_total.dtype):
            none = torch.zeros_like(log_total)
            native.loss_grad(
                logits, ctx.valid, log_total, none, columns, grad_loss, hits, ctx.uniform
            )
        else:
            _overwrite(
                logits,
                ctx.valid,
                log_total.dtype,
                columns,
                grad_loss,
                hits,
                lambda part, rows: part.sub_(log_total[rows, None]).exp_(),
                ctx.uniform,
            )
        return logits, *[None] * 9
