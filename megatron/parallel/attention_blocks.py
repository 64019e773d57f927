"""The parts of ring attention: a block of queries with a block of keys, and how parts are joined.

softmax(scores) v over all keys is an average of the same over blocks of keys, weighted by the sums
of exponentials of each block, whose logarithms (`lse`) are returned with the parts (Dao et al.
2022, Liu et al. 2023)."""

import torch
from torch import Tensor

from megatron.kernels.block_attention import KeyBlock
from megatron.kernels.block_implementations import IMPLEMENTATIONS
from megatron.kernels.implementation import choose


def block_attention(q: Tensor, k: Tensor, v: Tensor, block: KeyBlock) -> tuple[Tensor, Tensor]:
    """q [s_q, b, n, d], k and v [s_k, b, g, d] with n a multiple of g -> (out [s_q, b, n, d], lse
    [s_q, b, n]).

    `lse` is the logarithm of the sum of exponentials of a query's scores, -inf (and `out` 0) where
    it sees no key. Both are at least fp32, but the flash kernel rounds `out` to the format of q.
    Raises ValueError where no implementation supports the block's spec.
    """
    return choose(IMPLEMENTATIONS, block.spec).implementation.forward.values(q, k, v, block)


def block_attention_grads(
    tensors: tuple[Tensor, Tensor, Tensor],
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    delta: Tensor,
    block: KeyBlock,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of (q, k, v) from this block, of shapes as theirs and at least fp32 if not from
    the flash kernel.

    out [s_q, b, n, d] and lse [s_q, b, n] are those over ALL keys, delta [s_q, b, n] the sums of
    out x grad_out over d.
    """
    kernel = choose(IMPLEMENTATIONS, block.spec).implementation.forward
    return kernel.grads(tensors, grad_out, out, lse, delta, block)


def join_(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Add a block of keys: `out` [s, b, n, d] and `lse` [s, b, n] (finite) become those over the
    keys of both.

    out = (e^lse out + e^block_lse block_out) / (e^lse + e^block_lse). Divided by e^lse that is an
    interpolation with the weight sigmoid(block_lse - lse), which no size of the scores overflows.
    """
    out.lerp_(block_out.to(out.dtype), torch.sigmoid(block_lse - lse).unsqueeze(-1))
    torch.logaddexp(lse, block_lse, out=lse)
