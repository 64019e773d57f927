"""Torch's flash kernel on CUDA where its public entrance does not lead: attention with reproducible
dropout, and inside documents."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from megatron import device as devices
from megatron.kernels.cu_seqlens import cumulative_lengths


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    dropout_p: float = 0.0,
    seed: int = 0,
    document_ids: Tensor | None = None,
) -> Tensor:
    """q [s, b, n, d], k and v [s, b, g, d], fp16 or bf16 -> [s, b, n, d]; causal, inside documents
    [b, s] if there are any.

    Dao 2023 (FlashAttention-2). The kernel draws dropout masks from the device's generator, which
    gets `seed` before, and backward draws them again from the state it had: the mask is a pure
    function of seed, shape and kind of GPU. With documents the batch becomes one row of documents,
    and nothing outside them is computed.
    """
    s, b = q.shape[:2]
    q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    ends = None
    if document_ids is not None:
        ends = cumulative_lengths(document_ids)
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    drawn = devices.kernel_seed(q.device, seed) if dropout_p else contextlib.nullcontext()
    with drawn:
        out, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, ends, ends, s, s, dropout_p, True, False, scale=scale
        )
    if ends is not None:
        out = out.unflatten(0, (b, s))
    return out.transpose(0, 1)
