"""Attention of tensors by keywords, for tests of its implementations."""

import torch
from torch import Tensor

from megatron.kernels import attention as kernels
from megatron.kernels.attention_spec import AttentionCall, AttentionSpec
from megatron.kernels.block_attention import KeyBlock


class Biased(AttentionSpec):
    """An option that came later than the implementations: `bias`, once FEATURES has it."""

    bias = True


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
    """`megatron.kernels.attention.attention` of the spec of these."""
    masked = document_ids is not None
    spec = AttentionSpec.of(q, k, v, scale, dropout=dropout_p, documents=masked)
    call = AttentionCall(spec, document_ids, dropout_seed)
    return kernels.attention(q, k, v, call, implementation)


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    document_ids: Tensor | None = None,
) -> Tensor:
    """The definition."""
    return attention(
        q,
        k,
        v,
        scale=scale,
        dropout_p=dropout_p,
        dropout_seed=dropout_seed,
        document_ids=document_ids,
        implementation="plain",
    )


def select_attention(
    device: torch.device,
    dtype: torch.dtype,
    dropout_p: float,
    documents: bool,
    implementation: str = "auto",
    seq_length: int = kernels.CHUNKS_ON_CPU.start,
    head_dim: int = 1,
) -> tuple[str, str]:
    """The name of the implementation that runs, and why."""
    spec = AttentionSpec(
        device, dtype, seq_length, 1, 1, head_dim, head_dim, 1.0, dropout_p, documents
    )
    choice = kernels.select(spec, implementation)
    return choice.implementation.name, choice.why


def block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    causal: bool = False,
    query_ids: Tensor | None = None,
    key_ids: Tensor | None = None,
    dropout: float = 0.0,
    seed: int = 0,
) -> KeyBlock:
    """A block of attention of these tensors."""
    spec = AttentionSpec.of(q, k, v, scale, dropout=dropout, documents=query_ids is not None)
    return KeyBlock(spec, causal, query_ids, key_ids, seed)
