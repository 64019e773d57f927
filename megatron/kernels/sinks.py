"""Attention sinks: one more score of each head, which takes a share of the softmax and gives no
value.

Every kernel that returns the logarithms of its sums can have them: the result is that without
sinks, times the share that is left. Backward of such a kernel takes result and logarithms of its
own forward; given those with sinks it computes the gradients with sinks.
"""

import torch
from torch import Tensor


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Results `out` [..., n, d] and log-sum-exps `lse` [..., n] (finite) over keys -> the same with
    the sinks [n], in the dtypes of `out` and `lse`."""
    total = torch.logaddexp(lse, sinks.to(lse.dtype))
    return (out * (lse - total).exp().unsqueeze(-1)).to(out.dtype), total


def sink_grads(out: Tensor, lse: Tensor, grad_out: Tensor, sinks: Tensor) -> Tensor:
    """The gradient of the sinks [n]; `out` [..., n, d] and `lse` [..., n] are those with them.

    A sink's share is exp(sink - lse), and its value is 0.
    """
    delta = (out.to(lse.dtype) * grad_out).sum(-1)
    shares = (sinks.to(lse.dtype) - lse).exp()
    return (delta * shares).flatten(0, -2).sum(0).neg().to(sinks.dtype)
