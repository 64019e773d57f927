"""The adapters of flash-attn, apex and Transformer Engine against our own kernels, over stand-ins
that compute plainly."""

import sys

import pytest
import torch

from megatron.config.parallel import ParallelConfig
from megatron.kernels import (
    cu_seqlens,
    flash_attention,
    transformer_engine,
    weight_grads,
)
from megatron.kernels import libraries as load_problems
from megatron.kernels.attention_spec import AttentionCall, AttentionSpec
from megatron.kernels.cuda import apex
from megatron.kernels.kernels import Kernels
from megatron.parallel.context import ParallelContext
from megatron.parallel.ddp import GradBuffers
from tests.core.kernels import fake_libraries as fakes
from tests.core.kernels import functional
from tests.core.kernels.attention_formula import SCALE, assert_same, cut, formula, inputs
from tests.core.model.tiny import MODELS, loss_and_grads, tiny_model, tokens

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
CLOSE = dict(rtol=1e-10, atol=1e-12)


def test_where_documents_begin():
    ids = torch.tensor([[4, 4, 7, 7], [7, 7, 7, 2]])
    assert cu_seqlens.cumulative_lengths(ids).tolist() == [0, 2, 4, 7, 8]
    assert cu_seqlens.cumulative_lengths(ids) is cu_seqlens.cumulative_lengths(ids)
    assert cu_seqlens.cumulative_lengths(ids).dtype == torch.int32


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("with_documents", [False, True])
@pytest.mark.parametrize("window", [None, 1, 5])
def test_flash_attn_is_the_formula(libraries, groups, with_documents, window):
    *tensors, grad = inputs(g=groups)
    ids = cut(21) if with_documents else None
    spec = AttentionSpec.of(*tensors, SCALE, window=window)
    assert_same(
        lambda *t: flash_attention.flash_attention(*t, AttentionCall(spec, ids)),
        lambda *t: formula(*t, ids=ids, window=window),
        tensors,
        grad,
        **CLOSE,
    )
    assert [name for name, _ in libraries] == [
        "flash_attn_varlen_func" if with_documents else "flash_attn_func"
    ]


def test_deterministic_mode_reaches_flash_attn(libraries):
    q, k, v, _ = inputs()
    call = AttentionCall(AttentionSpec.of(q, k, v, SCALE))
    torch.use_deterministic_algorithms(True)
    try:
        flash_attention.flash_attention(q, k, v, call)
    finally:
        torch.use_deterministic_algorithms(False)
    flash_attention.flash_attention(q, k, v, call)
    assert [more["deterministic"] for _, more in libraries] == [True, False]


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("with_documents", [False, True])
@pytest.mark.parametrize("window", [None, 1, 5])
def test_transformer_engines_attention_is_the_formula(libraries, groups, with_documents, window):
    *tensors, grad = inputs(g=groups)
    ids = cut(21) if with_documents else None
    spec = AttentionSpec.of(*tensors, SCALE, documents=with_documents, window=window)
    attention = transformer_engine.TransformerEngine().attention(spec)
    assert_same(
        lambda *t: attention(*t, AttentionCall(spec, ids)),
        lambda *t: formula(*t, ids=ids, window=window),
        tensors,
        grad,
        **CLOSE,
    )


def test_apex_norms_and_weight_gradient(libraries):
    generator = torch.Generator().manual_seed(3)
    x, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((5, 8), (8,), (8,)))
    torch.testing.assert_close(
        apex.layer_norm(x, weight, bias, 1e-5), functional.layer_norm(x, weight, bias, 1e-5)
    )
    torch.testing.assert_close(apex.rms_norm(x, weight, 1e-5), functional.rms_norm(x, weight, 1e-5))
    x = x.bfloat16()
    grad = torch.randn(5, 3, generator=generator).bfloat16()
    total = torch.ones(3, 8)
    wanted = functional.linear_weight_grad(grad, x, accumulate_into=torch.ones(3, 8))
    apex.accumulate_weight_grad(x, grad, total)
    torch.testing.assert_close(total, 1 + grad.float().t() @ x.float())
    assert wanted is None


def test_apex_gets_rows_without_gaps(libraries):
    """Its kernel reads addresses and knows no strides; a part of a wider tensor has others."""
    generator = torch.Generator().manual_seed(3)
    wide_x, wide_grad = (torch.randn(5, 16, generator=generator).bfloat16() for _ in range(2))
    for x, grad in (
        (wide_x[:, :8], wide_grad[:, 4:7]),
        (wide_x[:, ::2], wide_grad[:, ::4]),
        (wide_x[:4, :4].t(), wide_grad[:4, :3]),
    ):
        total = torch.ones(grad.shape[1], x.shape[1])
        apex.accumulate_weight_grad(x, grad, total)
        torch.testing.assert_close(total, 1 + grad.float().t() @ x.float())


def test_the_weight_gradient_goes_through_apex_where_it_can(libraries, monkeypatch):
    monkeypatch.setattr(load_problems, "cuda_only", lambda device: None)
    monkeypatch.setattr(apex, "gradient_unavailable_reason", lambda *_: None)
    weight_grads._adder.cache_clear()
    seen = []
    monkeypatch.setattr(
        apex,
        "accumulate_weight_grad",
        lambda *tensors: seen.append([tuple(t.shape) for t in tensors]),
    )
    functional.linear_weight_grad(
        torch.ones(2, 5, 3), torch.ones(2, 5, 8), accumulate_into=torch.zeros(3, 8)
    )
    weight_grads._adder.cache_clear()
    assert seen == [[(10, 8), (10, 3), (3, 8)]]
    assert functional.linear_weight_grad(torch.ones(2, 3), torch.ones(2, 8)) is not None


@pytest.mark.parametrize("flags", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize(
    "kernels", ["transformer_engine", "transformer_engine, own attention", "apex"]
)
def test_a_model_of_library_kernels_is_our_model(libraries, monkeypatch, flags, kernels):
    made = {
        "transformer_engine": Kernels(
            "transformer_engine",
            transformer_engine=transformer_engine.TransformerEngine(accumulate=False),
        ),
        "transformer_engine, own attention": Kernels(
            transformer_engine=transformer_engine.TransformerEngine(accumulate=False)
        ),
        "apex": Kernels(),
    }[kernels]
    ours = tiny_model(torch.float64, scramble=True, **flags)
    if kernels == "apex":
        monkeypatch.setattr(load_problems, "cuda_only", lambda device: None)
        monkeypatch.setattr(apex, "unavailable_reason", lambda *_: None)
    theirs = tiny_model(torch.float64, scramble=True, kernels=made, **flags)
    ids = cut(16)
    for more in ({}, {"document_ids": ids}):
        loss, grads = loss_and_grads(ours, **more)
        their_loss, their_grads = loss_and_grads(theirs, **more)
        torch.testing.assert_close(their_loss, loss, rtol=1e-9, atol=1e-11)
        assert their_grads.keys() == grads.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(their_grads[name], grad, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("accumulate", [True, False])
def test_weight_gradients_of_micro_batches_come_together_where_they_lie(libraries, accumulate):
    made = Kernels(
        "transformer_engine", transformer_engine=transformer_engine.TransformerEngine(accumulate)
    )
    ids, labels = tokens()
    sums = []
    for kernels in (None, made, Kernels(accumulation=False)):
        model = tiny_model(torch.float64, kernels=kernels, swiglu=True)
        buffers = GradBuffers(model.parameters(), ParallelContext(ParallelConfig()), torch.float64)
        buffers.zero(2)
        for _ in range(2):
            model(ids, labels=labels).mean().backward()
        sums.append(buffers.flat)
    assert sums[0].any()
    for other in sums[1:]:
        torch.testing.assert_close(other, sums[0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("recipe", "kind"), [("tensorwise", "Float8CurrentScaling"), ("delayed", "DelayedScaling")]
)
def test_fp8_surrounds_the_transformer_layers(libraries, recipe, kind):
    fp8 = transformer_engine.Fp8(
        "hybrid", recipe, margin=1, amax_history_len=5, amax_compute_algo="max"
    )
    plain, wide = (
        Kernels(
            "transformer_engine",
            transformer_engine=transformer_engine.TransformerEngine(False, one),
        )
        for one in (None, fp8)
    )
    loss, _ = loss_and_grads(tiny_model(kernels=plain))
    assert libraries == []
    rounded, _ = loss_and_grads(tiny_model(kernels=wide))
    [(name, more)] = libraries
    assert (
        name == "autocast" and more["recipe"].kind == kind and more["recipe"].fp8_format == "hybrid"
    )
    if recipe == "delayed":
        # one rank has no group: Transformer Engine must not reduce over all ranks instead
        assert more["recipe"].reduce_amax is False
        assert (
            more["recipe"].margin,
            more["recipe"].amax_history_len,
            more["recipe"].amax_compute_algo,
        ) == (1, 5, "max")
    assert not torch.equal(loss, rounded)
    torch.testing.assert_close(rounded, loss, rtol=0.02, atol=0)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: load_problems.transformer_engine_unavailable_reason(CUDA, torch.bfloat16),
            f"not installed; {load_problems.INSTALL_TRANSFORMER_ENGINE}",
        ),
        (
            lambda: load_problems.transformer_engine_unavailable_reason(CUDA, torch.float64),
            "no fp64",
        ),
        (
            lambda: load_problems.transformer_engine_unavailable_reason(CPU, torch.bfloat16),
            "CUDA device",
        ),
        (
            lambda: flash_attention.unavailable_reason(torch.bfloat16, 64),
            "pip install flash-attn",
        ),
        (lambda: flash_attention.unavailable_reason(torch.float32, 64), "fp16 and bf16 only"),
        (lambda: flash_attention.unavailable_reason(torch.bfloat16, 512), "at most 256"),
        (lambda: apex.unavailable_reason(torch.bfloat16), "github.com/NVIDIA/apex"),
        (lambda: load_problems.cuda_only(CPU), "CUDA device"),
        (lambda: apex.unavailable_reason(torch.float64), "not for fp64"),
        (
            lambda: apex.gradient_unavailable_reason(torch.bfloat16, torch.float32),
            "fused_weight_gradient_mlp_cuda of apex",
        ),
        (
            lambda: apex.gradient_unavailable_reason(torch.float32, torch.float32),
            "bf16 or fp16 weights",
        ),
    ],
)
def test_what_keeps_a_library_from_running(monkeypatch, call, words):
    monkeypatch.setattr(load_problems, "find_spec", lambda name: None)
    load_problems.load_problem.cache_clear()
    assert words in call()
    load_problems.load_problem.cache_clear()


def test_a_library_whose_extension_does_not_load_is_not_there(monkeypatch, tmp_path):
    """After an upgrade of torch: the package is found, and its import fails."""
    (tmp_path / "flash_attn.py").write_text("raise ImportError('undefined symbol: _ZN3c10')")
    (tmp_path / "fused_layer_norm_cuda.py").write_text("raise OSError('libcudart.so.12')")
    monkeypatch.syspath_prepend(str(tmp_path))
    load_problems.load_problem.cache_clear()
    reason = flash_attention.unavailable_reason(torch.bfloat16, 64)
    assert "undefined symbol" in reason
    assert "libcudart" in apex.unavailable_reason(torch.bfloat16)
    load_problems.load_problem.cache_clear()


def test_flash_attn_4_alone_is_not_flash_attn(monkeypatch, tmp_path):
    """Its modules lie in the same namespace."""
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    load_problems.load_problem.cache_clear()
    assert "not installed" in flash_attention.unavailable_reason(torch.bfloat16, 64)
    load_problems.load_problem.cache_clear()
    del sys.modules["flash_attn"]


def test_libraries_that_are_there_may_run(libraries):
    assert load_problems.transformer_engine_unavailable_reason(CUDA, torch.bfloat16) is None
    assert flash_attention.unavailable_reason(torch.float16, 128) is None
    assert apex.unavailable_reason(torch.float32) is None
    assert apex.gradient_unavailable_reason(torch.bfloat16, torch.float32) is None
    transformer_engine.load()


def test_a_broken_library_is_one_clear_error(monkeypatch):
    broken = fakes.module("transformer_engine")
    monkeypatch.setitem(sys.modules, "transformer_engine", broken)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)
    with pytest.raises(
        ValueError, match="transformer_engine.pytorch.*; pip install --no-build-isolation '"
    ):
        transformer_engine.load()
