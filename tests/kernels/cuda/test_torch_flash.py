"""Torch's flash kernel with dropout and documents, by a stand-in on the CPU that draws its masks as
the kernel does: from the device's own generator in forward, from the state it had in backward."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron import device as devices
from megatron.kernels import attention, functional
from megatron.kernels.attention import select_attention
from megatron.kernels.cuda.torch_flash import flash_attention
from tests.kernels.attention_formula import SCALE, assert_same, cut, formula, inputs

CUDA = torch.device("cuda", 0)
CALLS: list[tuple] = []


def _mask(p: float, state: int, shape: tuple[int, ...]) -> torch.Tensor:
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
        probs = probs * _mask(p, state, probs.shape).to(probs.dtype)
    return torch.einsum("bnij,bjnd->bind", probs, v)


def _forward(q, k, v, ends, ends_k, s, s_k, p, causal, debug, *, scale=None, **more):
    assert causal and not debug and ends is ends_k and s == s_k
    CALLS.append((q.dim(), p))
    seed = 0
    if p:
        seed = torch.default_generator.initial_seed()
        torch.rand(1)  # as the kernel, it goes on
    out = _attend(q, k, v, ends, p, scale, seed)
    state = torch.tensor([seed, 0], dtype=torch.int64)
    return out, q.new_empty(0), state, torch.empty((), dtype=torch.int64), q.new_empty(0)


def _backward(
    grad, q, k, v, out, sums, ends, ends_k, s, s_k, p, causal, state, unused, *, scale=None, **more
):
    def grads():
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        again = _attend(*leaves, ends, p, scale, state[0].item())
        return torch.autograd.grad(again, leaves, grad)

    with ThreadPoolExecutor(1) as pool:  # inside an operation torch records no derivatives
        return pool.submit(grads).result()


@pytest.fixture(scope="module", autouse=True)
def stand_in():
    """Torch's operation has these as its kernel on a CPU, and its own derivative."""
    library = torch.library.Library("aten", "IMPL", "CPU")
    library.impl("_flash_attention_forward", _forward)
    library.impl("_flash_attention_backward", _backward)
    yield
    library._destroy()


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("masked", [False, True])
def test_it_is_the_formula(groups, masked):
    tensors = inputs(g=groups)
    ids = cut(21) if masked else None
    assert_same(
        lambda *t: flash_attention(*t, SCALE, document_ids=ids),
        lambda *t: formula(*t, ids),
        tensors[:3],
        tensors[3],
        rtol=1e-12,
        atol=1e-13,
    )


@pytest.mark.parametrize("masked", [False, True])
def test_the_mask_is_a_function_of_the_seed(masked):
    """Whatever draws before, between forward and backward, or after."""
    *tensors, grad = inputs()
    ids = cut(21) if masked else None
    torch.manual_seed(5)

    def run(seed, disturb):
        out = flash_attention(*tensors, SCALE, 0.5, seed, ids)
        torch.rand(disturb)
        return out, *torch.autograd.grad(out, tensors, grad)

    first, again, other = run(2**62 + 1, 3), run(2**62 + 1, 8), run(2, 3)
    assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
    assert not any(torch.equal(one, two) for one, two in zip(first, other, strict=True))
    state = torch.random.get_rng_state()
    run(1, 0)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_the_gradient_is_that_of_the_mask():
    *tensors, grad = inputs()
    factors = _mask(0.3, 9, (2, 4, 21, 21))
    assert_same(
        lambda *t: flash_attention(*t, SCALE, 0.3, 9),
        lambda *t: formula(*t, None, factors),
        tensors,
        grad,
        rtol=1e-12,
        atol=1e-13,
    )


def test_recompute_repeats_the_mask():
    *tensors, grad = inputs()
    call = lambda *t: flash_attention(*t, SCALE, 0.5, 9)  # noqa: E731
    straight = torch.autograd.grad(call(*tensors), tensors, grad)
    again = checkpoint(call, *tensors, use_reentrant=False, preserve_rng_state=False)
    torch.rand(7)
    for one, two in zip(straight, torch.autograd.grad(again, tensors, grad), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize(
    "dtype, head_dim, new, chosen",
    [
        (torch.bfloat16, 128, True, "torch_flash"),
        (torch.float16, 192, True, "torch_flash"),
        (torch.float32, 128, True, "chunked"),
        (torch.bfloat16, 200, True, "chunked"),
        (torch.bfloat16, 100, True, "chunked"),
        (torch.bfloat16, 128, False, "chunked"),
    ],
)
@pytest.mark.parametrize("dropout, masked", [(0.1, False), (0.0, True), (0.1, True)])
def test_selection(monkeypatch, dtype, head_dim, new, chosen, dropout, masked):
    monkeypatch.setattr(devices, "has_flash", lambda device: new)
    options = (dropout, masked, "auto", 1024, head_dim)
    assert select_attention(CUDA, dtype, *options)[0] == chosen
    assert select_attention(CUDA, dtype, 0.0, False, "auto", 1024, head_dim)[0] == "sdpa"
    assert select_attention(CUDA, dtype, dropout, masked, "chunked", 1024, head_dim)[0] == "chunked"
    assert select_attention(torch.device("cpu"), torch.float32, *options)[0] == "chunked"
    if chosen == "chunked":
        with pytest.raises(ValueError, match="'torch_flash'"):
            select_attention(CUDA, dtype, dropout, masked, "torch_flash", 1024, head_dim)


def test_layers_with_dropout_or_documents_reach_it(monkeypatch):
    monkeypatch.setattr(attention, "torch_flash_unavailable_reason", lambda *_: None)
    q, k, v, _ = inputs(dtype=torch.float32)
    CALLS.clear()
    functional.attention(q, k, v, scale=SCALE, dropout_p=0.1, dropout_seed=1)
    functional.attention(q, k, v, scale=SCALE, document_ids=cut(21))
    functional.attention(q, k, v, scale=SCALE)
    with pytest.raises(ValueError, match="dropout_seed"):
        functional.attention(q, k, v, scale=SCALE, dropout_p=0.1)
    assert CALLS == [(4, 0.1), (3, 0.0)]


def test_a_cuda_device_is_asked_for_its_generator(monkeypatch):
    asked = [torch.Generator() for _ in range(2)]
    monkeypatch.setattr(torch.cuda, "default_generators", asked)
    before = [one.get_state() for one in asked]
    with devices.kernel_seed(torch.device("cuda", 1), 77):
        assert asked[1].initial_seed() == 77
    assert all(torch.equal(one.get_state(), two) for one, two in zip(asked, before, strict=True))
