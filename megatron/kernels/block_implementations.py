"""The implementations of a block of ring attention: torch's flash kernel, and rows of queries."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.device import kernels_of
from megatron.kernels.attention_spec import AttentionSpec
from megatron.kernels.block_attention import KeyBlock, block_backward, block_forward
from megatron.kernels.cpu.blocking import wide_dtype
from megatron.kernels.implementation import Implementation

HEAD_DIM = 256  # the widest head that torch's flash kernel takes
MULTIPLE = 8  # what it takes a multiple of

Tensors = tuple[Tensor, Tensor, Tensor]  # of q, k and v, or of their gradients


class BlockKernel(NamedTuple):
    """Both directions of `block_attention` and `block_attention_grads` in
    parallel/attention_blocks.py."""

    values: Callable[[Tensor, Tensor, Tensor, KeyBlock], tuple[Tensor, Tensor]]
    grads: Callable[[Tensors, Tensor, Tensor, Tensor, Tensor, KeyBlock], Tensors]


def _chunked(q: Tensor, k: Tensor, v: Tensor, block: KeyBlock) -> tuple[Tensor, Tensor]:
    out = q.new_empty(*q.shape[:-1], v.shape[-1], dtype=wide_dtype(q))
    lse = out.new_empty(q.shape[:3])
    block_forward(q, k, v, block, out, lse)
    return out, lse


def _chunked_grads(
    tensors: Tensors, grad_out: Tensor, out: Tensor, lse: Tensor, delta: Tensor, block: KeyBlock
) -> Tensors:
    dq, dk, dv = (t.new_empty(t.shape, dtype=wide_dtype(t)) for t in tensors)
    block_backward((*tensors, grad_out), (lse, delta), block, (dq, dk, dv))
    return dq, dk, dv


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    """[s, b, n, d] -> [b, n, s, d]."""
    return [t.permute(1, 2, 0, 3) for t in tensors]


def _flash(q: Tensor, k: Tensor, v: Tensor, block: KeyBlock) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        *_heads_first(q, k, v), 0.0, block.causal, scale=block.spec.scale
    )
    return out.permute(2, 0, 1, 3), lse.permute(2, 0, 1)


def _flash_grads(
    tensors: Tensors, grad_out: Tensor, out: Tensor, lse: Tensor, delta: Tensor, block: KeyBlock
) -> Tensors:
    q, k, v = tensors
    # of dropout
    state, unused = (torch.empty(size, dtype=torch.uint64, device=q.device) for size in ((2,), ()))
    grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        *_heads_first(grad_out, q, k, v, out.to(q.dtype)),
        lse.permute(1, 2, 0).contiguous(),
        None,
        None,
        len(q),
        len(k),
        0.0,
        block.causal,
        state,
        unused,
        scale=block.spec.scale,
    )
    dq, dk, dv = (grad.permute(2, 0, 1, 3) for grad in grads)
    dk, dv = (
        grad.unflatten(2, (k.shape[2], -1)).sum(3) if grad.shape != k.shape else grad
        for grad in (dk, dv)
    )
    return dq, dk, dv


def _flash_unavailable(spec: AttentionSpec) -> str | None:
    if kernels_of(spec.device) != "cuda":
        return f"needs a CUDA device, but the device is {spec.device.type}"
    if spec.dtype not in (torch.bfloat16, torch.float16):
        return f"has fp16 and bf16 only, no {spec.dtype}"
    if not 0 < spec.head_dim <= HEAD_DIM or spec.head_dim % MULTIPLE:
        return f"has heads of a multiple of {MULTIPLE} and at most {HEAD_DIM}, not {spec.head_dim}"
    return None


# The ring joins it to the sum of all blocks, once.
SINK = frozenset({"sink"})

# In the order of preference.
IMPLEMENTATIONS: tuple[Implementation[AttentionSpec, BlockKernel], ...] = (
    Implementation(
        "flash",
        "ring attention with torch's flash kernel",
        BlockKernel(_flash, _flash_grads),
        SINK,
        unavailable=_flash_unavailable,
        why=lambda spec: "context parallelism",
    ),
    Implementation(
        "chunked",
        "ring attention, chunked",
        BlockKernel(_chunked, _chunked_grads),
        frozenset({"dropout", "documents", "window", "softcap", "value_dim"}) | SINK,
        slower=lambda spec: "multiple passes over memory",
        why=lambda spec: "context parallelism",
    ),
)
