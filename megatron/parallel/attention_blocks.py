"""The parts of ring attention: a block of queries with a block of keys, and how parts are joined.

softmax(scores) v over all keys is an average of the same over blocks of keys, weighted by the sums
of exponentials of each block, whose logarithms (`lse`) are returned with the parts (Dao et al.
2022, Liu et al. 2023)."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.device import kernels_of
from megatron.kernels.block_attention import Block, block_backward, block_forward, flash
from megatron.kernels.cpu.blocking import wide_dtype


def block_attention(q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """q [s_q, b, n, d], k and v [s_k, b, g, d] with n a multiple of g -> (out [s_q, b, n, d], lse
    [s_q, b, n]).

    `lse` is the logarithm of the sum of exponentials of a query's scores, -inf (and `out` 0) where
    it sees no key. Both are at least fp32, but the flash kernel rounds `out` to the format of q.
    """
    if flash(
        kernels_of(q.device),
        q.dtype,
        q.shape[-1],
        block.dropout_p,
        block.query_ids is not None,
        block.implementation,
    ):
        return _flash(q, k, v, block)
    out = q.new_empty(q.shape, dtype=wide_dtype(q))
    lse = out.new_empty(q.shape[:3])
    block_forward(q, k, v, block, out, lse)
    return out, lse


def block_attention_grads(
    tensors: tuple[Tensor, Tensor, Tensor],
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    delta: Tensor,
    block: Block,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of (q, k, v) from this block, of shapes as theirs and at least fp32 if not from
    the flash kernel.

    out [s_q, b, n, d] and lse [s_q, b, n] are those over ALL keys, delta [s_q, b, n] the sums of
    out x grad_out over d.
    """
    q, k, v = tensors
    if flash(
        kernels_of(q.device),
        q.dtype,
        q.shape[-1],
        block.dropout_p,
        block.query_ids is not None,
        block.implementation,
    ):
        return _flash_grads(q, k, v, grad_out, out, lse, block)
    dq, dk, dv = (t.new_empty(t.shape, dtype=wide_dtype(q)) for t in tensors)
    block_backward((q, k, v, grad_out), (lse, delta), block, (dq, dk, dv))
    return dq, dk, dv


def join_(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Take the keys of a part in: `out` [s, b, n, d] and `lse` [s, b, n] (finite) become those over
    the keys of both."""
    out.lerp_(part.to(out.dtype), torch.sigmoid(part_lse - lse).unsqueeze(-1))
    torch.logaddexp(lse, part_lse, out=lse)


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    """[s, b, n, d] -> [b, n, s, d]."""
    return [t.permute(1, 2, 0, 3) for t in tensors]


def _flash(q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    if q.device.type == "cpu":
        k = _repeated(k, q)
        v = _repeated(v, q)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *_heads_first(q, k, v), 0.0, block.causal, scale=block.scale
        )
    else:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(
            *_heads_first(q, k, v), 0.0, block.causal, scale=block.scale
        )[:2]
    return out.permute(2, 0, 1, 3), lse.permute(2, 0, 1)


def _flash_grads(
    q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, out: Tensor, lse: Tensor, block: Block
) -> tuple[Tensor, Tensor, Tensor]:
    out = out.to(q.dtype)
    lse = lse.permute(1, 2, 0).contiguous()
    if q.device.type == "cpu":
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *_heads_first(grad_out, q, _repeated(k, q), _repeated(v, q), out),
            lse,
            0.0,
            block.causal,
            scale=block.scale,
        )
    else:
        # of dropout
        state, unused = (
            torch.empty(size, dtype=torch.uint64, device=q.device) for size in ((2,), ())
        )
        grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *_heads_first(grad_out, q, k, v, out),
            lse,
            None,
            None,
            len(q),
            len(k),
            0.0,
            block.causal,
            state,
            unused,
            scale=block.scale,
        )
    dq, dk, dv = (grad.permute(2, 0, 1, 3) for grad in grads)
    dk, dv = (
        grad.unflatten(2, (k.shape[2], -1)).sum(3) if grad.shape != k.shape else grad
        for grad in (dk, dv)
    )
    return dq, dk, dv


def _repeated(k: Tensor, q: Tensor) -> Tensor:
    """Keys or values with a head for each query head: the CPU's kernel wants them so."""
    return k.repeat_interleave(q.shape[2] // k.shape[2], 2)
