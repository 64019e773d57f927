"""Attention sinks and soft caps: every implementation by the formula in fp64, and what it does not
compute."""

import pytest
import torch

from megatron.kernels import attention_spec, block_implementations
from megatron.kernels.attention import IMPLEMENTATIONS, attention, select
from megatron.kernels.attention_spec import AttentionCall, AttentionSpec
from megatron.kernels.cuda import torch_flash
from megatron.kernels.implementation import lacking
from megatron.kernels.reference_attention import CACHED, cached_attention
from tests.core.kernels.attend import Biased
from tests.core.kernels.attention_formula import SCALE, assert_same, cut, documents, formula, inputs
from tests.core.kernels.cuda.flash_on_cpu import mask, on_cpu

CLOSE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 5e-2}
# Large ones too: a sink near 0 is hardly seen (Transformer Engine 3551).
SINKS = torch.tensor([5.0, -5.0, 0.0, 1.3], dtype=torch.float64)
FEATURES = {
    "sinks": (None, True),
    "cap": (0.7, False),
    "a wide cap": (50.0, False),
    "cap and sinks": (0.7, True),
}


def unsupported(name, spec):
    return next(row.supports(spec) for row in IMPLEMENTATIONS if row.name == name)


def assert_formula(requested, dtype, cap, sink, window=None, ids=None, d=8):
    *tensors, grad = inputs(150, d=d, dtype=dtype)
    spec = AttentionSpec.of(
        *tensors, SCALE, documents=ids is not None, window=window, softcap=cap, sink=sink
    )
    if why_not := unsupported(requested, spec):
        assert requested.startswith("cpp") and ("AVX" in why_not or "built" in why_not)
        return
    if sink:
        tensors.append(SINKS.to(dtype, copy=True).requires_grad_())
    assert_same(
        lambda q, k, v, *s: attention(q, k, v, AttentionCall(spec, ids, None, *s), requested),
        lambda q, k, v, *s: formula(
            q, k, v, ids, window=window, softcap=cap, sinks=s[0] if s else None
        ),
        tensors,
        grad,
        rtol=CLOSE[dtype],
        atol=CLOSE[dtype],
    )


@pytest.mark.parametrize(("cap", "sink"), FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("window", [None, 1, 65])
@pytest.mark.parametrize(
    ("requested", "dtype"),
    [
        ("plain", torch.float64),
        ("chunked", torch.float64),
        ("chunked", torch.float32),
        ("chunked", torch.bfloat16),
        ("cpp_fp32", torch.float32),
        ("cpp_fp32", torch.bfloat16),
    ],
)
def test_by_the_formula(requested, dtype, window, cap, sink):
    assert_formula(requested, dtype, cap, sink, window)


@pytest.mark.parametrize(("cap", "sink"), FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("requested", ["plain", "chunked"])
def test_inside_documents(requested, cap, sink):
    """An id that comes again, too."""
    for ids in (cut(150), documents(150)):
        assert_formula(requested, torch.float64, cap, sink, 40, ids)


@pytest.mark.parametrize("requested", ["plain", "chunked"])
def test_a_sink_leaves_its_share_where_probabilities_are_dropped(requested):
    """The dropped result is that without sinks times the share of the keys."""
    q, k, v, grad = inputs(70)
    plain = AttentionSpec.of(q, k, v, SCALE, dropout=0.3)
    whole = attention(q, k, v, AttentionCall(plain, None, 7), requested)
    ones = torch.ones_like(v)
    bare = AttentionSpec.of(q, k, ones, SCALE, sink=True)
    share = attention(q, k, ones, AttentionCall(bare, sinks=SINKS), "plain")
    spec = AttentionSpec.of(q, k, v, SCALE, dropout=0.3, sink=True)
    out = attention(q, k, v, AttentionCall(spec, None, 7, SINKS), requested)
    torch.testing.assert_close(out, whole * share, rtol=1e-12, atol=1e-13)
    wanted = torch.autograd.grad(whole * share, (q, k, v), grad)
    for got, exact in zip(torch.autograd.grad(out, (q, k, v), grad), wanted, strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize(("p", "masked"), [(0.0, False), (0.3, False), (0.0, True)])
def test_sinks_by_torchs_flash_kernel(groups, p, masked):
    """Its stand-in computes gradients as the kernel does, of result and log-sum-exp as given."""
    *tensors, grad = inputs(g=groups)
    ids = cut(21) if masked else None
    spec = AttentionSpec.of(*tensors, SCALE, dropout=p, documents=masked, sink=True)
    factors = mask(p, 9, (2, 4, 21, 21)) if p else None
    with on_cpu():
        assert_same(
            lambda q, k, v, s: torch_flash.flash_attention(q, k, v, AttentionCall(spec, ids, 9, s)),
            lambda q, k, v, s: formula(q, k, v, ids, factors, sinks=s),
            [*tensors, SINKS.clone().requires_grad_()],
            grad,
            rtol=1e-12,
            atol=1e-13,
        )


def test_what_takes_them():
    taking = {
        feature: {row.name for row in IMPLEMENTATIONS if feature in row.takes}
        for feature in ("sink", "softcap")
    }
    assert taking["sink"] == {"cpp_fp32", "torch_flash", "chunked", "plain"}
    assert taking["softcap"] == {"cpp_fp32", "chunked", "plain", "flash"}
    q, k, v, _ = inputs(dtype=torch.float32)
    capped = AttentionSpec.of(q, k, v, SCALE, softcap=2.0)
    assert select(capped).implementation.name in ("cpp_fp32", "chunked")
    for name in ("cpp_bf16", "sdpa"):
        with pytest.raises(ValueError, match="soft-capped scores"):
            attention(q, k, v, AttentionCall(capped), name)


def test_an_option_that_no_implementation_names_is_refused_by_all(monkeypatch):
    monkeypatch.setitem(attention_spec.FEATURES, "bias", "biases of scores")
    q, k, v, _ = inputs(dtype=torch.float32)
    spec = Biased.of(q, k, v, SCALE)
    assert spec.features == {"bias": "biases of scores"}
    for row in (*IMPLEMENTATIONS, *block_implementations.IMPLEMENTATIONS):
        assert row.supports(spec) == "does not support biases of scores"
    assert lacking(spec, CACHED)
    with pytest.raises(ValueError, match="biases of scores"):
        attention(q, k, v, AttentionCall(spec))


@pytest.mark.parametrize(("cap", "sink"), FEATURES.values(), ids=FEATURES)
def test_of_a_cache_some_queries_at_a_time(cap, sink, monkeypatch):
    q, k, v, _ = inputs(23)
    sinks = SINKS if sink else None
    spec = AttentionSpec.of(q, k, v, SCALE, softcap=cap, sink=sink)
    call = AttentionCall(spec, sinks=sinks)
    keys, values = (t.permute(1, 2, 0, 3) for t in (k, v))
    visible = torch.ones(23, 23, dtype=torch.bool).tril().triu(-6).expand(2, 1, -1, -1)
    with torch.no_grad():
        for window, seen, causal in ((None, None, True), (7, visible, False)):
            exact = formula(q, k, v, window=window, softcap=cap, sinks=sinks)
            for scores in (1, 4 * 2 * 23 * 5, 1 << 24):
                monkeypatch.setattr("megatron.kernels.reference_attention.SCORES", scores)
                out = cached_attention(q, keys, values, seen, causal, call)
                torch.testing.assert_close(out, exact, rtol=1e-12, atol=1e-13)
