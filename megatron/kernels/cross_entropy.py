"""Cross entropy of (possibly vocabulary-parallel) logits, row chunk by row chunk; knows one axis, no model."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 20  # of the fp32 scratch a chunk of rows goes through


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
) -> Tensor:
    """Loss of each row, logsumexp(row) - row[label], never holding a second copy of the logits.

    logits [n, v] (v = local columns), labels [n] int64 global ids in [0, vocab_size) -> [n]. Column j holds global id
    vocab_start + j; columns with an id >= vocab_size are padding: outside the softmax, gradient zero. The maths and the
    result are in `dtype`: by default fp32 (fp64 for fp64 logits); --fp16-lm-cross-entropy passes torch.float16.

    Backward overwrites the storage of `logits` with their gradient: do not read them after it.

    Vocabulary-parallel: `tp` with size > 1 and `all_reduce(tensor, "max" | "sum", tp) -> tensor`, called once with the
    row maxima and once with the stacked sums and target logits of all rows.
    """
    assert logits.dim() == 2 and labels.shape == logits.shape[:1], (logits.shape, labels.shape)
    if dtype is None:
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    valid = min(max(vocab_size - vocab_start, 0), logits.shape[1])
    reduce = None
    if tp is not None and tp.size > 1:
        assert all_reduce is not None, "a vocabulary split over ranks needs all_reduce"
        reduce = lambda tensor, op: all_reduce(tensor, op, tp)  # noqa: E731
    return _CrossEntropy.apply(logits, labels - vocab_start, valid, dtype, reduce)


def _chunks(logits: Tensor) -> list[slice]:
    rows = max(1, CHUNK_ELEMENTS // max(1, logits.shape[1]))
    return [slice(start, start + rows) for start in range(0, logits.shape[0], rows)]


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, valid: int, dtype: torch.dtype, reduce) -> Tensor:
        mine = (targets >= 0) & (targets < valid)
        columns = torch.where(mine, targets, 0)
        peak, total, target = (torch.empty(logits.shape[0], dtype=dtype, device=logits.device) for _ in range(3))
        for rows in _chunks(logits):
            part = logits[rows, :valid].to(dtype)
            if valid:
                torch.amax(part, -1, out=peak[rows])
                target[rows] = part.gather(1, columns[rows, None]).squeeze(1)
                total[rows] = part.sub(peak[rows, None]).exp_().sum(-1)
        target = torch.where(mine, target, 0)
        if reduce is not None:
            local_peak = peak if valid else torch.full_like(peak, -torch.inf)
            peak = reduce(local_peak.clone(), "max")
            total = torch.where(local_peak == -torch.inf, 0, total * (local_peak - peak).exp())
            total, target = reduce(torch.stack((total, target)), "sum").unbind(0)
        log_total = total.log() + peak
        ctx.save_for_backward(logits, columns, mine, log_total)
        ctx.valid = valid
        return log_total - target

    @staticmethod
    def backward(ctx, grad_loss: Tensor):
        logits, columns, mine, log_total = ctx.saved_tensors
        grad_loss = grad_loss.to(log_total.dtype)
        for rows in _chunks(logits):
            part = logits[rows, : ctx.valid].to(log_total.dtype)
            part = part.sub(log_total[rows, None]).exp_().mul_(grad_loss[rows, None])
            if ctx.valid:
                part.scatter_add_(1, columns[rows, None], torch.where(mine, -grad_loss, 0)[rows, None])
            logits[rows, : ctx.valid] = part
            logits[rows, ctx.valid :] = 0
        return logits, None, None, None, None
