"""Attention inside sliding windows: every implementation by the formula in fp64, and what it does
not compute."""

import pytest
import torch

from megatron.kernels.attention import IMPLEMENTATIONS, attention, select
from megatron.kernels.attention_spec import AttentionCall, AttentionSpec
from megatron.kernels.cuda import torch_flash
from tests.core.kernels.attention_formula import SCALE, assert_same, cut, documents, formula, inputs

WINDOWS = (1, 2, 4, 21, 40, 63, 64, 65, 150)
CLOSE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 5e-2}


def assert_formula(requested, dtype, window, s=150, d=8, ids=None):
    *tensors, grad = inputs(s, d=d, dtype=dtype)
    spec = AttentionSpec.of(*tensors, SCALE, documents=ids is not None, window=window)
    if requested != "auto" and (why_not := unsupported(requested, spec)):
        pytest.skip(why_not)
    assert_same(
        lambda *t: attention(*t, AttentionCall(spec, ids), requested),
        lambda *t: formula(*t, ids, window=window),
        tensors,
        grad,
        rtol=CLOSE[dtype],
        atol=CLOSE[dtype],
    )


def unsupported(name, spec):
    return next(row.supports(spec) for row in IMPLEMENTATIONS if row.name == name)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(
    ("requested", "dtype"),
    [
        ("plain", torch.float64),
        ("chunked", torch.float64),
        ("chunked", torch.float32),
        ("cpp_fp32", torch.float32),
        ("sdpa", torch.float32),
        ("auto", torch.float64),
        ("auto", torch.float32),
    ],
)
def test_by_the_formula(requested, dtype, window):
    assert_formula(requested, dtype, window)


@pytest.mark.parametrize("window", WINDOWS)
def test_bf16(window):
    assert_formula("cpp_bf16", torch.bfloat16, window, d=32)
    assert_formula("cpp_bf16", torch.bfloat16, window, d=32, ids=cut(150))


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("requested", ["plain", "chunked"])
def test_inside_documents(requested, window):
    """Windows that begin before a document, inside it, and an id that comes again."""
    for ids in (cut(150), documents(150)):
        assert_formula(requested, torch.float64, window, ids=ids)


@pytest.mark.parametrize("window", [5, 64, 200])
def test_chunks_with_dropout_repeat_their_mask(window):
    q, k, v, grad = inputs(150)
    call = AttentionCall(AttentionSpec.of(q, k, v, SCALE, dropout=0.3, window=window), None, 7)
    out, again = (attention(q, k, v, call) for _ in range(2))
    assert torch.equal(out, again)
    plain = AttentionSpec.of(q, k, v, SCALE, window=window)
    assert not torch.equal(out, attention(q, k, v, AttentionCall(plain)))
    eye = torch.eye(150, dtype=torch.float64)[:, None, None].expand(-1, 2, 2, -1)
    q, k = (torch.cat((t, torch.zeros(150, 2, t.shape[2], 142)), -1).double() for t in (q, k))
    spec = AttentionSpec.of(q, k, eye, SCALE, dropout=0.3, window=window)
    seen = attention(q, k, eye, AttentionCall(spec, None, 7)).sum(-1) > 0
    assert 0 < seen.double().mean() <= 1


def test_what_is_outside_is_not_scored(monkeypatch):
    """Chunks multiply a block of rows with the keys of its windows alone."""
    scored = []
    bmm = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b: scored.append(b.shape[-1]) or bmm(a, b))
    q, k, v, _ = inputs(1024, n=2, g=1, d=4)
    with torch.no_grad():
        spec = AttentionSpec.of(q, k, v, SCALE, window=100)
        attention(q, k, v, AttentionCall(spec), "chunked")
    assert max(scored) == 64 + 99


def test_what_takes_windows():
    q, k, v, _ = inputs(dtype=torch.float32)
    spec = AttentionSpec.of(q, k, v, SCALE, window=4)
    taking = {row.name for row in IMPLEMENTATIONS if "window" in row.takes}
    assert taking == {row.name for row in IMPLEMENTATIONS}
    assert select(spec).implementation.name in ("cpp_fp32", "chunked")


def test_flash_is_told_of_the_window(monkeypatch):
    """W positions are W - 1 before each one, forward and backward."""
    told = []
    forward = torch.ops.aten._flash_attention_forward
    backward = torch.ops.aten._flash_attention_backward

    def noting(call):
        def noted(*args, **options):
            told.append((options.get("window_size_left"), options.get("window_size_right")))
            return call(*args, **options)

        return noted

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", noting(forward))
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", noting(backward))
    q, k, v = (
        torch.empty(64, 2, n, 16, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for n in (4, 2, 2)
    )
    for window, expected in ((5, (4, 0)), (None, (None, None))):
        call = AttentionCall(AttentionSpec.of(q, k, v, SCALE, window=window))
        out = torch_flash.flash_attention(q, k, v, call)
        torch.autograd.grad(out, (q, k, v), torch.empty_like(out))
        assert told == [expected] * 2
        told.clear()
