"""A stand-in on the CPU for torch's flash kernel, that draws its masks as the kernel does: from the
device's own generator in forward, from the state it had in backward."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

CALLS: list[tuple] = []


def mask(p: float, state: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Dropout factors of a call that found the generator with the seed `state`."""
    drawn = torch.rand(shape, generator=torch.Generator().manual_seed(state), dtype=torch.float64)
    return (drawn >= p).double() / (1 - p)


def _attend(q, k, v, ends, p, scale, state):
    """[b, s, n, d], or [tokens, n, d] cut at `ends`; causal."""
    if ends is not None:
        cuts = ends.diff().tolist()
        parts = zip(*(t.split(cuts) for t in (q, k, v)), strict=True)
        return torch.cat(
            [_attend(*(t[None] for t in part), None, p, scale, state)[0] for part in parts]
        )
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (k, v))
    scores = torch.einsum("bind,bjnd->bnij", q, k) * scale
    later = torch.ones(scores.shape[-2:]).triu(1).bool()
    probs = scores.masked_fill(later, -torch.inf).softmax(-1)
    if p:
        probs = probs * mask(p, state, probs.shape).to(probs.dtype)
    return torch.einsum("bnij,bjnd->bind", probs, v)


def _forward(q, k, v, ends, ends_k, s, s_k, p, causal, debug, *, scale=None, **more):
    assert causal and not debug and ends is ends_k and s == s_k
    CALLS.append((q.dim(), p))
    seed = 0
    if p:
        seed = torch.default_generator.initial_seed()
        torch.rand(1)  # as the kernel, it goes on
    out = torch.empty_like(q).copy_(_attend(q, k, v, ends, p, scale, seed))
    sums = q.new_empty(q.shape[:-1], dtype=torch.float32).transpose(-1, -2).contiguous()
    state = torch.tensor([seed, 0], dtype=torch.uint64)
    return out, sums, state, torch.empty((), dtype=torch.uint64), q.new_empty(0)


def _backward(
    grad, q, k, v, out, sums, ends, ends_k, s, s_k, p, causal, state, unused, *, scale=None, **more
):
    def grads():
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        again = _attend(*leaves, ends, p, scale, state[0].item())
        return torch.autograd.grad(again, leaves, grad)

    with ThreadPoolExecutor(1) as pool:  # inside an operation torch records no derivatives
        return pool.submit(grads).result()


@contextmanager
def on_cpu() -> Iterator[None]:
    """Torch's operations have these as their kernels on a CPU."""
    library = torch.library.Library("aten", "IMPL", "CPU")
    library.impl("_flash_attention_forward", _forward)
    library.impl("_flash_attention_backward", _backward)
    yield
    library._destroy()
