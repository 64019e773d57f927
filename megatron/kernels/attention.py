"""Causal attention of local heads: the list of implementations, and torch's own among them."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron import device as devices
from megatron.kernels import libraries
from megatron.kernels.attention_spec import AttentionCall, AttentionSpec, Forward
from megatron.kernels.block_attention import (
    KeyBlock,
    block_backward,
    block_forward,
    chunked,
    chunked_grads,
)
from megatron.kernels.cpu import fp32_attention
from megatron.kernels.cpu.blocking import wide_dtype
from megatron.kernels.implementation import Choice, Implementation, choose
from megatron.kernels.linear import low_precision_is_native
from megatron.kernels.sinks import sink_grads, with_sinks

# so many positions: chunks are faster than torch's kernel there (docs/benchmarks.md)
CHUNKS_ON_CPU = range(448, 768)
# so many positions: below it Python's part of the C++ takes longer than torch's kernel
CPP_FROM = 32


def attention(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, requested: str = "auto"
) -> Tensor:
    """q [s, b, n, d], k and v [s, b, g, d] with n a multiple of g (query head i uses key head i //
    (n / g)) -> [s, b, n, d], as `call` says. Raises ValueError where the `requested` implementation
    does not support its spec, or dropout has no seed."""
    chosen = select(call.spec, requested).implementation
    if call.spec.dropout > 0.0 and call.dropout_seed is None:
        raise ValueError(
            "attention with dropout needs dropout_seed: pass the seed of this layer and site"
        )
    return chosen.forward(q, k, v, call)


def select(spec: AttentionSpec, requested: str = "auto") -> Choice[AttentionSpec, Forward]:
    """The implementation that `attention` runs, and why. Raises ValueError as it does."""
    return choose(IMPLEMENTATIONS, spec, requested)


def unfit(name: str, spec: AttentionSpec) -> str | None:
    """Why the implementation of this name cannot compute the spec; None if it can."""
    return next(row for row in IMPLEMENTATIONS if row.name == name).supports(spec)


def _emulated(spec: AttentionSpec) -> bool:
    return not low_precision_is_native(spec.device.type, spec.dtype)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    spec = call.spec
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
        if spec.value_dim == spec.head_dim:
            flash = torch.ops.aten._scaled_dot_product_flash_attention
            out, *_ = flash(q_, k_, v_, 0.0, True, scale=spec.scale)
        else:
            efficient = torch.ops.aten._scaled_dot_product_efficient_attention
            out, *_ = efficient(q_, k_, v_, None, True, 0.0, True, scale=spec.scale)
        return out.permute(2, 0, 1, 3)
    return F.scaled_dot_product_attention(
        q_, k_, v_, is_causal=True, scale=spec.scale, enable_gqa=gqa
    ).permute(2, 0, 1, 3)


def _sdpa_slower(spec: AttentionSpec) -> str | None:
    if spec.window is not None:
        return "needs an s x s mask"
    if spec.value_dim != spec.head_dim and spec.device.type == "cpu":
        return "has no fused kernel for values of another width than keys on a CPU"
    if _emulated(spec):
        return f"{spec.dtype} is emulated on this {spec.device.type}"
    if spec.device.type == "cpu" and spec.dtype == torch.float32:
        return "slower at these lengths" if spec.seq_length in CHUNKS_ON_CPU else None
    return None


def _cpp_slower(spec: AttentionSpec) -> str | None:
    if spec.dtype == torch.float32:
        short = spec.seq_length < CPP_FROM and not spec.features
        return "slower at these lengths" if short else None
    return None if _emulated(spec) else "slower on this CPU"


class _ChunkedAttention(torch.autograd.Function):
    """Backward recomputes probabilities and dropout masks: only q, k and v are saved, and with
    sinks the result and its log-sum-exps."""

    @staticmethod
    def forward(ctx, q, k, v, document_ids, spec, seed, sinks):
        ctx.options = spec, seed
        block = _causal_block(document_ids, *ctx.options)
        if sinks is None:
            ctx.save_for_backward(q, k, v, document_ids, None, None, None)
            return chunked(q, k, v, block)
        wide = q.new_empty(*q.shape[:-1], v.shape[-1], dtype=wide_dtype(q))
        lse = wide.new_empty(q.shape[:3])
        block_forward(q, k, v, block, wide, lse)
        wide, lse = with_sinks(wide, lse, sinks)
        out = wide.to(q.dtype)
        ctx.save_for_backward(q, k, v, document_ids, sinks, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad_out):
        q, k, v, document_ids, sinks, out, lse = ctx.saved_tensors
        block = _causal_block(document_ids, *ctx.options)
        if sinks is None:
            return *chunked_grads((q, k, v), grad_out, block), None, None, None, None
        grads = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
        delta = (out.to(lse.dtype) * grad_out).sum(-1)
        block_backward((q, k, v, grad_out), (lse, delta), block, grads)
        return *grads, None, None, None, sink_grads(out, lse, grad_out, sinks)


def _causal_block(ids: Tensor | None, spec: AttentionSpec, seed: int) -> KeyBlock:
    """All queries and all keys of a sequence as one block."""
    return KeyBlock(spec, True, ids, ids, seed)


def _chunked(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    seed = int(call.dropout_seed or 0)
    return _ChunkedAttention.apply(q, k, v, call.document_ids, call.spec, seed, call.sinks)


def _bf16(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    spec, ids = call.spec, call.document_ids
    starts = None
    if ids is not None:
        from megatron.kernels.cu_seqlens import run_starts

        if (starts := run_starts(ids)) is None:  # an id occurs again after another one
            return _chunked(q, k, v, call)
    if spec.window is not None:
        first = torch.arange(1, len(q) + 1, dtype=torch.int32).sub_(spec.window).clamp_(min=0)
        first = first.repeat(q.shape[1], 1)
        starts = first if starts is None else starts.maximum(first)
    from megatron.kernels.cpu import bf16_attention

    seed = int(call.dropout_seed or 0)
    return bf16_attention.tile_attention(q, k, v, spec.scale, spec.dropout, seed, starts)


def _no_bf16(spec: AttentionSpec) -> str | None:
    if spec.device.type != "cpu" or spec.dtype != torch.bfloat16:
        return "only bf16 on a CPU"
    from megatron.kernels.cpu import bf16_attention

    return bf16_attention.unavailable_reason(spec.head_dim, spec.seq_length)


def _bf16_why(spec: AttentionSpec) -> str:
    from megatron.kernels.cpu import bf16_attention

    return f"this CPU has {bf16_attention.instructions()}"


def _plain(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    from megatron.kernels.reference_attention import plain_attention

    return plain_attention(q, k, v, call)


def _torch_flash(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    from megatron.kernels.cuda import torch_flash

    return torch_flash.flash_attention(q, k, v, call)


def _no_torch_flash(spec: AttentionSpec) -> str | None:
    if not spec.compiled and spec.device.type != "meta":
        if why_not := libraries.cuda_only(spec.device):
            return why_not
    from megatron.kernels.cuda import torch_flash

    return torch_flash.unavailable_reason(spec.device, spec.dtype, spec.head_dim, spec.compiled)


def _flash(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    from megatron.kernels import flash_attention

    return flash_attention.flash_attention(q, k, v, call)


def no_flash(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why flash-attn cannot run here; None if it can."""
    if why_not := libraries.cuda_only(device):
        return why_not
    from megatron.kernels import flash_attention

    return flash_attention.unavailable_reason(dtype, head_dim)


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
        _no_bf16,
        why=_bf16_why,
    ),
    Implementation(
        "cpp_fp32",
        "fp32 C++",
        lambda q, k, v, call: fp32_attention.vector_attention(
            q, k, v, call.spec.scale, call.spec.window, call.spec.softcap, call.sinks
        ),
        frozenset({"window", "softcap", "sink", "value_dim"}),
        unavailable=lambda spec: fp32_attention.unavailable_reason(
            spec.device, spec.dtype, spec.head_dim, spec.seq_length
        ),
        slower=_cpp_slower,
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
        _torch_flash,
        frozenset({"dropout", "documents", "window", "sink"}),
        _no_torch_flash,
        slower=lambda spec: None if spec.features else "what torch's fused attention is",
        why=lambda spec: f"takes {spec.feature_names}",
    ),
    Implementation(
        "chunked",
        "chunked attention",
        _chunked,
        frozenset({"dropout", "documents", "window", "softcap", "sink", "value_dim"}),
        slower=lambda spec: (
            "multiple passes over memory" if spec.softcap and spec.device.type == "cuda" else None
        ),
        why=_chunked_why,
    ),
    Implementation(
        "plain",
        "unfused attention",
        _plain,
        frozenset({"dropout", "documents", "window", "softcap", "sink", "value_dim"}),
        slower=lambda spec: "allocates an s x s tensor",
    ),
    Implementation(
        "flash",
        "flash-attn",
        _flash,
        frozenset({"documents", "window", "softcap"}),
        lambda spec: no_flash(spec.device, spec.dtype, spec.head_dim),
        slower=lambda spec: None if spec.softcap else "no benefit on this device",
        why=lambda spec: f"takes {spec.feature_names}",
    ),
)
