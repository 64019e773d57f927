"""A stand-in on the CPU for torch's flash kernel, that draws its masks as the kernel does: from the
device's own generator in forward, from the state it had in backward."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

CALLS: list[tuple] = []


def mask(p: float, state: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Dropout factors of a call that found the generator with the seed `state`."""
    drawn = torch.rand(shape, generator=torch.Generator().manual_seed(state), dtype=torch.float64)
    return (drawn >= p).double() / (1 - p)


def _scores(q, k, scale):
    """[b, n, s, s] of q and k [b, s, n, d]; causal."""
    scores = torch.einsum("bind,bjnd->bnij", q, k) * scale
    return scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)


def _attend(q, k, v, ends, p, scale, state):
    """(result, log-sum-exp [..., n, s]) of [b, s, n, d], or of [tokens, n, d] cut at `ends`."""
    if ends is not None:
        cuts = ends.diff().tolist()
        parts = zip(*(t.split(cuts) for t in (q, k, v)), strict=True)
        results = [_attend(*(t[None] for t in part), None, p, scale, state) for part in parts]
        return tuple(
            torch.cat([t[0] for t in each], -i) for i, each in enumerate(zip(*results, strict=True))
        )
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (k, v))
    scores = _scores(q, k, scale)
    probs = scores.softmax(-1)
    if p:
        probs = probs * mask(p, state, probs.shape).to(probs.dtype)
    return torch.einsum("bnij,bjnd->bind", probs, v), scores.logsumexp(-1)


def _gradients(grad, q, k, v, out, sums, ends, p, scale, state):
    """Of q, k and v, by result and log-sum-exp as they are given."""
    if ends is not None:
        cuts = ends.diff().tolist()
        pieces = [*(t.split(cuts) for t in (grad, q, k, v, out)), sums.split(cuts, -1)]
        parts = zip(*pieces, strict=True)
        results = [_gradients(*(t[None] for t in part), None, p, scale, state) for part in parts]
        return tuple(torch.cat([t[0] for t in each]) for each in zip(*results, strict=True))
    heads, groups = q.shape[2], k.shape[2]
    k, v = (t.repeat_interleave(heads // groups, 2) for t in (k, v))
    probs = (_scores(q, k, scale) - sums.unsqueeze(-1)).exp()
    grad_probs = torch.einsum("bind,bjnd->bnij", grad, v)
    dropped = probs
    if p:
        factors = mask(p, state, probs.shape).to(probs.dtype)
        dropped, grad_probs = probs * factors, grad_probs * factors
    delta = (grad * out).sum(-1).transpose(1, 2).unsqueeze(-1)
    grad_scores = probs * (grad_probs - delta) * scale
    grad_k = torch.einsum("bnij,bind->bjnd", grad_scores, q)
    grad_v = torch.einsum("bnij,bind->bjnd", dropped, grad)
    grad_k, grad_v = (t.unflatten(2, (groups, heads // groups)).sum(3) for t in (grad_k, grad_v))
    return torch.einsum("bnij,bjnd->bind", grad_scores, k), grad_k, grad_v


def _forward(q, k, v, ends, ends_k, s, s_k, p, causal, debug, *, scale=None, **more):
    assert causal and not debug and ends is ends_k and s == s_k
    CALLS.append((q.dim(), p))
    seed = 0
    if p:
        seed = torch.default_generator.initial_seed()
        torch.rand(1)  # as the kernel, it goes on
    result, sums = _attend(q, k, v, ends, p, scale, seed)
    out = torch.empty_like(q).copy_(result)
    sums = sums.contiguous()
    state = torch.tensor([seed, 0], dtype=torch.uint64)
    return out, sums, state, torch.empty((), dtype=torch.uint64), q.new_empty(0)


def _backward(
    grad, q, k, v, out, sums, ends, ends_k, s, s_k, p, causal, state, unused, *, scale=None, **more
):
    return _gradients(grad, q, k, v, out, sums, ends, p, scale, state[0].item())


@contextmanager
def on_cpu() -> Iterator[None]:
    """Torch's operations have these as their kernels on a CPU."""
    library = torch.library.Library("aten", "IMPL", "CPU")
    library.impl("_flash_attention_forward", _forward)
    library.impl("_flash_attention_backward", _backward)
    yield
    library._destroy()
