"""The gated delta rule (Yang et al. 2025, Gated Delta Networks), and the short convolution before
it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.kernels import libraries
from megatron.kernels.cu_seqlens import cumulative_lengths
from megatron.kernels.implementation import Implementation
from megatron.kernels.rows import Row, RowSpec

CHUNK = 64
EPSILON = 1e-6  # of the norms of queries and keys, in fla and transformers too


def causal_conv(rows: Tensor, weight: Tensor, document_ids: Tensor | None = None) -> Tensor:
    """SiLU of what each channel's weights make of its last k tokens: rows [b, k - 1 + s, c], of
    which the first are before the sequence, weight [c, k] -> [b, s, c]; a token sees none of
    another document [b, s]. Sums are fp32 at least."""
    taps = weight.t().to(torch.promote_types(weight.dtype, torch.float32))
    s = rows.shape[1] - len(taps) + 1
    y = rows[:, len(taps) - 1 :] * taps[-1]
    for i, tap in enumerate(taps[:-1]):
        earlier = rows[:, i : i + s] * tap
        if document_ids is not None:
            ids = F.pad(document_ids, (len(taps) - 1, 0), value=-1)[:, i : i + s]
            earlier = earlier.masked_fill((ids != document_ids).unsqueeze(-1), 0.0)
        y = y + earlier
    return F.silu(y).to(rows.dtype)


def _in_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    document_ids: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """q and k [b, s, n, d], v [b, s, m, e], of which m/n heads share a key head, g and beta [b, s,
    m] -> [b, s, m, e] and the last state [b, n, m/n, d, e]; `state`: that before the first token.

    S_t = e^g S_t-1 + k (beta (v - k e^g S_t-1)) and y = q S_t, with q and k of length 1 and q
    divided by sqrt(d); S is 0 before each document [b, s]. Inside of a chunk all writes are
    solved for together, from chunk to chunk there is the state.
    """
    s, heads = q.shape[1:3]
    size = min(CHUNK, s)
    wide = torch.promote_types(q.dtype, torch.float32)

    def cut(x: Tensor) -> Tensor:
        """[b, s, heads, ...] -> [chunks, b, n, heads of each, size, ...]; tokens of zeros, which
        change nothing, fill the last chunk."""
        x = F.pad(x.to(wide), (*(0, 0) * (x.dim() - 2), 0, -s % size))
        x = x.unflatten(2, (heads, -1)).unflatten(1, (-1, size))
        return x.movedim((1, 0, 3, 4, 2), (0, 1, 2, 3, 4))

    q, k = (x * (x.square().sum(-1, keepdim=True) + EPSILON).rsqrt() for x in (cut(q), cut(k)))
    q = q * q.shape[-1] ** -0.5
    g = cut(g).cumsum(-1)
    beta = cut(beta).unsqueeze(-1)
    between = g.unsqueeze(-1) - g.unsqueeze(-2)
    entering, leaving = g, g[..., -1:] - g  # since before the chunk, and to its end
    hidden = torch.ones(size, size, dtype=torch.bool, device=q.device).triu_(1)
    if document_ids is not None:
        ids = F.pad(document_ids, (0, -s % size), value=-1).unflatten(1, (-1, size))
        ids = ids.transpose(0, 1)[:, :, None, None]
        before = torch.cat((ids[:1, ..., :1], ids[:-1, ..., -1:]))
        hidden = hidden | (ids.unsqueeze(-1) != ids.unsqueeze(-2))
        entering = entering.masked_fill(ids != before, -torch.inf)
        leaving = leaving.masked_fill(ids != ids[..., -1:], -torch.inf)
    near = between.masked_fill(hidden, -torch.inf).exp()
    entering, leaving = entering.exp().unsqueeze(-1), leaving.exp().unsqueeze(-1)
    system, scores = k @ k.mT * near * beta, q @ k.mT * near
    writes = torch.cat((cut(v) * beta, k * beta * entering), -1)
    if size > 1:
        writes = torch.linalg.solve_triangular(system, writes, upper=False, unitriangular=True)
    written, erased = writes.split((v.shape[-1], k.shape[-1]), -1)
    q, k, kept = q * entering, k * leaving, entering[..., -1:, :]
    if state is None:
        state = torch.zeros_like(k[0].mT @ written[0])
    results = []
    for i in range(len(q)):
        new = written[i] - erased[i] @ state
        results.append(q[i] @ state + scores[i] @ new)
        state = kept[i] * state + k[i].mT @ new
    y = torch.stack(results).movedim((0, 1, 2, 3, 4), (1, 0, 3, 4, 2))
    return y.flatten(3, 4).flatten(1, 2)[:, :s].to(v.dtype), state


def _no_fla(spec: RowSpec) -> str | None:
    if why_not := libraries.cuda_only(spec.device):
        return why_not
    if spec.dtype not in (torch.bfloat16, torch.float16):
        return f"has bf16 and fp16 only, no {spec.dtype}"
    if torch.are_deterministic_algorithms_enabled():
        return "not used with --deterministic-mode"
    return libraries.load_problem(
        "fla.ops.gated_delta_rule", "flash-linear-attention", "pip install fla-core"
    )


def _by_fla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    document_ids: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    b, _, n, _ = q.shape
    shared = v.shape[2] // n
    q, k = (x.repeat_interleave(shared, 2) for x in (q, k))
    tensors, ends = [q, k, v, g, beta.to(q.dtype)], None
    if document_ids is not None:  # all samples are a row of documents
        tensors = [x.flatten(0, 1).unsqueeze(0) for x in tensors]
        ends = cumulative_lengths(document_ids).long()
    y, last = chunk_gated_delta_rule(
        *tensors,
        initial_state=None if state is None else state.flatten(1, 2),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=ends,
    )
    return y.view(v.shape), last.unflatten(1, (n, shared))


DELTA_RULES: tuple[Row, ...] = (
    Implementation("fla", "flash-linear-attention", _by_fla, unavailable=_no_fla),
    Implementation("chunks", "torch", _in_chunks, why=lambda spec: "only implementation"),
)
