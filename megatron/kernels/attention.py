"""Causal attention of local heads, and the selection among its implementations: torch's fused
kernels, chunked attention, C++ or flash-attn."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron import device as devices
from megatron.kernels import flash_attention
from megatron.kernels.block_attention import FLASH_MULTIPLE, Block, chunked, chunked_grads
from megatron.kernels.cpu import bf16_attention, fp32_attention
from megatron.kernels.cu_seqlens import run_starts
from megatron.kernels.cuda import torch_flash
from megatron.kernels.linear import low_precision_is_native
from megatron.kernels.reference_attention import plain_attention

IMPLEMENTATIONS = (
    "auto",
    "sdpa",
    "chunked",
    "plain",
    "cpp_bf16",
    "cpp_fp32",
    "flash",
    "torch_flash",
)
# so many positions: chunks are faster than torch's kernel there (docs/benchmarks.md)
CHUNKS_ON_CPU = range(448, 768)
DROPOUT_HEAD_DIM = 192  # the widest head that torch's flash kernel trains with it on every GPU


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    document_ids: Tensor | None = None,
    implementation: str = "auto",
) -> Tensor:
    """softmax(scale q k^T, causal) v for local heads.

    q [s, b, n, d], k and v [s, b, g, d] with n a multiple of g (query head i uses key head i // (n
    / g)) -> [s, b, n, d]. `document_ids` [b, s] int: a position sees only positions of its own id.
    Dropout on the probabilities needs `dropout_seed`, of which (with the shape and the
    implementation) the mask is a pure function.

    `implementation`: "sdpa" (torch's fused kernel: plain causal, no dropout), "chunked" (blocks of
    query rows, all cases), "cpp_bf16" (C++, bf16 on a CPU with AMX or AVX512_BF16; documents must
    be runs of one id), "cpp_fp32" (C++, fp32 arithmetic on a CPU with AVX2: plain causal, no
    dropout), "flash" (flash-attn: CUDA, fp16 or bf16, no dropout), "torch_flash" (torch's flash
    kernel by name: CUDA, fp16 or bf16; documents must be runs), "plain" (the formula, all cases) or
    "auto". Only "plain" allocates an s x s tensor. Raises ValueError if the requested one is
    unavailable."""
    chosen, _, _ = select_attention(
        q.device,
        q.dtype,
        dropout_p,
        document_ids is not None,
        implementation,
        len(q),
        q.shape[-1] if q.shape[-1] == v.shape[-1] else 0,
    )
    if chosen == "sdpa":
        return _sdpa(q, k, v, scale)
    if chosen == "cpp_fp32":
        return fp32_attention.vector_attention(q, k, v, scale)
    if chosen == "flash":
        return flash_attention.flash_attention(q, k, v, scale, document_ids)
    if dropout_p > 0.0 and dropout_seed is None:
        raise ValueError(
            "attention with dropout_p > 0 needs dropout_seed: pass the seed of this layer and site"
        )
    if chosen == "torch_flash":
        return torch_flash.flash_attention(q, k, v, scale, dropout_p, dropout_seed, document_ids)
    dropout_seed = int(dropout_seed or 0)
    if chosen == "cpp_bf16":
        starts = None if document_ids is None else run_starts(document_ids)
        if document_ids is None or starts is not None:
            return bf16_attention.tile_attention(q, k, v, scale, dropout_p, dropout_seed, starts)
        if implementation == "cpp_bf16":
            raise ValueError(
                "attention implementation 'cpp_bf16' needs contiguous documents, and "
                "a document id occurs again after another one: use 'auto' or 'chunked'"
            )
    if chosen == "plain":
        return plain_attention(q, k, v, scale, dropout_p, dropout_seed, document_ids)
    return _ChunkedAttention.apply(q, k, v, scale, dropout_p, dropout_seed, document_ids)


def select_attention(
    device: torch.device,
    dtype: torch.dtype,
    dropout_p: float,
    documents: bool,
    implementation: str = "auto",
    seq_length: int = CHUNKS_ON_CPU.start,
    head_dim: int = 1,
) -> tuple[str, str, str]:
    """(implementation that runs, why, why not the other of "sdpa" and "chunked"). Raises ValueError
    if the requested one is unavailable (flash-attn is checked in select.py)."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"attention implementation {implementation!r} is unknown: use one of {IMPLEMENTATIONS}"
        )
    unsupported = [
        reason
        for reason, there in (
            ("attention dropout", dropout_p > 0.0),
            ("document masks", documents),
            ("fp64", dtype == torch.float64),
        )
        if there
    ]
    if implementation == "sdpa" and unsupported:
        raise ValueError(
            f"attention implementation 'sdpa' does not support {' and '.join(unsupported)}: "
            "use 'auto' or 'chunked'"
        )
    no_cpp_bf16 = bf16_attention.unavailable_reason(device, dtype, head_dim, seq_length)
    no_cpp_fp32 = " and ".join(unsupported) or fp32_attention.unavailable_reason(
        device, dtype, head_dim, seq_length
    )
    # asked only where it decides: in a graph the question would be traced
    no_torch_flash = (
        torch_flash_unavailable_reason(device, dtype, head_dim)
        if unsupported or implementation == "torch_flash"
        else "not needed"
    )
    for name, why_not in (
        ("cpp_bf16", no_cpp_bf16),
        ("cpp_fp32", no_cpp_fp32),
        ("torch_flash", no_torch_flash),
        ("flash", "its dropout is not reproducible on resume" if dropout_p > 0.0 else None),
    ):
        if implementation == name and why_not:
            raise ValueError(
                f"attention implementation {name!r} cannot run: {why_not}; use 'auto' or 'chunked'"
            )
    if implementation != "auto":
        return implementation, "requested", "not selected"
    if no_cpp_bf16 is None:
        others = f", or no support for {' and '.join(unsupported)}" if unsupported else ""
        masks = "; its own dropout mask" if dropout_p > 0.0 else ""
        return (
            "cpp_bf16",
            f"this CPU has {bf16_attention.instructions()}{masks}",
            f"slower in bf16 on this CPU{others}",
        )
    if unsupported and no_torch_flash is None:
        return "torch_flash", f"takes {' and '.join(unsupported)}", "multiple passes over memory"
    if unsupported:
        return (
            "chunked",
            f"needed for {' and '.join(unsupported)}",
            "does not support it",
        )
    emulated = not low_precision_is_native(device.type, dtype)
    if no_cpp_fp32 is None and (emulated or dtype == torch.float32):
        return "cpp_fp32", "this CPU has AVX512 or AVX2; fp32 arithmetic", "slower on this CPU"
    if emulated:
        return "chunked", "fp32 arithmetic", f"{dtype} is emulated on this {device.type}"
    if device.type == "cpu" and dtype == torch.float32 and seq_length in CHUNKS_ON_CPU:
        return (
            "chunked",
            f"fastest on a CPU for {CHUNKS_ON_CPU[0]} to {CHUNKS_ON_CPU[-1]} positions",
            "slower at these lengths",
        )
    return "sdpa", "plain causal attention", "multiple passes over memory"


def torch_flash_unavailable_reason(
    device: torch.device, dtype: torch.dtype, head_dim: int
) -> str | None:
    """Why torch's flash kernel (kernels/cuda/torch_flash.py) cannot take dropout or documents here;
    None if it can. The meta device (--dry-run --trace) stands for CUDA."""
    if torch.compiler.is_compiling() and dtype != torch.float64:
        return None  # the layer has asked, and keeps what it cannot take outside the graph
    if device.type not in ("cuda", "meta"):
        return f"needs a CUDA device, but the device is {device.type}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"has fp16 and bf16 only, no {dtype}"
    if not 0 < head_dim <= DROPOUT_HEAD_DIM or head_dim % FLASH_MULTIPLE:
        return (
            f"has heads of a multiple of {FLASH_MULTIPLE} and at most {DROPOUT_HEAD_DIM}, "
            f"not {head_dim}"
        )
    return None if devices.has_flash(device) else "needs compute capability 8.0 or newer"


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    gqa = q.shape[2] != k.shape[2]
    if gqa and devices.kernels_of(q.device) == "cuda" and q.dtype == torch.float32:
        # flash and cuDNN have no fp32, the memory-efficient kernel no groups: the formula would run
        k, v = (t.repeat_interleave(q.shape[2] // k.shape[2], 2) for t in (k, v))
        gqa = False
    q_, k_, v_ = (t.permute(1, 2, 0, 3) for t in (q, k, v))
    if q.device.type == "meta":
        # torch would take the formula with its s x s tensors, which no GPU does
        out, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            q_, k_, v_, 0.0, True, scale=scale
        )
        return out.permute(2, 0, 1, 3)
    return F.scaled_dot_product_attention(
        q_, k_, v_, is_causal=True, scale=scale, enable_gqa=gqa
    ).permute(2, 0, 1, 3)


class _ChunkedAttention(torch.autograd.Function):
    """Backward recomputes probabilities and dropout masks: only q, k and v are saved."""

    @staticmethod
    def forward(ctx, q, k, v, scale, dropout_p, seed, document_ids):
        ctx.save_for_backward(q, k, v, document_ids)
        ctx.options = scale, dropout_p, seed
        return chunked(q, k, v, _causal_block(document_ids, *ctx.options))

    @staticmethod
    def backward(ctx, grad_out):
        *tensors, document_ids = ctx.saved_tensors
        block = _causal_block(document_ids, *ctx.options)
        return *chunked_grads(tensors, grad_out, block), None, None, None, None


def _causal_block(ids: Tensor | None, scale: float, dropout_p: float, seed: int) -> Block:
    """All queries and all keys of a sequence as one block."""
    return Block(scale, True, ids, ids, dropout_p, seed)
