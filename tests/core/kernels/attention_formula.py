"""Attention by its definition, and inputs to compare a kernel with it."""

import torch

SCALE = 0.3


def inputs(
    s: int = 21,
    b: int = 2,
    n: int = 4,
    g: int = 2,
    d: int = 8,
    dtype: torch.dtype = torch.float64,
    seed=1,
):
    """q, k, v as the views of one fused tensor that a model has, leaves of their own, and a
    gradient."""
    generator = torch.Generator().manual_seed(seed)
    fused = torch.randn(s, b, g, (n // g + 2) * d, generator=generator, dtype=torch.float64).to(
        dtype
    )
    q, k, v = fused.split([n // g * d, d, d], -1)
    q, k, v = (t.detach().requires_grad_() for t in (q.reshape(s, b, n, d), k, v))
    return q, k, v, torch.randn(s, b, n, d, generator=generator, dtype=torch.float64).to(dtype)


def documents(s: int, b: int = 2) -> torch.Tensor:
    """Another cut in each sample; ids are no consecutive numbers, and in the last sample one comes
    again."""
    position = torch.arange(s).expand(b, s)
    ids = (position > s // 3).long() * 7 - 2 + (position >= 2 * s // 3) * torch.arange(b)[:, None]
    ids[-1, -2:] = ids[-1, 0]
    return ids


def formula(q, k, v, ids=None, factors=None, window=None, softcap=None, sinks=None) -> torch.Tensor:
    """The definition, with whole [b, n, s, s] matrices, differentiable, in fp64. `window`: a
    position sees itself and the `window` - 1 before it. `sinks` [n]: what each head's denominator
    has more is the exponential of this."""
    s, _, n, _ = q.shape
    q, k, v = (t.double() for t in (q, k, v))
    k, v = (t.repeat_interleave(n // t.shape[2], 2) for t in (k, v))
    scores = torch.einsum("ibnd,jbnd->bnij", q, k) * SCALE
    if softcap is not None:
        scores = softcap * (1 - 2 / ((2 * scores / softcap).exp() + 1))
    hidden = torch.arange(s)[None, :] > torch.arange(s)[:, None]
    if window is not None:
        hidden = hidden | (torch.arange(s)[:, None] - torch.arange(s) >= window)
    if ids is not None:
        hidden = hidden | (ids[:, None, :, None] != ids[:, None, None, :])
    scores = torch.where(hidden, -torch.inf, scores)
    peak = scores.amax(-1, keepdim=True)
    if sinks is not None:
        peak = torch.maximum(peak, sinks.double().view(-1, 1, 1))
    powers = (scores - peak).exp()
    total = powers.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (sinks.double().view(-1, 1, 1) - peak).exp()
    probs = powers / total
    return torch.einsum("bnij,jbnd->ibnd", probs if factors is None else probs * factors, v)


def assert_same(call, reference, tensors, grad, **close) -> None:
    """Output and the gradients of q, k, v and more."""
    wide = [t.detach().double().requires_grad_() for t in tensors]
    actual = call(*tensors)
    exact = reference(*wide)
    results = (actual, *torch.autograd.grad(actual, tensors, grad))
    for got, wanted in zip(
        results, (exact, *torch.autograd.grad(exact, wide, grad.double())), strict=True
    ):
        assert got.dtype == grad.dtype
        torch.testing.assert_close(got.double(), wanted, **close)


def cut(s: int, b: int = 2) -> torch.Tensor:
    """Documents that are runs of one id, another cut in each sample."""
    position = torch.arange(s).expand(b, s)
    return (position > s // 3).long() + (position >= 2 * s // 3) * torch.arange(b)[:, None]
