"""Attention by heads: context-parallel ranks exchange their positions of all heads for all
positions of some heads, and back (Jacobs et al. 2023, "DeepSpeed Ulysses")."""

import torch

from megatron.parallel.context import Axis
from megatron.parallel.exchange import all_to_all


def by_heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, axis: Axis
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [s, b, n, d], k [s, b, g, d] and v [s, b, g, v] of this rank's two chunks of positions ->
    [r s, b, n / r, d], [r s, b, h, d] and [r s, b, h, v] with h = max(1, g / r): the positions of
    all r ranks of `axis` in ascending order, and the heads that this rank computes.

    r divides n, and g is a multiple or a divisor of it: ranks that share a key head each get it.
    Of r p context-parallel ranks r neighbours together hold what a rank of p would, which are the
    two chunks that a ring of these groups takes (parallel/zigzag.py).
    """
    if axis.size == 1:
        return q, k, v
    ranks, positions = axis.size, len(q)
    if ranks > k.shape[2]:
        k, v = (t.repeat_interleave(ranks // k.shape[2], 2) for t in (k, v))
    shares = [t.unflatten(2, (ranks, -1)) for t in (q, k, v)]
    # one message to each rank: [r, s, b, channels of its heads]
    sent = torch.cat([share.flatten(3) for share in shares], 3).movedim(2, 0)
    arrived = _exchange(sent, axis).unflatten(1, (2, positions // 2))
    whole = []
    for t, share in zip(
        arrived.split([s[0, 0, 0].numel() for s in shares], -1), shares, strict=True
    ):
        # early chunks by rank, late ones the other way round
        early, late = t[:, 0], t[:, 1].flip(0)
        whole.append(torch.cat((early, late)).flatten(0, 1).unflatten(-1, share.shape[3:]))
    return whole[0], whole[1], whole[2]


def by_positions(y: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The way back: results [r s, b, n / r, v] of `by_heads` -> [s, b, n, v]."""
    if axis.size == 1:
        return y
    chunks = y.unflatten(0, (2, axis.size, -1))
    both = torch.stack((chunks[0], chunks[1].flip(0)), 1)
    return _exchange(both.flatten(1, 2), axis).movedim(0, 2).flatten(2, 3)


def _exchange(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Row i of `x` [r, ...] to rank i -> what each rank sent, in their order."""
    once = [1] * axis.size
    return all_to_all(x, axis, once, once)
