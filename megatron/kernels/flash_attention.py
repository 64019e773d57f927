"""Attention by the flash-attn package. The only importer of flash_attn."""

from importlib import import_module

import torch
from torch import Tensor

from megatron.kernels.attention_spec import AttentionCall
from megatron.kernels.cu_seqlens import cumulative_lengths
from megatron.kernels.libraries import load_problem

INSTALL = "pip install flash-attn --no-build-isolation (it needs CUDA's compiler)"
HEAD_DIM = 256  # the widest head it has


def unavailable_reason(dtype: torch.dtype, head_dim: int) -> str | None:
    """Why flash-attn cannot run on a CUDA device; None if it can."""
    if dtype not in (torch.float16, torch.bfloat16):
        return f"flash-attn has fp16 and bf16 only, no {dtype}"
    if head_dim > HEAD_DIM:
        return f"flash-attn has heads of at most {HEAD_DIM} channels, not {head_dim}"
    why_not = load_problem("flash_attn", "flash-attn", INSTALL)
    if why_not is None and not hasattr(import_module("flash_attn"), "flash_attn_func"):
        return f"flash-attn is not installed (flash-attn-4 is); {INSTALL}"
    return why_not


def flash_attention(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    """q [s, b, n, d], k and v [s, b, g, d], fp16 or bf16 -> [s, b, n, d]; causal, inside documents
    [b, s] if there are any, inside the window of the spec and with its cap.

    Dao 2023 (FlashAttention-2). With documents the batch becomes one row of documents, and nothing
    outside them is computed.
    """
    from flash_attn import flash_attn_func, flash_attn_varlen_func

    spec, document_ids = call.spec, call.document_ids
    same = torch.are_deterministic_algorithms_enabled()
    window = (-1, -1) if spec.window is None else (spec.window - 1, 0)
    s, b = q.shape[:2]
    q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    if document_ids is None:
        return flash_attn_func(
            q,
            k,
            v,
            softmax_scale=spec.scale,
            causal=True,
            window_size=window,
            softcap=spec.softcap or 0.0,
            deterministic=same,
        ).transpose(0, 1)
    ends = cumulative_lengths(document_ids)
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    out = flash_attn_varlen_func(
        q,
        k,
        v,
        ends,
        ends,
        s,
        s,
        softmax_scale=spec.scale,
        causal=True,
        window_size=window,
        softcap=spec.softcap or 0.0,
        deterministic=same,
    )
    return out.unflatten(0, (b, s)).transpose(0, 1)
