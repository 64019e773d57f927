"""Attention of blocks against the plain formula in fp64: values, sums and gradients, masks, joins,
formats, dropout."""

import dataclasses
from functools import partial

import pytest
import torch

from megatron.kernels import attention_spec, block_implementations
from megatron.kernels import block_attention as module
from megatron.kernels.attention_spec import AttentionSpec
from megatron.kernels.implementation import choose
from megatron.parallel.attention_blocks import block_attention, block_attention_grads, join_
from tests.core.kernels.attend import Biased
from tests.core.kernels.attend import block as make_block
from tests.core.kernels.attention_formula import documents, inputs

SCALE = 0.3
CLOSE = dict(rtol=1e-11, atol=1e-11)


def formula(q, k, v, block, factors=None):
    """(out, lse) by the definition, with whole matrices; `factors` [b, n, s_q, s_k] stand for
    dropout."""
    r = q.shape[2] // k.shape[2]
    k, v = (t.double().repeat_interleave(r, 2) for t in (k, v))
    scores = torch.einsum("ibnd,jbnd->bnij", q.double(), k) * block.spec.scale
    hidden = (
        torch.ones(scores.shape[2:], dtype=torch.bool).triu(1)
        if block.causal
        else torch.zeros(scores.shape[2:]).bool()
    )
    hidden = hidden.expand_as(scores).clone()
    if block.query_ids is not None:
        hidden |= (block.query_ids[:, :, None] != block.key_ids[:, None, :])[:, None]
    scores = scores.masked_fill(hidden, -torch.inf)
    lse = scores.logsumexp(-1)
    probs = (scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)).exp()
    probs = probs if factors is None else probs * factors
    return torch.einsum("bnij,jbnd->ibnd", probs, v), lse.permute(2, 0, 1)


def blocks(q, k):
    """Every kind of mask for queries `q` and keys `k`."""
    square = len(q) == len(k)
    ids = documents(max(len(q), len(k)))
    make = partial(make_block, q, k, k, SCALE)
    yield make()
    yield make(query_ids=ids[:, -len(q) :], key_ids=ids.flip(0)[:, : len(k)])
    if square:
        yield make(causal=True)
        yield make(causal=True, query_ids=ids, key_ids=ids)


SHAPES = [
    (21, 21, 4, 2, 8),
    (130, 67, 4, 4, 5),
    (1, 3, 6, 1, 16),
    (67, 130, 2, 1, 8),
    (150, 150, 2, 2, 3),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients_by_the_formula(shape):
    """The whole softmax: `lse` is that of the block, so the gradients are those of the formula."""
    s_q, s_k, n, g, d = shape
    q, _, _, grad = inputs(s_q, n=n, g=g, d=d)
    _, k, v, _ = inputs(s_k, n=n, g=g, d=d, seed=2)
    unseen = False
    for block in blocks(q, k):
        expected, logs = formula(q, k, v, block)
        unseen |= bool((logs == -torch.inf).any())
        with torch.no_grad():
            out, lse = block_attention(q, k, v, block)
        torch.testing.assert_close(out, expected, **CLOSE)
        torch.testing.assert_close(lse, logs, **CLOSE)
        wanted = torch.autograd.grad(expected, (q, k, v), grad)
        with torch.no_grad():
            finite = lse.masked_fill(lse == -torch.inf, 0.0)
            found = block_attention_grads((q, k, v), grad, out, finite, (out * grad).sum(-1), block)
        for mine, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, theirs, **CLOSE)
    assert unseen or s_q == 1, "with documents some query sees no key of another block"


@pytest.mark.parametrize("cut", [1, 10, 20])
def test_parts_join_to_the_whole(cut):
    """All queries to the first keys and to the others, forward and backward."""
    q, k, v, grad = inputs(21)
    block = make_block(q, k, v, SCALE)
    expected, logs = formula(q, k, v, block)
    wanted = torch.autograd.grad(expected, (q, k, v), grad)
    with torch.no_grad():
        (out, lse), part = (
            block_attention(q, k[s], v[s], block) for s in (slice(0, cut), slice(cut, None))
        )
        out = out.clone()
        lse = lse.clone()
        join_(out, lse, *part)
        torch.testing.assert_close(out, expected, **CLOSE)
        torch.testing.assert_close(lse, logs, **CLOSE)
        delta = (out * grad).sum(-1)
        first, second = (
            block_attention_grads((q, k[s], v[s]), grad, out, lse, delta, block)
            for s in (slice(0, cut), slice(cut, None))
        )
    torch.testing.assert_close(first[0] + second[0], wanted[0], **CLOSE)
    for i in (1, 2):
        torch.testing.assert_close(torch.cat((first[i], second[i])), wanted[i], **CLOSE)


def test_a_part_without_keys_changes_nothing():
    q, k, v, _ = inputs(9)
    ids = torch.zeros(2, 9, dtype=torch.long)
    with torch.no_grad():
        out, lse = block_attention(q, k, v, make_block(q, k, v, SCALE))
        kept = out.clone(), lse.clone()
        block = make_block(q, k, v, SCALE, query_ids=ids, key_ids=ids + 1)
        join_(out, lse, *block_attention(q, k, v, block))
    assert torch.equal(out, kept[0]) and torch.equal(lse, kept[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_formats_compute_in_fp32(dtype):
    q, k, v, grad = inputs(70, dtype=dtype)
    block = make_block(q, k, v, SCALE, causal=True)
    expected, logs = formula(q, k, v, block)
    with torch.no_grad():
        out, lse = block_attention(q, k, v, block)
        found = block_attention_grads((q, k, v), grad, out, lse, (out * grad).sum(-1), block)
    assert {t.dtype for t in (out, lse, *found)} == {torch.float32}
    wanted = torch.autograd.grad(expected, (q, k, v), grad.double())
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(
            mine.double(),
            theirs.double(),
            rtol=1e-2 if dtype != torch.float32 else 1e-4,
            atol=2e-2 if dtype != torch.float32 else 1e-5,
        )


def test_dropout_is_a_function_of_the_seed_and_its_gradient_knows_the_mask():
    """With one-hot values the result shows every kept probability; with those as factors the
    formula must agree."""
    s = 70
    p = 0.4
    q, k, _, _ = inputs(s, n=4, g=2, d=s)
    ids = documents(s)
    block = make_block(q, k, k, SCALE, causal=True, query_ids=ids, key_ids=ids, dropout=p, seed=77)
    undropped = dataclasses.replace(block, spec=dataclasses.replace(block.spec, dropout=0.0))
    eye = torch.eye(s, dtype=torch.float64)[:, None, None].expand(s, 2, 2, s)
    with torch.no_grad():
        shown, _ = block_attention(q, k, eye, block)
        plain, _ = block_attention(q, k, eye, undropped)
        other, _ = block_attention(q, k, eye, dataclasses.replace(block, seed=78))
        again, _ = block_attention(q, k, eye, block)
    assert torch.equal(shown, again) and not torch.equal(shown, other)
    factors = torch.where(plain > 0, shown / plain, 0.0).permute(1, 2, 0, 3)
    seen = (plain > 0).permute(1, 2, 0, 3)
    assert set(factors[seen].round(decimals=9).unique().tolist()) == {0.0, round(1 / (1 - p), 9)}
    kept = (factors[seen] > 0).double().mean()
    assert abs(kept - (1 - p)) < 5 * (p * (1 - p) / seen.sum()) ** 0.5
    assert not torch.equal(factors[:, 0], factors[:, 1]) and not torch.equal(
        factors[0], factors[1]
    ), "heads and samples"
    _, _, v, grad = inputs(s, n=4, g=2, d=s, seed=5)
    expected, _ = formula(q, k, v, block, factors)
    wanted = torch.autograd.grad(expected, (q, k, v), grad)
    with torch.no_grad():
        out, lse = block_attention(q, k, v, block)
        torch.testing.assert_close(out, expected, **CLOSE)
        found = block_attention_grads((q, k, v), grad, out, lse, (out * grad).sum(-1), block)
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, **CLOSE)


def test_no_more_than_some_rows_of_scores_are_held(monkeypatch):
    """Scratch is bounded by SCRATCH_ELEMENTS, not by queries x keys."""
    sizes = []
    bmm = torch.bmm
    monkeypatch.setattr(
        torch, "bmm", lambda a, b: sizes.append(a.shape[0] * a.shape[1] * b.shape[2]) or bmm(a, b)
    )
    q, k, v, _ = inputs(2048, b=1, n=2, g=1, d=4, dtype=torch.float32)
    with torch.no_grad():
        block_attention(q, k, v, make_block(q, k, v, SCALE))
    assert max(sizes) <= module.SCRATCH_ELEMENTS < 2048 * 2048 * 2


@pytest.mark.parametrize(
    "device, dtype, d, p, documents, expected",
    [
        ("cuda", torch.bfloat16, 128, 0.0, False, "flash"),
        ("meta", torch.float16, 64, 0.0, False, "flash"),
        ("cuda", torch.float32, 128, 0.0, False, "chunked"),
        ("cuda", torch.bfloat16, 100, 0.0, False, "chunked"),
        ("cuda", torch.bfloat16, 512, 0.0, False, "chunked"),
        ("cuda", torch.bfloat16, 128, 0.1, False, "chunked"),
        ("cuda", torch.bfloat16, 128, 0.0, True, "chunked"),
        ("cpu", torch.bfloat16, 128, 0.0, False, "chunked"),
    ],
)
def test_which_kernel_runs(device, dtype, d, p, documents, expected):
    spec = AttentionSpec(torch.device(device), dtype, 64, 2, 1, d, d, SCALE, p, documents)
    chosen = choose(block_implementations.IMPLEMENTATIONS, spec).implementation
    assert chosen.name == expected


def test_what_no_kernel_of_blocks_has_is_refused(monkeypatch):
    monkeypatch.setitem(attention_spec.FEATURES, "bias", "biases of scores")
    q, k, v, _ = inputs(9)
    spec = Biased.of(q, k, v, SCALE)
    with pytest.raises(ValueError, match="biases of scores"):
        block_attention(q, k, v, module.KeyBlock(spec))


def _twin(q, k, v, dropout, causal, *, scale):
    """torch's flash kernel of CUDA by its twin for CPUs."""
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, dropout, causal, scale=scale
    )


def _twin_grads(grad, q, k, v, out, lse, *more, scale):
    dropout, causal = more[4:6]
    groups = k.shape[1]
    k, v = (t.repeat_interleave(q.shape[1] // groups, 1) for t in (k, v))
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, dropout, causal, scale=scale
    )


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("groups", [4, 2])
def test_the_flash_kernel_by_the_formula(monkeypatch, causal, groups):
    name = "_scaled_dot_product_flash_attention"
    monkeypatch.setattr(torch.ops.aten, name, _twin)
    monkeypatch.setattr(torch.ops.aten, f"{name}_backward", _twin_grads)
    q, k, v, grad = inputs(21, g=groups)
    block = make_block(q, k, v, SCALE, causal=causal)
    expected, logs = formula(q, k, v, block)
    wanted = torch.autograd.grad(expected, (q, k, v), grad)
    kernel = block_implementations.IMPLEMENTATIONS[0].forward
    with torch.no_grad():
        out, lse = kernel.values(q, k, v, block)
        found = kernel.grads((q, k, v), grad, out, lse, (out * grad).sum(-1), block)
    for ours, theirs in zip((out, lse, *found), (expected, logs, *wanted), strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)
