"""Causal attention against the plain formula in fp64: groups, documents, dropout, formats,
memory."""

import math

import pytest
import torch
import torch.nn.functional as F

from megatron.kernels import attention as selection
from megatron.kernels import block_attention as module
from megatron.kernels import linear
from megatron.kernels.attention_spec import AttentionCall, AttentionSpec
from tests.core.kernels.attend import attention, block, select_attention
from tests.core.kernels.attention_formula import SCALE, assert_same, documents, formula, inputs
from tests.live_memory import LiveMemory

CPU = torch.device("cpu")


def dropout_factors(q, k, **options) -> torch.Tensor:
    """The dropout factors [b, n, s, s] of a call: with the identity for values it returns its
    probabilities."""
    s, b, _, _ = q.shape
    g = k.shape[2]
    q, k = (
        torch.cat((t.detach(), torch.zeros(*t.shape[:-1], s - t.shape[-1], dtype=t.dtype)), -1)
        for t in (q, k)
    )
    eye = torch.eye(s, dtype=q.dtype).view(s, 1, 1, s).expand(s, b, g, s)
    dropped, whole = (
        attention(q, k, eye, scale=SCALE, **{**options, **extra}).permute(1, 2, 0, 3)
        for extra in ({}, {"dropout_p": 0.0, "implementation": "chunked"})
    )
    return torch.where(whole > 0, dropped / whole, 0)


@pytest.fixture(params=[(64, 1 << 18), (8, 8 * 21 * 3)], ids=["few blocks", "many blocks"])
def blocks(request, monkeypatch):
    """The real block sizes, and ones that cut 21 rows and the heads of these tests unevenly."""
    monkeypatch.setattr(module, "QUERY_ROWS", request.param[0])
    monkeypatch.setattr(module, "SCRATCH_ELEMENTS", request.param[1])


@pytest.mark.parametrize("heads, groups", [(4, 4), (4, 2), (6, 2), (3, 1)])
@pytest.mark.parametrize("s", [1, 7, 21])
def test_plain_causal_attention_is_the_formula(blocks, s, heads, groups):
    *tensors, grad = inputs(s=s, n=heads, g=groups)
    assert_same(
        lambda *t: attention(*t, scale=SCALE), formula, tensors, grad, rtol=1e-12, atol=1e-13
    )


@pytest.mark.parametrize("dtype, expanded", [(torch.float32, True), (torch.bfloat16, False)])
def test_groups_in_fp32_on_cuda(monkeypatch, dtype, expanded):
    """No fused kernel takes them: keys and values get a head for each query head."""
    called = []
    torchs = F.scaled_dot_product_attention

    def sdpa(q, k, v, *, enable_gqa, **options):
        called.append((k.shape[1], v.shape[1], enable_gqa))
        return torchs(q, k, v, enable_gqa=enable_gqa, **options)

    monkeypatch.setattr(selection.devices, "kernels_of", lambda _: "cuda")
    monkeypatch.setattr(F, "scaled_dot_product_attention", sdpa)
    *tensors, grad = inputs(n=6, g=2, dtype=dtype)
    near = 1e-5 if expanded else 3e-2
    assert_same(
        lambda *t: attention(*t, scale=SCALE, implementation="sdpa"),
        formula,
        tensors,
        grad,
        rtol=near,
        atol=near,
    )
    assert called == [(6, 6, False) if expanded else (2, 2, True)]


@pytest.mark.parametrize("implementation", ["sdpa", "chunked", "plain", "auto"])
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("s", [21, 130, 300])
def test_both_implementations_in_fp32(implementation, groups, s):
    *tensors, grad = inputs(s=s, g=groups, dtype=torch.float32)
    assert_same(
        lambda *t: attention(*t, scale=SCALE, implementation=implementation),
        formula,
        tensors,
        grad,
        rtol=1e-4,
        atol=2e-5,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("implementation", ["sdpa", "chunked", "plain", "auto"])
def test_low_precision_is_near_the_formula(implementation, dtype):
    *tensors, grad = inputs(s=70, dtype=dtype)
    unit = torch.finfo(dtype).eps
    assert_same(
        lambda *t: attention(*t, scale=SCALE, implementation=implementation),
        formula,
        tensors,
        grad,
        rtol=2 * unit,
        atol=4 * unit,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_chunks_round_once(dtype):
    *tensors, grad = inputs(s=70, dtype=dtype)
    assert_same(
        lambda *t: attention(*t, scale=SCALE, implementation="chunked"),
        formula,
        tensors,
        grad,
        rtol=torch.finfo(dtype).eps * 0.501,
        atol=2e-6,
    )


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("implementation", ["auto", "plain"])
def test_document_masks_are_exact(blocks, groups, implementation):
    *tensors, grad = inputs(g=groups)
    ids = documents(21)
    assert_same(
        lambda *t: attention(*t, scale=SCALE, document_ids=ids, implementation=implementation),
        lambda *t: formula(*t, ids),
        tensors,
        grad,
        rtol=1e-12,
        atol=1e-13,
    )


def test_one_document_is_plain_attention(blocks):
    q, k, v, _ = inputs()
    ids = torch.zeros(2, 21, dtype=torch.int32)
    torch.testing.assert_close(
        attention(q, k, v, scale=SCALE, document_ids=ids), attention(q, k, v, scale=SCALE)
    )


@pytest.mark.parametrize("implementation", ["sdpa", "chunked", "plain"])
def test_no_position_sees_a_later_one(implementation):
    q, k, v, _ = inputs(s=140, dtype=torch.float32)
    before = attention(q, k, v, scale=SCALE, implementation=implementation)
    for i in (0, 63, 64, 100, 138):
        changed = [t.detach().clone() for t in (k, v)]
        for t in changed:
            t[i + 1 :] = 50.0
        after = attention(q, *changed, scale=SCALE, implementation=implementation)
        torch.testing.assert_close(after[: i + 1], before[: i + 1], rtol=1e-6, atol=1e-6)
        assert not torch.equal(after[i + 1], before[i + 1])


def test_no_position_sees_another_document():
    q, k, v, _ = inputs(s=140)
    ids = (torch.arange(140) >= 70).long().expand(2, 140)
    before = attention(q, k, v, scale=SCALE, document_ids=ids)
    changed = [t.detach().clone() for t in (k, v)]
    for t in changed:
        t[:70] = 1e3
    assert torch.equal(attention(q, *changed, scale=SCALE, document_ids=ids)[70:], before[70:])


def test_key_blocks_of_other_documents_are_not_computed():
    q, k, v, _ = inputs(s=256, b=1)
    ids = (torch.arange(256) // 64).view(1, 256)
    plan = module._Plan(q, k, block(q, k, k, SCALE, causal=True, query_ids=ids, key_ids=ids))
    assert [(found.rows, found.keys) for found in plan.row_blocks((0, 1))] == [
        (slice(start, start + 64),) * 2 for start in range(0, 256, 64)
    ]


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("implementation", ["auto", "plain"])
def test_dropout_zeroes_probabilities_and_scales_the_others(blocks, groups, masked, implementation):
    q, k, v, grad = inputs(g=groups)
    options = {
        "dropout_p": 0.3,
        "dropout_seed": 12,
        "document_ids": documents(21) if masked else None,
        "implementation": implementation,
    }
    factors = dropout_factors(q, k, **options)
    zero = factors.abs() < 1e-9
    kept = (factors - 1 / 0.7).abs() < 1e-9
    assert (zero | kept).all() and kept.any() and zero[..., 0][:, :, :5].any()
    assert_same(
        lambda *t: attention(*t, scale=SCALE, **options),
        lambda *t: formula(*t, options["document_ids"], factors),
        (q, k, v),
        grad,
        rtol=1e-11,
        atol=1e-12,
    )


def test_the_dropout_rate_is_p():
    q, k, _, _ = inputs(s=200, dtype=torch.float64)
    seen = torch.ones(200, 200).tril().bool().expand(2, 4, 200, 200)
    kept = (dropout_factors(q, k, dropout_p=0.1, dropout_seed=3)[seen] > 0).double()
    assert abs(kept.mean().item() - 0.9) < 5 * (0.09 / len(kept)) ** 0.5


@pytest.mark.parametrize("masked", [False, True])
def test_gradcheck_with_dropout(monkeypatch, masked):
    monkeypatch.setattr(module, "QUERY_ROWS", 3)
    q, k, v, _ = inputs(s=7, n=2, g=1, d=2)
    ids = documents(7) if masked else None
    assert torch.autograd.gradcheck(
        lambda *t: attention(*t, scale=SCALE, dropout_p=0.2, dropout_seed=5, document_ids=ids),
        (q, k, v),
    )


def test_dropout_is_a_pure_function_of_the_seed():
    q, k, v, _ = inputs(dtype=torch.float32)
    call = lambda seed: attention(q, k, v, scale=SCALE, dropout_p=0.5, dropout_seed=seed)  # noqa: E731
    first = call(1)
    state = torch.random.get_rng_state()
    assert not torch.equal(call(2), first)
    assert torch.equal(call(1), first)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_ids_that_the_host_has_not_read_mask_as_well(monkeypatch):
    q, k, v, grad = inputs(s=200, dtype=torch.float64)
    ids = (torch.arange(200) // 70).expand(q.shape[1], 200)

    def run():
        leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
        out = attention(*leaves, scale=SCALE, document_ids=ids)
        out.backward(grad)
        return out.detach(), *(t.grad for t in leaves)

    read = run()
    monkeypatch.setattr(module, "read_ids", lambda device: False)
    for got, expected in zip(run(), read, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    "options",
    [
        {"implementation": "sdpa"},
        {"implementation": "chunked"},
        {"dropout_p": 0.1, "dropout_seed": 1},
        {"document_ids": (torch.arange(1024) // 600).view(1, 1024)},
    ],
    ids=["sdpa", "chunked", "dropout", "documents"],
)
@pytest.mark.parametrize("groups", [1, 2])
def test_nothing_of_size_s_by_s_is_ever_made(options, groups):
    s = 1024
    q, k, v, grad = inputs(s=s, b=1, n=2, g=groups, d=4, dtype=torch.float32)
    with LiveMemory() as memory:
        torch.autograd.grad(attention(q, k, v, scale=SCALE, **options), (q, k, v), grad)
    assert max(map(math.prod, memory.shapes)) <= s * s // 4


@pytest.mark.parametrize(
    "dtype, dropout, masked, word",
    [
        (torch.float32, 0.1, False, "dropout"),
        (torch.float32, 0.0, True, "document"),
        (torch.float64, 0.0, False, "fp64"),
    ],
)
def test_sdpa_is_refused_where_it_would_need_an_s_by_s_tensor(dtype, dropout, masked, word):
    with pytest.raises(ValueError, match=rf"'sdpa': .*{word}"):
        select_attention(CPU, dtype, dropout, masked, "sdpa")
    assert select_attention(CPU, dtype, dropout, masked)[0] == "chunked"


def test_requests_that_make_no_sense_are_refused():
    q, k, v, _ = inputs()
    with pytest.raises(ValueError, match="'fast'"):
        attention(q, k, v, scale=SCALE, implementation="fast")
    with pytest.raises(ValueError, match="needs dropout_seed"):
        attention(q, k, v, scale=SCALE, dropout_p=0.1)


@pytest.mark.parametrize("native, chosen", [(True, "sdpa"), (False, "chunked")])
def test_emulated_low_precision_goes_through_fp32_chunks(
    monkeypatch, no_vector_attention, native, chosen
):
    monkeypatch.setattr(selection, "low_precision_is_native", lambda *_: native)
    assert select_attention(CPU, torch.bfloat16, 0.0, False)[0] == chosen
    assert select_attention(torch.device("cuda"), torch.bfloat16, 0.0, False)[0] == chosen
    assert linear.low_precision_is_native("cuda", torch.bfloat16)


@pytest.mark.parametrize("width", [3, 13])
@pytest.mark.parametrize("with_documents", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_values_of_another_width_than_keys(blocks, dtype, with_documents, width):
    q, k, _, _ = inputs(dtype=dtype)
    generator = torch.Generator().manual_seed(2)
    v = torch.randn(21, 2, 2, width, generator=generator, dtype=torch.float64).to(dtype)
    grad = torch.randn(21, 2, 4, width, generator=generator, dtype=torch.float64).to(dtype)
    ids = documents(21) if with_documents else None
    spec = AttentionSpec.of(q, k, v, SCALE, documents=with_documents)
    able = {each.name for each in selection.IMPLEMENTATIONS if each.supports(spec) is None}
    assert able - {"cpp_fp32"} == {"chunked", "plain"} | (
        {"sdpa"} if not spec.documents and dtype == torch.float32 else set()
    )
    close = 1e-11 if dtype == torch.float64 else 1e-5
    for requested in ("auto", *able):
        assert_same(
            lambda *t, name=requested: selection.attention(*t, AttentionCall(spec, ids), name),
            lambda *t: formula(*t, ids),
            (q, k, v.detach().requires_grad_()),
            grad,
            rtol=close,
            atol=close,
        )
