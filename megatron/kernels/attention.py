"""Causal attention of local heads: the list of implementations, and torch's own among them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron import device as devices
from megatron.kernels import flash_attention, reference_attention
from megatron.kernels.attention_spec import AttentionSpec, Forward
from megatron.kernels.block_attention import Block, chunked, chunked_grads
from megatron.kernels.cpu import bf16_attention, fp32_attention
from megatron.kernels.cu_seqlens import run_starts
from megatron.kernels.cuda import torch_flash
from megatron.kernels.implementation import Choice, Implementation, choose
from megatron.kernels.linear import low_precision_is_native

# so many positions: chunks are faster than torch's kernel there (docs/benchmarks.md)
CHUNKS_ON_CPU = range(448, 768)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    document_ids: Tensor | None = None,
    dropout_seed: int | Tensor | None = None,
    requested: str = "auto",
) -> Tensor:
    """q [s, b, n, d], k and v [s, b, g, d] with n a multiple of g (query head i uses key head i //
    (n / g)) -> [s, b, n, d], as `spec` says.

    `document_ids` [b, s] int: a position sees only positions of its own id. The mask of dropout is
    a pure function of `dropout_seed`, the shape and the implementation. Raises ValueError where the
    `requested` implementation does not support the spec, or dropout has no seed."""
    chosen = select(spec, requested).implementation
    if spec.dropout > 0.0 and dropout_seed is None:
        raise ValueError(
            "attention with dropout needs dropout_seed: pass the seed of this layer and site"
        )
    return chosen.forward(q, k, v, spec, document_ids, dropout_seed)


def select(spec: AttentionSpec, requested: str = "auto") -> Choice[AttentionSpec, Forward]:
    """The implementation that `attention` runs, and why. Raises ValueError as it does."""
    return choose(IMPLEMENTATIONS, spec, requested)


def _emulated(spec: AttentionSpec) -> bool:
    return not low_precision_is_native(spec.device.type, spec.dtype)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, *_: object) -> Tensor:
    gqa = spec.heads != spec.groups
    if gqa and devices.kernels_of(q.device) == "cuda" and q.dtype == torch.float32:
        # flash and cuDNN have no fp32, the memory-efficient kernel no groups: the formula would run
        k, v = (t.repeat_interleave(q.shape[2] // k.shape[2], 2) for t in (k, v))
        gqa = False
    q_, k_, v_ = (t.permute(1, 2, 0, 3) for t in (q, k, v))
    if spec.window is not None:
        seen = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).tril_()
        return F.scaled_dot_product_attention(
            q_, k_, v_, seen.triu_(1 - spec.window), scale=spec.scale, enable_gqa=gqa
        ).permute(2, 0, 1, 3)
    if q.device.type == "meta":
        # torch would take the formula with its s x s tensors, which no GPU does
        out, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            q_, k_, v_, 0.0, True, scale=spec.scale
        )
        return out.permute(2, 0, 1, 3)
    return F.scaled_dot_product_attention(
        q_, k_, v_, is_causal=True, scale=spec.scale, enable_gqa=gqa
    ).permute(2, 0, 1, 3)


def _sdpa_slower(spec: AttentionSpec) -> str | None:
    if spec.window is not None:
        return "needs an s x s mask"
    if _emulated(spec):
        return f"{spec.dtype} is emulated on this {spec.device.type}"
    if spec.device.type == "cpu" and spec.dtype == torch.float32:
        return "slower at these lengths" if spec.seq_length in CHUNKS_ON_CPU else None
    return None


class _ChunkedAttention(torch.autograd.Function):
    """Backward recomputes probabilities and dropout masks: only q, k and v are saved."""

    @staticmethod
    def forward(ctx, q, k, v, document_ids, spec, seed):
        ctx.save_for_backward(q, k, v, document_ids)
        ctx.options = spec, seed
        return chunked(q, k, v, _causal_block(document_ids, *ctx.options))

    @staticmethod
    def backward(ctx, grad_out):
        *tensors, document_ids = ctx.saved_tensors
        block = _causal_block(document_ids, *ctx.options)
        return *chunked_grads(tensors, grad_out, block), None, None, None


def _causal_block(ids: Tensor | None, spec: AttentionSpec, seed: int) -> Block:
    """All queries and all keys of a sequence as one block."""
    return Block(spec, True, ids, ids, seed)


def _chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    document_ids: Tensor | None,
    dropout_seed: int | Tensor | None,
) -> Tensor:
    seed = int(dropout_seed or 0)
    return _ChunkedAttention.apply(q, k, v, document_ids, spec, seed)


def _bf16(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    document_ids: Tensor | None,
    dropout_seed: int | Tensor | None,
) -> Tensor:
    starts = None if document_ids is None else run_starts(document_ids)
    if document_ids is not None and starts is None:  # an id occurs again after another one
        return _chunked(q, k, v, spec, document_ids, dropout_seed)
    if spec.window is not None:
        first = torch.arange(1, len(q) + 1, dtype=torch.int32).sub_(spec.window).clamp_(min=0)
        first = first.repeat(q.shape[1], 1)
        starts = first if starts is None else starts.maximum(first)
    seed = int(dropout_seed or 0)
    return bf16_attention.tile_attention(q, k, v, spec.scale, spec.dropout, seed, starts)


def _chunked_why(spec: AttentionSpec) -> str:
    if spec.features or spec.dtype == torch.float64:
        return f"needed for {spec.feature_names or 'fp64'}"
    if _emulated(spec):
        return "fp32 arithmetic"
    return f"fastest on a CPU for {CHUNKS_ON_CPU[0]} to {CHUNKS_ON_CPU[-1]} positions"


# In the order of preference.
IMPLEMENTATIONS: tuple[Implementation[AttentionSpec, Forward], ...] = (
    Implementation(
        "cpp_bf16",
        "bf16 C++",
        _bf16,
        frozenset({"dropout", "documents", "window"}),
        lambda spec: bf16_attention.unavailable_reason(
            spec.device, spec.dtype, spec.head_dim, spec.seq_length
        ),
        why=lambda spec: f"this CPU has {bf16_attention.instructions()}",
    ),
    Implementation(
        "cpp_fp32",
        "fp32 C++",
        lambda q, k, v, spec, *_: fp32_attention.vector_attention(q, k, v, spec.scale, spec.window),
        frozenset({"window"}),
        unavailable=lambda spec: fp32_attention.unavailable_reason(
            spec.device, spec.dtype, spec.head_dim, spec.seq_length
        ),
        slower=lambda spec: (
            None if spec.dtype == torch.float32 or _emulated(spec) else "slower on this CPU"
        ),
        why=lambda spec: "this CPU has AVX512 or AVX2; fp32 arithmetic",
    ),
    Implementation(
        "sdpa",
        "torch's fused attention",
        _sdpa,
        frozenset({"window", "value_dim"}),
        unavailable=lambda spec: "does not support fp64" if spec.dtype == torch.float64 else None,
        slower=_sdpa_slower,
        why=lambda spec: "plain causal attention",
    ),
    Implementation(
        "torch_flash",
        "torch's flash kernel",
        torch_flash.flash_attention,
        frozenset({"dropout", "documents", "window"}),
        lambda spec: torch_flash.unavailable_reason(
            spec.device, spec.dtype, spec.head_dim, spec.compiled
        ),
        slower=lambda spec: None if spec.features else "what torch's fused attention is",
        why=lambda spec: f"takes {spec.feature_names}",
    ),
    Implementation(
        "chunked",
        "chunked attention",
        _chunked,
        frozenset({"dropout", "documents", "window", "value_dim"}),
        why=_chunked_why,
    ),
    Implementation(
        "plain",
        "unfused attention",
        reference_attention.plain_attention,
        frozenset({"dropout", "documents", "window", "value_dim"}),
        slower=lambda spec: "allocates an s x s tensor",
    ),
    Implementation(
        "flash",
        "flash-attn",
        flash_attention.flash_attention,
        frozenset({"documents", "window"}),
        lambda spec: flash_attention.unavailable_reason(spec.device, spec.dtype, spec.head_dim),
        slower=lambda spec: "no benefit on this device",
    ),
)
