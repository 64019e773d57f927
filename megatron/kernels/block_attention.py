"""Attention of a block of queries to a block of keys, by rows of queries on local tensors."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron.kernels.attention_spec import AttentionSpec
from megatron.kernels.cpu.blocking import for_each, wide_dtype
from megatron.kernels.dropout import DropoutBits

QUERY_ROWS = 64  # scored at a time
SCRATCH_ELEMENTS = 1 << 18  # of the scores held at a time on a CPU, so that they stay in the cache
LAUNCH_ELEMENTS = 1 << 26  # elsewhere, where each operation is a launch
SEED_STEP = 0x9E3779B97F4A7C15  # between the dropout streams of two heads


@dataclass(frozen=True)
class KeyBlock:
    """How a block of queries sees a block of keys: the attention of `spec`, whose dropout mask is a
    pure function of seed and shapes.

    causal: query i sees keys 0..i of the block, which has as many keys as queries; else all keys.
    query_ids [b, s_q] and key_ids [b, s_k]: a query sees only keys of its own document. distance:
    from the first key to the first query, which tells with a window where it begins.
    """

    spec: AttentionSpec
    causal: bool = False
    query_ids: Tensor | None = None
    key_ids: Tensor | None = None
    seed: int = 0
    distance: int = 0


def chunked(q: Tensor, k: Tensor, v: Tensor, block: KeyBlock) -> Tensor:
    """Attention over this block alone, by rows of queries: [s_q, b, n, d] in the dtype of q. Every
    query must see a key."""
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    block_forward(q, k, v, block, out, None)
    return out


def chunked_grads(
    tensors: tuple[Tensor, Tensor, Tensor], grad_out: Tensor, block: KeyBlock
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of (q, k, v) of `chunked`, in their dtypes; the probabilities are
    recomputed."""
    dq, dk, dv = (t.new_empty(t.shape) for t in tensors)
    block_backward((*tensors, grad_out), None, block, (dq, dk, dv))
    return dq, dk, dv


@dataclass(frozen=True)
class _Rows:
    """Queries `rows` of one set of heads, which see `keys`; a bias [rows, w] is -inf at unseen ones
    of its columns of `keys`."""

    rows: slice
    keys: slice
    biases: list[tuple[slice, Tensor]]


class _Plan:
    """How a block is cut: sets of heads of a few samples, and rows of queries in each set."""

    def __init__(self, q: Tensor, k: Tensor, block: KeyBlock):
        self.queries, self.b, n, _ = q.shape
        self.keys = k.shape[0]
        self.groups = k.shape[2]
        self.repeats = n // self.groups
        self.block = block
        self.dtype = wide_dtype(q)
        self.device = q.device
        hidden = torch.full(
            (QUERY_ROWS, QUERY_ROWS), -torch.inf, dtype=self.dtype, device=self.device
        )
        self.upper = hidden.triu(1)
        self.lower = hidden.tril_(-1)
        self.rows = [
            slice(start, min(start + QUERY_ROWS, self.queries))
            for start in range(0, self.queries, QUERY_ROWS)
        ]
        read = block.query_ids is not None and read_ids(self.device)
        self.ranges = [self._visible_keys(rows) for rows in self.rows] if read else None
        assert not block.causal or self.queries == self.keys, "a causal block is a square"

    def head_sets(self) -> list[tuple[int, int]]:
        """Ranges of the b * g key heads; within one sample if it has documents, whose masks they
        share."""
        scratch = SCRATCH_ELEMENTS if self.device.type == "cpu" else LAUNCH_ELEMENTS
        keys = max(rows.stop - rows.start for rows in map(self.keys_of, self.rows))
        per_set = max(1, scratch // (min(QUERY_ROWS, self.queries) * max(1, keys) * self.repeats))
        samples = 1 if self.block.query_ids is None else self.b
        ends = self.b * self.groups // samples
        return [
            (first + i, first + min(i + per_set, ends))
            for first in range(0, samples * ends, ends)
            for i in range(0, ends, per_set)
        ]

    def bits(self, heads: tuple[int, int]) -> DropoutBits | None:
        """The dropout stream of a set of heads."""
        p = self.block.spec.dropout
        seed = self.block.seed
        return (
            DropoutBits((seed + SEED_STEP * heads[0]) % 2**63, p, self.device) if p > 0.0 else None
        )

    def keys_of(self, rows: slice) -> slice:
        """The keys that the block lets these rows see, whatever their documents; perhaps none."""
        stop = rows.stop if self.block.causal else self.keys
        return slice(min(stop, max(0, self._first_key(rows))), stop)

    def _first_key(self, rows: slice) -> int:
        """Where the window of the first of these rows begins, which may be before the block."""
        window = self.block.spec.window
        return 0 if window is None else self.block.distance + rows.start - window + 1

    @property
    def ids(self) -> tuple[Tensor, Tensor]:
        """Document ids of the queries and of the keys, of a block that has them."""
        assert self.block.query_ids is not None and self.block.key_ids is not None
        return self.block.query_ids, self.block.key_ids

    def _visible_keys(self, rows: slice) -> list[slice]:
        """For each sample the range of keys that share a document with any of these rows; causal
        rows see themselves, so it ends with theirs."""
        keys = self.keys_of(rows)
        query_ids, key_ids = self.ids
        same = query_ids[:, rows, None] == key_ids[:, None, keys]
        ranges = []
        for visible in same.any(1):  # of a sample
            positions = visible.nonzero()
            empty = len(positions) == 0
            first, last = (0, -1) if empty else (int(positions[0]), int(positions[-1]))
            ranges.append(slice(keys.start + first, keys.start + last + 1))
        return ranges

    def row_blocks(self, heads: tuple[int, int]) -> Iterator[_Rows]:
        """The blocks of consecutive queries that see any key."""
        for i, rows in enumerate(self.rows):
            keys = self.keys_of(rows)
            sample = heads[0] // self.groups
            if self.ranges is not None:
                keys = self.ranges[i][sample]
            if keys.start < keys.stop:
                yield _Rows(rows, keys, self._biases(sample, rows, keys))

    def _biases(self, sample: int, rows: slice, keys: slice) -> list[tuple[slice, Tensor]]:
        """-inf where the documents differ, where the key is later, and where it is before the
        window: (columns of `keys`, bias)."""
        count = rows.stop - rows.start
        biases = []
        if self.block.query_ids is not None:
            query_ids, key_ids = self.ids
            hidden = query_ids[sample, rows, None] != key_ids[sample, None, keys]
            bias = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device)
            biases.append((slice(None), bias.masked_fill_(hidden, -torch.inf)))
        if self.block.causal:
            biases.append((slice(-count, None), self.upper[:count, :count]))
        if self.block.spec.window is not None:
            first = keys.start - self._first_key(rows)
            lower = self.lower[:count, first : min(count, first + keys.stop - keys.start)]
            biases.append((slice(lower.shape[1]), lower))
        return biases

    def load(self, t: Tensor, heads: tuple[int, int]) -> Tensor:
        """[s, b, g r, d] -> [heads, r, s, d] of a set of heads, contiguous, in the dtype of the
        computation."""
        per_head = t.shape[2] // self.groups
        heads_of_set = t.flatten(1, 2)[:, heads[0] * per_head : heads[1] * per_head].unflatten(
            1, (-1, per_head)
        )
        out = torch.empty(
            (heads[1] - heads[0], per_head, t.shape[0], *t.shape[3:]),
            dtype=self.dtype,
            device=self.device,
        )
        return out.copy_(heads_of_set.movedim(0, 2))

    def store(self, target: Tensor, heads: tuple[int, int], values: Tensor) -> None:
        """[heads, r, s, d] -> its place in target [s, b, g r, d]."""
        per_head = values.shape[1]
        target.flatten(1, 2)[:, heads[0] * per_head : heads[1] * per_head] = values.flatten(
            0, 1
        ).transpose(0, 1)

    def scores(self, rows: _Rows, queries: Tensor, keys: Tensor) -> Tensor:
        """Scores of the queries of `rows`, unseen ones among them: queries [heads, r rows, d]
        (scaled), keys [heads, s_k, d]."""
        scores = torch.bmm(queries, keys[:, rows.keys].transpose(1, 2))
        cap = self.block.spec.softcap
        return scores if cap is None else scores.div_(cap).tanh_().mul_(cap)

    def slopes(self, scores: Tensor) -> Tensor | None:
        """The derivatives of capped scores by the plain ones; None where nothing is capped."""
        cap = self.block.spec.softcap
        return None if cap is None else (scores / cap).square_().neg_().add_(1.0)

    def hide(self, rows: _Rows, scores: Tensor) -> Tensor:
        """Put -inf in place of the scores of unseen keys."""
        lines = scores.unflatten(1, (-1, rows.rows.stop - rows.rows.start))
        for columns, bias in rows.biases:
            lines[..., columns].add_(bias)
        return scores


def read_ids(device: torch.device) -> bool:
    """Whether to read document ids on the host, to omit keys that no row of a block sees. Only a
    CPU does not wait for that; elsewhere shapes do not depend on them, and the masks do it all."""
    return device.type == "cpu"


def _take(t: Tensor, rows: _Rows) -> Tensor:
    """The queries of `rows`: [heads, r, s_q, ...] -> [heads, r rows, ...]."""
    return t[:, :, rows.rows].flatten(1, 2)


def block_forward(
    q: Tensor, k: Tensor, v: Tensor, block: KeyBlock, out: Tensor, lse: Tensor | None
) -> None:
    """Fill `out` [s_q, b, n, d], and `lse` [s_q, b, n] where wanted; without it every query must
    see a key."""
    plan = _Plan(q, k, block)

    def work(heads: tuple[int, int]) -> None:
        bits = plan.bits(heads)
        queries = plan.load(q, heads).mul_(block.spec.scale)
        keys = plan.load(k, heads).squeeze(1)
        values = plan.load(v, heads).squeeze(1)
        result = queries.new_zeros(*queries.shape[:-1], v.shape[-1])
        sums = torch.full_like(queries[..., 0], -torch.inf)
        for rows in plan.row_blocks(heads):
            scores = plan.hide(rows, plan.scores(rows, _take(queries, rows), keys))
            probs = torch.softmax(scores, -1)
            if lse is not None:
                logs = torch.logsumexp(scores, -1)
                probs.masked_fill_(logs.isneginf().unsqueeze(-1), 0.0)  # of rows that see no key
                sums[:, :, rows.rows] = logs.unflatten(1, (plan.repeats, -1))
            if bits is not None:
                probs.mul_(bits.keep(probs.numel(), probs.dtype).view(probs.shape))
            outputs = torch.bmm(probs, values[:, rows.keys])
            result[:, :, rows.rows] = outputs.unflatten(1, (plan.repeats, -1))
        plan.store(
            out, heads, result if bits is None else result.mul_(1.0 / (1.0 - block.spec.dropout))
        )
        if lse is not None:
            plan.store(lse, heads, sums)

    for_each(plan.head_sets(), q.device, work)


def block_maxima(q: Tensor, k: Tensor, block: KeyBlock) -> Tensor:
    """The largest score that a query of each head sees, of all samples, without a cap: q [s_q, b,
    n, d] and k [s_k, b, g, d] -> [n]; -inf where none sees a key."""
    block = replace(block, spec=replace(block.spec, softcap=None))
    plan = _Plan(q, k, block)
    largest = torch.full(
        (plan.b * plan.groups, plan.repeats), -torch.inf, dtype=plan.dtype, device=plan.device
    )

    def work(heads: tuple[int, int]) -> None:
        queries = plan.load(q, heads).mul_(block.spec.scale)
        keys = plan.load(k, heads).squeeze(1)
        of_heads = largest[heads[0] : heads[1]]
        for rows in plan.row_blocks(heads):
            scores = plan.hide(rows, plan.scores(rows, _take(queries, rows), keys))
            of_rows = scores.unflatten(1, (plan.repeats, -1)).amax((2, 3))
            torch.maximum(of_heads, of_rows, out=of_heads)

    for_each(plan.head_sets(), plan.device, work)
    return largest.view(plan.b, -1).amax(0)


def block_backward(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    sums: tuple[Tensor, Tensor] | None,
    block: KeyBlock,
    grads: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Fill the gradients of q, k and v. `tensors` are q, k, v and the gradient of the result,
    `sums` (lse, delta) over all keys, or None where this block has them all."""
    plan = _Plan(tensors[0], tensors[1], block)

    def work(heads: tuple[int, int]) -> None:
        q, k, v, grad_out = (plan.load(t, heads) for t in tensors)
        of_heads = None if sums is None else (plan.load(sums[0], heads), plan.load(sums[1], heads))
        head_grads = _head_set_grads(plan, heads, q, k, v, grad_out, of_heads)
        for target, values in zip(grads, head_grads, strict=True):
            plan.store(target, heads, values)

    for_each(plan.head_sets(), plan.device, work)


def _head_set_grads(
    plan: _Plan,
    heads: tuple[int, int],
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    grad_out: Tensor,
    sums: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v of one set of heads, each [heads, r, s, d]."""
    block = plan.block
    bits = plan.bits(heads)
    queries.mul_(block.spec.scale)
    keys = keys.squeeze(1)
    values = values.squeeze(1)
    if bits is not None:
        grad_out.mul_(1.0 / (1.0 - block.spec.dropout))
    grad_q = torch.zeros_like(queries)
    # Kept transposed, [heads, d, s]: the GEMM with the probabilities then reads them row by row.
    grad_k, grad_v = (t.new_zeros(len(t), t.shape[-1], plan.keys) for t in (keys, values))
    for rows in plan.row_blocks(heads):
        lines = _take(queries, rows)
        grad_lines = _take(grad_out, rows)
        scores = plan.scores(rows, lines, keys)
        slopes = plan.slopes(scores)
        plan.hide(rows, scores)
        probs = (
            torch.softmax(scores, -1)
            if sums is None
            else scores.sub_(_take(sums[0], rows).unsqueeze(-1)).exp_()
        )
        grad_probs = torch.bmm(grad_lines, values[:, rows.keys].transpose(1, 2))
        dropped = probs
        if bits is not None:
            keep = bits.keep(probs.numel(), probs.dtype).view(probs.shape)
            dropped = probs * keep
            grad_probs.mul_(keep)
        grad_v[:, :, rows.keys].baddbmm_(grad_lines.transpose(1, 2), dropped)
        grad_scores = (
            torch._softmax_backward_data(grad_probs, probs, -1, probs.dtype)
            if sums is None
            else grad_probs.sub_(_take(sums[1], rows).unsqueeze(-1)).mul_(probs)
        )
        if slopes is not None:
            grad_scores.mul_(slopes)
        grad_k[:, :, rows.keys].baddbmm_(lines.transpose(1, 2), grad_scores)
        grad_q[:, :, rows.rows] = torch.bmm(grad_scores, keys[:, rows.keys]).unflatten(
            1, (plan.repeats, -1)
        )
    return (
        grad_q.mul_(block.spec.scale),
        grad_k.transpose(1, 2).unsqueeze(1),
        grad_v.transpose(1, 2).unsqueeze(1),
    )
