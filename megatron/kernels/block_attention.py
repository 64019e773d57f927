"""Attention of a block of queries to a block of keys, and how such parts are joined; knows local
tensors and no rank.

softmax(scores) v over all keys is an average of the same over blocks of keys, weighted by the sums
of exponentials of each block, whose logarithms (`lse`) travel beside the parts (Dao et al. 2022,
Liu et al. 2023).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.kernels.cpu.blocking import for_each, wide_dtype
from megatron.kernels.dropout import DropoutBits

QUERY_ROWS = 64  # scored at a time
SCRATCH_ELEMENTS = 1 << 18  # of the scores held at a time on a CPU, so that they stay in the cache
LAUNCH_ELEMENTS = 1 << 26  # elsewhere, where each operation is a launch
SEED_STEP = 0x9E3779B97F4A7C15  # between the dropout streams of two heads
FLASH_HEAD_DIM = 256
FLASH_MULTIPLE = 8  # the widest head that torch's flash kernel takes on CUDA, and its granularity


@dataclass(frozen=True)
class Block:
    """How a block of queries sees a block of keys.

    causal: query i sees keys 0..i of the block, which has as many keys as queries; else all keys.
    query_ids [b, s_q] and key_ids [b, s_k]: a query sees only keys of its own document. dropout: of
    the probabilities, with a mask that is a pure function of seed and shapes. implementation:
    "sdpa" (torch's flash kernel), "chunked" (rows of queries, all cases) or "auto".
    """

    scale: float
    causal: bool = False
    query_ids: Tensor | None = None
    key_ids: Tensor | None = None
    dropout_p: float = 0.0
    seed: int = 0
    implementation: str = "auto"


def block_attention(q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """q [s_q, b, n, d], k and v [s_k, b, g, d] with n a multiple of g -> (out [s_q, b, n, d], lse
    [s_q, b, n]).

    `lse` is the logarithm of the sum of exponentials of a query's scores, -inf (and `out` 0) where
    it sees no key. Both are at least fp32, but the flash kernel rounds `out` to the format of q.
    """
    if flash(
        q.device.type,
        q.dtype,
        q.shape[-1],
        block.dropout_p,
        block.query_ids is not None,
        block.implementation,
    ):
        return _flash(q, k, v, block)
    return _chunked(q, k, v, block)


def block_attention_grads(
    tensors: tuple[Tensor, Tensor, Tensor],
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    delta: Tensor,
    block: Block,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of (q, k, v) from this block, of shapes as theirs and at least fp32 if not from
    the flash kernel.

    out [s_q, b, n, d] and lse [s_q, b, n] are those over ALL keys, delta [s_q, b, n] the sums of
    out x grad_out over d.
    """
    q, k, v = tensors
    if flash(
        q.device.type,
        q.dtype,
        q.shape[-1],
        block.dropout_p,
        block.query_ids is not None,
        block.implementation,
    ):
        return _flash_grads(q, k, v, grad_out, out, lse, block)
    return _chunked_grads(q, k, v, grad_out, lse, delta, block)


def join_(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Take the keys of a part in: `out` [s, b, n, d] and `lse` [s, b, n] (finite) become those over
    the keys of both."""
    out.lerp_(part.to(out.dtype), torch.sigmoid(part_lse - lse).unsqueeze(-1))
    torch.logaddexp(lse, part_lse, out=lse)


def flash(
    device: str,
    dtype: torch.dtype,
    head_dim: int,
    dropout_p: float,
    documents: bool,
    implementation: str = "auto",
) -> bool:
    """Does torch's flash kernel compute such a block? On a CPU rows of queries are as fast in fp32
    and faster in the other formats (bf16: by ten in backward), so it runs there only when asked for
    by name. Raises ValueError where it cannot."""
    can = dropout_p == 0.0 and not documents
    if device == "cuda":
        can = can and dtype in (torch.bfloat16, torch.float16)
        can = can and head_dim <= FLASH_HEAD_DIM and head_dim % FLASH_MULTIPLE == 0
    if implementation == "sdpa" and not can:
        raise ValueError(
            f"attention implementation 'sdpa' cannot do a block of {dtype} with heads of "
            f"{head_dim}, dropout {dropout_p} and{'' if documents else ' no'} document masks on "
            f"{device}: use 'auto'"
        )
    return can and (implementation == "sdpa" or implementation == "auto" and device == "cuda")


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    """[s, b, n, d] -> [b, n, s, d]."""
    return [t.permute(1, 2, 0, 3) for t in tensors]


def _flash(q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    if q.device.type == "cpu":
        k = _repeated(k, q)
        v = _repeated(v, q)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *_heads_first(q, k, v), 0.0, block.causal, scale=block.scale
        )
    else:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(
            *_heads_first(q, k, v), 0.0, block.causal, scale=block.scale
        )[:2]
    return out.permute(2, 0, 1, 3), lse.permute(2, 0, 1)


def _flash_grads(
    q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, out: Tensor, lse: Tensor, block: Block
) -> tuple[Tensor, Tensor, Tensor]:
    out = out.to(q.dtype)
    lse = lse.permute(1, 2, 0).contiguous()
    if q.device.type == "cpu":
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *_heads_first(grad_out, q, _repeated(k, q), _repeated(v, q), out),
            lse,
            0.0,
            block.causal,
            scale=block.scale,
        )
    else:
        # of dropout
        state, unused = (
            torch.empty(size, dtype=torch.uint64, device=q.device) for size in ((2,), ())
        )
        grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *_heads_first(grad_out, q, k, v, out),
            lse,
            None,
            None,
            len(q),
            len(k),
            0.0,
            block.causal,
            state,
            unused,
            scale=block.scale,
        )
    dq, dk, dv = (grad.permute(2, 0, 1, 3) for grad in grads)
    dk, dv = (
        grad.unflatten(2, (k.shape[2], -1)).sum(3) if grad.shape != k.shape else grad
        for grad in (dk, dv)
    )
    return dq, dk, dv


def _repeated(k: Tensor, q: Tensor) -> Tensor:
    """Keys or values with a head for each query head: the CPU's kernel wants them so."""
    return k.repeat_interleave(q.shape[2] // k.shape[2], 2)


@dataclass(frozen=True)
class _Rows:
    """Queries `rows` of one set of heads, which see `keys`; `bias` [rows, w] is -inf at unseen ones
    of the last w keys."""

    rows: slice
    keys: slice
    bias: Tensor | None


class _Plan:
    """How a block is cut: sets of heads of a few samples, and rows of queries in each set."""

    def __init__(self, q: Tensor, k: Tensor, block: Block):
        self.queries, self.b, n, self.d = q.shape
        self.keys = k.shape[0]
        self.groups = k.shape[2]
        self.repeats = n // self.groups
        self.block = block
        self.dtype = wide_dtype(q)
        self.device = q.device
        upper = torch.full(
            (QUERY_ROWS, QUERY_ROWS), -torch.inf, dtype=self.dtype, device=self.device
        )
        self.upper = upper.triu_(1)
        assert not block.causal or self.queries == self.keys, "a causal block is a square"

    def head_sets(self) -> list[tuple[int, int]]:
        """Ranges of the b * g key heads; within one sample if it has documents, whose masks they
        share."""
        scratch = SCRATCH_ELEMENTS if self.device.type == "cpu" else LAUNCH_ELEMENTS
        per_set = max(1, scratch // (min(QUERY_ROWS, self.queries) * self.keys * self.repeats))
        samples = 1 if self.block.query_ids is None else self.b
        ends = self.b * self.groups // samples
        return [
            (first + i, first + min(i + per_set, ends))
            for first in range(0, samples * ends, ends)
            for i in range(0, ends, per_set)
        ]

    def bits(self, heads: tuple[int, int]) -> DropoutBits | None:
        """The dropout stream of a set of heads."""
        p = self.block.dropout_p
        seed = self.block.seed
        return (
            DropoutBits((seed + SEED_STEP * heads[0]) % 2**63, p, self.device) if p > 0.0 else None
        )

    def rows(self, heads: tuple[int, int]) -> Iterator[_Rows]:
        """The runs of queries that see any key."""
        for start in range(0, self.queries, QUERY_ROWS):
            stop = min(start + QUERY_ROWS, self.queries)
            rows = slice(start, stop)
            keys = slice(0, stop if self.block.causal else self.keys)
            upper = self.upper[: stop - start, : stop - start] if self.block.causal else None
            if self.block.query_ids is None:
                yield _Rows(rows, keys, upper)
            elif (found := self._documents(heads[0] // self.groups, rows, keys, upper)) is not None:
                yield found

    def _documents(
        self, sample: int, rows: slice, keys: slice, upper: Tensor | None
    ) -> _Rows | None:
        """The same for the documents of a sample; on a CPU, where one may look, without the keys
        that no row sees."""
        other = self.block.query_ids[sample, rows, None] != self.block.key_ids[sample, None, keys]
        if self.device.type == "cpu":
            seen = (~other).any(0).nonzero()
            if not len(seen):
                return None
            # Causal rows see themselves, so these keys hold the last ones, over which `upper` lies.
            keys = slice(int(seen[0]), int(seen[-1]) + 1)
            other = other[:, keys]
        bias = torch.zeros(other.shape, dtype=self.dtype, device=self.device).masked_fill_(
            other, -torch.inf
        )
        if upper is not None:
            bias[:, -upper.shape[1] :] += upper
        return _Rows(rows, keys, bias)

    def load(self, t: Tensor, heads: tuple[int, int]) -> Tensor:
        """[s, b, g r, d] -> [heads, r, s, d] of a set of heads, contiguous, in the dtype of the
        maths."""
        per_head = t.shape[2] // self.groups
        part = t.flatten(1, 2)[:, heads[0] * per_head : heads[1] * per_head].unflatten(
            1, (-1, per_head)
        )
        out = torch.empty(
            (heads[1] - heads[0], per_head, t.shape[0], *t.shape[3:]),
            dtype=self.dtype,
            device=self.device,
        )
        return out.copy_(part.movedim(0, 2))

    def store(self, target: Tensor, heads: tuple[int, int], values: Tensor) -> None:
        """[heads, r, s, d] -> its place in target [s, b, g r, d]."""
        per_head = values.shape[1]
        target.flatten(1, 2)[:, heads[0] * per_head : heads[1] * per_head] = values.flatten(
            0, 1
        ).transpose(0, 1)

    def scores(self, rows: _Rows, queries: Tensor, keys: Tensor) -> Tensor:
        """Scores of the queries of `rows`: queries [heads, r, s_q, d] (scaled), keys [heads, s_k,
        d]."""
        scores = torch.bmm(
            queries[:, :, rows.rows].flatten(1, 2), keys[:, rows.keys].transpose(1, 2)
        )
        if rows.bias is not None:
            lines = scores.view(-1, *rows.bias.shape[:1], scores.shape[2])
            lines[:, :, -rows.bias.shape[1] :].add_(rows.bias)
        return scores


def _chunked(q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    plan = _Plan(q, k, block)
    documents = block.query_ids is not None
    out = torch.empty(q.shape, dtype=plan.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=plan.dtype, device=q.device)
    lowest = torch.finfo(plan.dtype).min

    def work(heads: tuple[int, int]) -> None:
        bits = plan.bits(heads)
        queries = plan.load(q, heads).mul_(block.scale)
        keys = plan.load(k, heads).squeeze(1)
        values = plan.load(v, heads).squeeze(1)
        result = torch.zeros_like(queries)
        sums = torch.full_like(queries[..., 0], -torch.inf)
        for rows in plan.rows(heads):
            scores = plan.scores(rows, queries, keys)
            top = scores.amax(-1, keepdim=True)
            if documents:
                # a row may see no key: all its scores are -inf
                top.clamp_(min=lowest)
            total = scores.sub_(top).exp_().sum(-1, keepdim=True)
            if bits is not None:
                scores.mul_(bits.keep(scores.numel(), scores.dtype).view(scores.shape))
            part = torch.bmm(scores, values[:, rows.keys]).div_(
                total.clamp(min=1.0) if documents else total
            )
            result[:, :, rows.rows] = part.unflatten(1, (plan.repeats, -1))
            sums[:, :, rows.rows] = (
                total.log_().add_(top).squeeze(-1).unflatten(1, (plan.repeats, -1))
            )
        plan.store(
            out, heads, result if bits is None else result.mul_(1.0 / (1.0 - block.dropout_p))
        )
        plan.store(lse, heads, sums)

    for_each(plan.head_sets(), q.device, work)
    return out, lse


def _chunked_grads(
    q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, lse: Tensor, delta: Tensor, block: Block
) -> tuple[Tensor, Tensor, Tensor]:
    plan = _Plan(q, k, block)
    grads = tuple(torch.empty(t.shape, dtype=plan.dtype, device=q.device) for t in (q, k, v))

    def work(heads: tuple[int, int]) -> None:
        found = _head_set_grads(
            plan, heads, *(plan.load(t, heads) for t in (q, k, v, grad_out, lse, delta))
        )
        for target, values in zip(grads, found, strict=True):
            plan.store(target, heads, values)

    for_each(plan.head_sets(), q.device, work)
    return grads


def _head_set_grads(
    plan: _Plan,
    heads: tuple[int, int],
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    grad_out: Tensor,
    lse: Tensor,
    delta: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v of one set of heads, each [heads, r, s, d]."""
    block = plan.block
    bits = plan.bits(heads)
    queries.mul_(block.scale)
    keys = keys.squeeze(1)
    values = values.squeeze(1)
    grad_q = torch.zeros_like(queries)
    grad_k = torch.zeros_like(keys)
    grad_v = torch.zeros_like(values)
    for rows in plan.rows(heads):
        lines, grad_lines, logs, sums = (
            t[:, :, rows.rows].flatten(1, 2) for t in (queries, grad_out, lse, delta)
        )
        probs = plan.scores(rows, queries, keys).sub_(logs.unsqueeze(-1)).exp_()
        grad_probs = torch.bmm(grad_lines, values[:, rows.keys].transpose(1, 2))
        dropped = probs
        if bits is not None:
            keep = (
                bits.keep(probs.numel(), probs.dtype)
                .view(probs.shape)
                .mul_(1.0 / (1.0 - block.dropout_p))
            )
            dropped = probs * keep
            grad_probs.mul_(keep)
        grad_v[:, rows.keys].baddbmm_(dropped.transpose(1, 2), grad_lines)
        grad_scores = grad_probs.sub_(sums.unsqueeze(-1)).mul_(probs)
        grad_k[:, rows.keys].baddbmm_(grad_scores.transpose(1, 2), lines)
        grad_q[:, :, rows.rows] = torch.bmm(grad_scores, keys[:, rows.keys]).unflatten(
            1, (plan.repeats, -1)
        )
    return grad_q.mul_(block.scale), grad_k.unsqueeze(1), grad_v.unsqueeze(1)
