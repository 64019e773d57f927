"""Unfused attention, the definition: allocates the matrix of scores; that of a generation in
parts."""

import torch
from torch import Tensor

from megatron.kernels.attention_spec import AttentionCall
from megatron.kernels.cpu.blocking import wide_dtype
from megatron.kernels.dropout import DropoutBits

SCORES = 1 << 24  # that generation holds at a time
CACHED = frozenset({"window", "softcap", "sink"})  # what `cached_attention` takes


def plain_attention(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    """As `megatron.kernels.attention.attention`: q [s, b, n, d], k and v [s, b, g, d] -> [s, b, n,
    d].

    Holds [b, n, s, s] scores and probabilities, in fp32 at least; the dropout mask is one draw over
    all of them.
    """
    spec, document_ids = call.spec, call.document_ids
    s, b, n, d = q.shape
    wide = wide_dtype(q)
    groups = k.shape[2]
    # [b, g, r, s, d]
    rows = q.to(wide).unflatten(2, (groups, n // groups)).permute(1, 2, 3, 0, 4)
    # [b, g, 1, s, d]
    keys, values = (t.to(wide).permute(1, 2, 0, 3).unsqueeze(2) for t in (k, v))
    hidden = torch.ones(s, s, dtype=torch.bool, device=q.device).triu_(1)
    if spec.window is not None:
        hidden |= torch.ones_like(hidden).tril_(-spec.window)
    if document_ids is not None:
        hidden = (hidden | (document_ids[:, :, None] != document_ids[:, None, :]))[:, None, None]
    scores = rows @ keys.transpose(-1, -2) * spec.scale
    probs = _softmax(scores, hidden, call)
    if spec.dropout > 0.0:
        assert call.dropout_seed is not None, "dropout needs a seed"
        keep = DropoutBits(int(call.dropout_seed), spec.dropout, q.device).keep(probs.numel(), wide)
        probs = probs * keep.view_as(probs) / (1.0 - spec.dropout)
    return (probs @ values).permute(3, 0, 1, 2, 4).flatten(2, 3).to(q.dtype)


def cached_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    causal: bool,
    call: AttentionCall,
) -> Tensor:
    """That of a generation, as `call` says but for the window: q [s, b, n, d], k and v [b, g, keys,
    d] -> [s, b, n, d]. visible [b, 1, s, keys]: what is seen; without it `causal` (as many keys as
    queries), or all. Holds the scores of some queries at a time."""
    s, b, n, _ = q.shape
    wide = wide_dtype(q)
    groups, count = k.shape[1:3]
    keys, values = (t.to(wide).unsqueeze(2) for t in (k, v))
    every = q.permute(1, 2, 0, 3).unflatten(1, (groups, n // groups)).to(wide)
    step = max(1, SCORES // (b * n * count))
    out = []
    for first in range(0, s, step):
        rows = every[:, :, :, first : first + step]
        hidden = None
        if visible is not None:
            hidden = ~visible[:, :, first : first + step].unsqueeze(1)
        elif causal:
            hidden = torch.ones(rows.shape[3], count, dtype=torch.bool, device=q.device)
            hidden = hidden.triu_(first + 1)
        probs = _softmax(rows @ keys.transpose(-1, -2) * call.spec.scale, hidden, call)
        out.append(probs @ values)
    return torch.cat(out, 3).permute(3, 0, 1, 2, 4).flatten(2, 3).to(q.dtype)


def _softmax(scores: Tensor, hidden: Tensor | None, call: AttentionCall) -> Tensor:
    """Of [b, g, r, s, keys], capped, without what is hidden, and with the sinks [g r]."""
    cap = call.spec.softcap
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    if call.sinks is None:
        return scores.softmax(-1)
    sinks = call.sinks.to(scores.dtype).view(scores.shape[1], -1, 1, 1)
    return torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), -1).softmax(-1)[..., :-1]
