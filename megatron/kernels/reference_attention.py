"""Unfused attention, the definition: allocates the matrix of scores."""

import torch
from torch import Tensor

from megatron.kernels.attention_spec import AttentionSpec
from megatron.kernels.cpu.blocking import wide_dtype
from megatron.kernels.dropout import DropoutBits


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    document_ids: Tensor | None = None,
    dropout_seed: int | Tensor | None = None,
) -> Tensor:
    """As `megatron.kernels.attention.attention`: q [s, b, n, d], k and v [s, b, g, d] -> [s, b, n,
    d].

    Holds [b, n, s, s] scores and probabilities, in fp32 at least; the dropout mask is one draw over
    all of them.
    """
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
    probs = (rows @ keys.transpose(-1, -2) * spec.scale).masked_fill(hidden, -torch.inf).softmax(-1)
    if spec.dropout > 0.0:
        assert dropout_seed is not None, "dropout needs a seed"
        keep = DropoutBits(int(dropout_seed), spec.dropout, q.device).keep(probs.numel(), wide)
        probs = probs * keep.view_as(probs) / (1.0 - spec.dropout)
    return (probs @ values).permute(3, 0, 1, 2, 4).flatten(2, 3).to(q.dtype)
