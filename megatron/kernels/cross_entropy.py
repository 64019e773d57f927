"""Cross entropy of logits, row chunk by row chunk."""

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from megatron.kernels.cpu import native
from megatron.kernels.implementation import Implementation, choose
from megatron.kernels.rows import NATIVE, ROW_BLOCKED, Row, no_cpp, no_triton, spec_of

CHUNK_ELEMENTS = 1 << 19  # of the rows taken at a time on a CPU, so that they stay in the cache
LAUNCH_ELEMENTS = 1 << 26  # elsewhere, where each operation is a launch


class RowOutputs(NamedTuple):
    """Tensors [n] that are filled beside the loss, None for what is not wanted.

    `correct` (bool): whether the label's logit is the largest of its row. Of the maths' dtype are
    `unsmoothed`, the loss without smoothing, and `log_z`, logsumexp(row).
    """

    correct: Tensor | None = None
    unsmoothed: Tensor | None = None
    log_z: Tensor | None = None


NO_OUTPUTS = RowOutputs()


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    vocab_size: int,
    dtype: torch.dtype | None = None,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    outputs: RowOutputs = NO_OUTPUTS,
) -> Tensor:
    """Loss of each row, logsumexp(row) - row[label], never holding a second copy of the logits.

    logits [n, v], labels [n] int64 ids in [0, vocab_size) -> [n]. Columns from vocab_size on are
    padding: outside the softmax, gradient zero. The maths and the result are in `dtype`: by default
    fp32 (fp64 for fp64 logits); --fp16-lm-cross-entropy passes torch.float16.

    With `smoothing` e the label counts 1 - e, and e is spread over all ids alike: (1 - e) of that
    loss and e of the mean over the ids of logsumexp(row) - row[id].

    With `z_loss` (not with `smoothing`) backward adds the gradient of z_loss * logsumexp(row)^2,
    which the loss itself is without; that needs `outputs.log_z`.

    With `softcap` all this is of softcap tanh(logits / softcap).

    Backward overwrites the storage of `logits` with their gradient: do not read them after it.
    """
    assert logits.dim() == 2 and labels.shape == logits.shape[:1], (logits.shape, labels.shape)
    assert not z_loss or (outputs.log_z is not None and not smoothing), (z_loss, smoothing)
    dtype = dtype or loss_dtype(logits)
    ops = one_pass(logits, dtype, softcap)
    options = (dtype, ops, smoothing, z_loss, softcap)
    return _CrossEntropy.apply(logits, labels, vocab_size, *options, *outputs)


def loss_dtype(logits: Tensor) -> torch.dtype:
    """The dtype of computation and result if none is requested."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def row_chunks(logits: Tensor) -> list[slice]:
    """Ranges of rows that are taken at a time."""
    elements = CHUNK_ELEMENTS if logits.device.type == "cpu" else LAUNCH_ELEMENTS
    rows = max(1, elements // max(1, logits.shape[1]))
    return [slice(start, start + rows) for start in range(0, logits.shape[0], rows)]


def log_softmax(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """Of each row, in `dtype`, in as much new memory as the result takes."""
    wide = logits.to(dtype)
    return torch.log_softmax(wide, -1, out=None if logits.dtype == dtype else wide)


def soft_cap(logits: Tensor, softcap: float) -> Tensor:
    """softcap tanh(logits / softcap), at least in fp32, in the dtype of the logits."""
    return capped(logits, softcap, loss_dtype(logits)).to(logits.dtype)


def capped(logits: Tensor, softcap: float | None, dtype: torch.dtype) -> Tensor:
    """The same in `dtype`; the logits as they are without a cap."""
    return logits if softcap is None else torch.tanh(logits.to(dtype) / softcap) * softcap


def one_pass(logits: Tensor, dtype: torch.dtype, softcap: float | None) -> ModuleType | None:
    """The module whose `row_losses` reads these logits and whose `loss_grad` overwrites them, the
    same computation in one pass over memory each: C++ or Triton."""
    spec = spec_of(logits, other_maths=dtype != torch.float32, capped=softcap is not None)
    if not logits.is_contiguous():
        return None
    return choose(CROSS_ENTROPY, spec).implementation.forward()


def with_z_loss(grads: Tensor, z_loss: float, log_z: Tensor | None) -> Tensor:
    """Factors [n] of the probabilities in the gradient: `grads`, and 2 z_loss log_z times that."""
    return grads if log_z is None or not z_loss else grads * (1.0 + 2.0 * z_loss * log_z)


def overwrite(
    logits: Tensor,
    valid: int,
    dtype: torch.dtype,
    columns: Tensor,
    grads: Tensor,
    hits: Tensor,
    share: float,
    uniform: float,
    to_probs,
    softcap: float | None = None,
):
    """Put (probabilities - uniform) * grads - onehot(columns) * hits * share into the memory of the
    logits, chunk by chunk.

    `to_probs(chunk, rows)` turns logits into probabilities in place; those of padding columns come
    out as zero. `softcap`: that of the logits before they are probabilities.
    """
    hits = hits * share
    for rows in row_chunks(logits):
        chunk = logits[rows].to(dtype)  # the logits themselves if they are of this dtype
        slopes = None
        if softcap is not None:
            slopes = chunk.div_(softcap).tanh_().square().neg_().add_(1.0)
            chunk.mul_(softcap)
        chunk[:, valid:].fill_(-torch.inf)
        to_probs(chunk, rows)
        if uniform:
            chunk[:, :valid] -= uniform
        chunk.mul_(grads[rows, None]).scatter_add_(1, columns[rows, None], -hits[rows, None])
        if slopes is not None:
            chunk.mul_(slopes)
        if chunk.dtype != logits.dtype:
            logits[rows] = chunk
        del chunk, slopes


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913
        ctx,
        logits: Tensor,
        columns: Tensor,
        valid: int,
        dtype: torch.dtype,
        ops: ModuleType | None,
        smoothing: float,
        z_loss: float,
        softcap: float | None,
        correct: Tensor | None,
        unsmoothed: Tensor | None,
        log_z: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(logits, columns)
        ctx.softcap = softcap
        ctx.z_loss = z_loss
        ctx.log_z = log_z
        ctx.valid = valid
        ctx.dtype = dtype
        ctx.smoothing = smoothing
        ctx.ops = ops
        if ops is not None:
            loss, sums = ops.row_losses(logits, columns, valid, smoothing)
            largest, logs, target = sums[0], sums[1], sums[3]
            ctx.log_sums = (largest, logs)
            if unsmoothed is not None:
                torch.add(logs, largest - target, out=unsmoothed)
            if log_z is not None:
                torch.add(logs, largest, out=log_z)
            if correct is not None:
                torch.ge(target, largest, out=correct)
            return loss
        loss = torch.empty(logits.shape[0], dtype=dtype, device=logits.device)
        for rows in row_chunks(logits):
            chunk = capped(logits[rows, :valid], softcap, dtype)
            log_probs = log_softmax(chunk, dtype)
            target = log_probs.gather(1, columns[rows, None]).squeeze(1)
            loss[rows] = -target
            if unsmoothed is not None:
                unsmoothed[rows] = -target
            if log_z is not None:
                log_z[rows] = chunk.gather(1, columns[rows, None]).squeeze(1).to(dtype)
                log_z[rows] -= target
            if correct is not None:
                correct[rows] = target >= log_probs.amax(-1)
            if smoothing:
                loss[rows].mul_(1.0 - smoothing).sub_(log_probs.mean(-1), alpha=smoothing)
            del chunk, log_probs  # before there are those of the next rows
        return loss

    @staticmethod
    def backward(ctx, grad_loss: Tensor):
        logits, columns = ctx.saved_tensors
        grad_loss = grad_loss.to(ctx.dtype)
        grads = with_z_loss(grad_loss, ctx.z_loss, ctx.log_z)
        label = (columns, grads, grad_loss, 1.0 - ctx.smoothing, ctx.smoothing / ctx.valid)
        if ctx.ops is not None:
            ctx.ops.loss_grad(logits, ctx.valid, *ctx.log_sums, *label)
            increment_version(logits)
        else:
            softmax = lambda chunk, rows: torch.softmax(chunk, -1, out=chunk)  # noqa: E731
            overwrite(logits, ctx.valid, ctx.dtype, *label, softmax, ctx.softcap)
        return logits, *[None] * 10


def _loss_ops() -> ModuleType:
    from megatron.kernels.cuda import loss_ops

    return loss_ops


_ONE_COPY = "no second copy of the logits"
_MATHS = frozenset({"other_maths", "capped"})
CROSS_ENTROPY: tuple[Row, ...] = (
    Implementation("cpp", NATIVE, lambda: native, unavailable=no_cpp, why=lambda spec: _ONE_COPY),
    Implementation(
        "triton", "Triton", _loss_ops, unavailable=no_triton, why=lambda spec: _ONE_COPY
    ),
    Implementation(
        "blocked",
        ROW_BLOCKED,
        lambda: None,
        _MATHS,
        slower=lambda spec: "multiple passes over the cache or memory",
        why=lambda spec: f"{_ONE_COPY} beyond one block of rows",
    ),
    Implementation(
        "torch",
        "torch",
        lambda: None,
        _MATHS,
        unavailable=lambda spec: "allocates two more copies of the logits",
    ),
)
