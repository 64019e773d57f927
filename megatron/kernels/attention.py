"""Causal attention of local heads: torch's fused kernel, or exact blocks of query rows; knows no layer and no rank."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.kernels.dropout import keep_mask, seeded_generator
from megatron.kernels.linear import compute_dtype

IMPLEMENTATIONS = ("auto", "sdpa", "chunked")
QUERY_ROWS = 256  # of one block


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    document_ids: Tensor | None = None,
    implementation: str = "auto",
) -> Tensor:
    """softmax(scale q k^T, causal) v for local heads.

    q [s, b, n, d], k and v [s, b, g, d] with n a multiple of g (query head i uses key head i // (n / g))
    -> [s, b, n, d]. `document_ids` [b, s] int: a position sees only positions of its own id. Dropout on the
    probabilities needs `dropout_seed`, of which (with the shape) the mask is a pure function.

    `implementation`: "sdpa" (torch's fused kernel: plain causal, no dropout), "chunked" (blocks of query rows, all
    cases) or "auto". Neither holds an s x s tensor. Raises ValueError for a request that cannot be met.
    """
    chosen = select_attention(q.dtype, dropout_p, document_ids is not None, implementation)
    if dropout_p > 0.0 and dropout_seed is None:
        raise ValueError("attention dropout needs dropout_seed")
    if chosen == "sdpa":
        return _sdpa(q, k, v, scale)
    ids = None if document_ids is None else document_ids.to(q.device)
    return _ChunkedAttention.apply(q, k, v, scale, dropout_p, dropout_seed, ids)


def select_attention(dtype: torch.dtype, dropout_p: float, documents: bool, implementation: str = "auto") -> str:
    """Which implementation runs: "sdpa" or "chunked". Raises ValueError if the one asked for cannot."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"attention implementation {implementation!r} is unknown: use one of {IMPLEMENTATIONS}")
    plain = dropout_p == 0.0 and not documents and dtype != torch.float64
    if implementation == "sdpa" and not plain:
        raise ValueError("attention implementation 'sdpa' does plain causal attention in fp32, bf16 and fp16 only: "
                         "use 'auto' or 'chunked' with dropout, document masks or fp64")
    return implementation if implementation != "auto" else "sdpa" if plain else "chunked"


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    dtype = compute_dtype(q)
    q_, k_, v_ = (t.permute(1, 2, 0, 3).to(dtype) for t in (q, k, v))
    repeats = q.shape[2] // k.shape[2]
    if repeats == 1:
        out = F.scaled_dot_product_attention(q_, k_, v_, is_causal=True, scale=scale)
    else:
        parts = [F.scaled_dot_product_attention(q_[:, i::repeats], k_, v_, is_causal=True, scale=scale)
                 for i in range(repeats)]
        out = torch.stack(parts, 2).flatten(1, 2)
    return out.permute(2, 0, 1, 3).to(q.dtype)


def _first_keys(document_ids: Tensor, starts: list[int], stops: list[int]) -> list[int]:
    """For each block of query rows the first key that any of its rows may see, over all samples."""
    ids = document_ids.tolist()
    first = [document_ids.shape[1]] * len(starts)
    for sample in ids:
        seen: dict[int, int] = {}
        for block, (start, stop) in enumerate(zip(starts, stops, strict=True)):
            for position in range(start, stop):
                first[block] = min(first[block], seen.setdefault(sample[position], position))
    return first


class _Blocks:
    """The blocks of one attention call: which keys each touches, its mask and its dropout bits."""

    def __init__(self, q: Tensor, groups: int, dropout_p: float, seed: int | None, document_ids: Tensor | None):
        self.s, self.b, self.n, self.d = q.shape
        self.groups, self.repeats = groups, self.n // groups
        self.dropout_p, self.document_ids, self.device = dropout_p, document_ids, q.device
        starts = list(range(0, self.s, QUERY_ROWS))
        stops = [min(start + QUERY_ROWS, self.s) for start in starts]
        first = [0] * len(starts) if document_ids is None else _first_keys(document_ids, starts, stops)
        self.spans = list(zip(starts, stops, first, strict=True))
        self.generator = seeded_generator(seed, q.device) if dropout_p > 0.0 else None

    def hidden(self, start: int, stop: int, first: int) -> Tensor:
        """True where a query may not see a key: [1 or b, 1, rows, keys]."""
        rows = torch.arange(start, stop, device=self.device)[:, None]
        keys = torch.arange(first, stop, device=self.device)[None, :]
        hidden = (keys > rows)[None, None]
        if self.document_ids is not None:
            ids = self.document_ids
            hidden = hidden | (ids[:, None, start:stop, None] != ids[:, None, None, first:stop])
        return hidden

    def scores(self, rows: Tensor, keys: Tensor, scale: float, span: tuple[int, int, int]) -> Tensor:
        """Masked scores [b g, r rows, keys] of a block."""
        start, stop, first = span
        scores = torch.bmm(rows, keys.transpose(1, 2)).mul_(scale)
        view = scores.view(self.b, -1, stop - start, stop - first)
        view.masked_fill_(self.hidden(start, stop, first), -torch.inf)
        return scores

    def keep(self, scores: Tensor) -> Tensor | None:
        """Dropout factors of the next block: 0 or 1 / (1 - p)."""
        if self.generator is None:
            return None
        return keep_mask(scores.shape, self.dropout_p, self.generator).to(scores.dtype).mul_(1 / (1 - self.dropout_p))

    def query_rows(self, t: Tensor, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """[s, b, n, d] -> [b g, r rows, d] of the block."""
        part = t[start:stop].to(dtype).view(stop - start, self.b, self.groups, self.repeats, self.d)
        return part.permute(1, 2, 3, 0, 4).reshape(self.b * self.groups, self.repeats * (stop - start), self.d)

    def store_rows(self, out: Tensor, start: int, stop: int, rows: Tensor) -> None:
        view = rows.view(self.b, self.groups * self.repeats, stop - start, self.d)
        out[start:stop] = view.permute(2, 0, 1, 3)

    def heads(self, t: Tensor, dtype: torch.dtype) -> Tensor:
        """[s, b, g, d] -> [b g, s, d]."""
        return t.to(dtype).permute(1, 2, 0, 3).reshape(self.b * self.groups, self.s, self.d)


class _ChunkedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, scale, dropout_p, seed, document_ids):
        dtype = torch.promote_types(q.dtype, torch.float32)
        blocks = _Blocks(q, k.shape[2], dropout_p, seed, document_ids)
        keys, values = blocks.heads(k, dtype), blocks.heads(v, dtype)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        log_totals = []
        for span in blocks.spans:
            start, stop, first = span
            scores = blocks.scores(blocks.query_rows(q, start, stop, dtype), keys[:, first:stop], scale, span)
            log_total = torch.logsumexp(scores, -1, keepdim=True)
            probs = scores.sub_(log_total).exp_()
            keep = blocks.keep(scores)
            if keep is not None:
                probs.mul_(keep)
            blocks.store_rows(out, start, stop, torch.bmm(probs, values[:, first:stop]))
            log_totals.append(log_total)
        ctx.save_for_backward(q, k, v, out, document_ids, *log_totals)
        ctx.scale, ctx.dropout_p, ctx.seed = scale, dropout_p, seed
        return out

    @staticmethod
    def backward(ctx, grad_out):
        q, k, v, out, document_ids, *log_totals = ctx.saved_tensors
        dtype = torch.promote_types(q.dtype, torch.float32)
        blocks = _Blocks(q, k.shape[2], ctx.dropout_p, ctx.seed, document_ids)
        keys, values = blocks.heads(k, dtype), blocks.heads(v, dtype)
        grad_q = torch.empty_like(q, memory_format=torch.contiguous_format)
        grad_k, grad_v = torch.zeros_like(keys), torch.zeros_like(values)
        for span, log_total in zip(blocks.spans, log_totals, strict=True):
            start, stop, first = span
            rows = blocks.query_rows(q, start, stop, dtype)
            grads = blocks.query_rows(grad_out, start, stop, dtype)
            dots = (grads * blocks.query_rows(out, start, stop, dtype)).sum(-1, keepdim=True)
            probs = blocks.scores(rows, keys[:, first:stop], ctx.scale, span).sub_(log_total).exp_()
            grad_probs = torch.bmm(grads, values[:, first:stop].transpose(1, 2))
            keep = blocks.keep(probs)
            dropped = probs
            if keep is not None:
                grad_probs.mul_(keep)
                dropped = probs * keep
            grad_v[:, first:stop].baddbmm_(dropped.transpose(1, 2), grads)
            grad_scores = grad_probs.sub_(dots).mul_(probs).mul_(ctx.scale)
            blocks.store_rows(grad_q, start, stop, torch.bmm(grad_scores, keys[:, first:stop]))
            grad_k[:, first:stop].baddbmm_(grad_scores.transpose(1, 2), rows)
        to_keys = lambda t: t.view(blocks.b, blocks.groups, blocks.s, blocks.d).permute(2, 0, 1, 3).to(q.dtype)  # noqa: E731
        return grad_q, to_keys(grad_k), to_keys(grad_v), None, None, None, None
