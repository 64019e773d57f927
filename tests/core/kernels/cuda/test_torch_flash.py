"""Torch's flash kernel with dropout and documents, by its stand-in on the CPU."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron import cuda
from megatron.arguments import config_from
from megatron.config.tree import Config
from megatron.kernels import cu_seqlens, libraries, select
from megatron.kernels import flash_attention as flash_package
from megatron.kernels.attention_spec import AttentionCall, AttentionSpec
from megatron.kernels.cuda import torch_flash
from megatron.kernels.qkv import split_qkv
from tests.core.kernels.attend import attention as attend
from tests.core.kernels.attend import select_attention
from tests.core.kernels.attention_formula import SCALE, assert_same, cut, formula, inputs
from tests.core.kernels.cuda.flash_on_cpu import CALLS, mask, on_cpu
from tests.core.kernels.cuda.launches import Launches
from tests.core.kernels.functional import apply_rotary

CUDA = torch.device("cuda", 0)


def flash(q, k, v, dropout=0.0, seed=None, document_ids=None):
    spec = AttentionSpec.of(q, k, v, SCALE, dropout=dropout, documents=document_ids is not None)
    return torch_flash.flash_attention(q, k, v, AttentionCall(spec, document_ids, seed))


@pytest.fixture(scope="module", autouse=True)
def stand_in():
    with on_cpu():
        yield


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("masked", [False, True])
def test_it_is_the_formula(groups, masked):
    tensors = inputs(g=groups)
    ids = cut(21) if masked else None
    assert_same(
        lambda *t: flash(*t, document_ids=ids),
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
        out = flash(*tensors, 0.5, seed, ids)
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
    factors = mask(0.3, 9, (2, 4, 21, 21))
    assert_same(
        lambda *t: flash(*t, 0.3, 9),
        lambda *t: formula(*t, None, factors),
        tensors,
        grad,
        rtol=1e-12,
        atol=1e-13,
    )


@pytest.mark.parametrize("samples, moves", [(1, 0), (2, 8)])
def test_documents_cost_one_pass_over_each_tensor(samples, moves):
    """Queries, keys, values, the result and four gradients, by the kernel of 16-byte loads; none
    with a sample in a micro-batch, and none of what rotary positions have placed."""
    ids = cu_seqlens.with_lengths(*[torch.zeros(samples, 8, dtype=torch.long, device="meta")] * 2)
    with Launches() as launches:
        qkv = torch.empty(8, samples, 4, 3, 16, dtype=torch.bfloat16, device="meta")
        out = flash(*split_qkv(qkv.requires_grad_(), 1), document_ids=ids)
        out.flatten(2).backward(torch.empty(8, samples, 64, dtype=torch.bfloat16, device="meta"))
    assert launches.names.count("move") == moves
    assert not {"copy_", "clone", "_to_copy"} & set(launches.names)
    tables = [torch.empty(8, 8, device="meta") for _ in range(2)]
    with Launches() as launches:
        q, k, v = split_qkv(qkv, 1)
        q, k = (apply_rotary(t, *tables, batch_first=True) for t in (q, k))
        flash(q, k, v, document_ids=ids).flatten(2)
    assert launches.names.count("move") == (0 if samples == 1 else 2)


def test_recompute_repeats_the_mask():
    *tensors, grad = inputs()
    call = lambda *t: flash(*t, 0.5, 9)  # noqa: E731
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
    monkeypatch.setattr(cuda, "has_flash", lambda device: new)
    options = (dropout, masked, "auto", 1024, head_dim)
    assert select_attention(CUDA, dtype, *options)[0] == chosen
    assert select_attention(CUDA, dtype, 0.0, False, "auto", 1024, head_dim)[0] == "sdpa"
    assert select_attention(CUDA, dtype, dropout, masked, "chunked", 1024, head_dim)[0] == "chunked"
    assert select_attention(torch.device("cpu"), torch.float32, *options)[0] == "chunked"
    if chosen == "chunked":
        with pytest.raises(ValueError, match="'torch_flash'"):
            select_attention(CUDA, dtype, dropout, masked, "torch_flash", 1024, head_dim)


def test_layers_with_dropout_or_documents_reach_it(monkeypatch):
    monkeypatch.setattr(libraries, "cuda_only", lambda device: None)
    monkeypatch.setattr(torch_flash, "unavailable_reason", lambda *_: None)
    q, k, v, _ = inputs(dtype=torch.float32)
    CALLS.clear()
    attend(q, k, v, scale=SCALE, dropout_p=0.1, dropout_seed=1)
    attend(q, k, v, scale=SCALE, document_ids=cut(21))
    attend(q, k, v, scale=SCALE)
    with pytest.raises(ValueError, match="dropout_seed"):
        attend(q, k, v, scale=SCALE, dropout_p=0.1)
    assert CALLS == [(4, 0.1), (3, 0.0)]


def test_a_cuda_device_is_asked_for_its_generator(monkeypatch):
    asked = [torch.Generator() for _ in range(2)]
    monkeypatch.setattr(torch.cuda, "default_generators", asked)
    before = [one.get_state() for one in asked]
    with cuda.kernel_seed(torch.device("cuda", 1), 77):
        assert asked[1].initial_seed() == 77
    assert all(torch.equal(one.get_state(), two) for one, two in zip(asked, before, strict=True))


@pytest.fixture
def newer(monkeypatch):
    """Torch's registry of flash kernels, which has the `installed` ones; results by the one that is
    active, or its error."""
    fake = SimpleNamespace(
        active=None, tried=[], error=None, result=1.01, installed={"FA3": True, "FA4": True}
    )

    def activate(name):
        fake.tried.append(name)
        if not fake.installed[name]:
            raise ModuleNotFoundError("No module named 'flash_attn'")
        fake.active = name

    def sample(*_):
        if fake.active and fake.error:
            raise fake.error
        return [torch.full((2,), fake.result if fake.active else 1.0)]

    monkeypatch.setattr(torch_flash, "activate_flash_attention_impl", activate)
    monkeypatch.setattr(
        torch_flash, "restore_flash_attention_impl", lambda **_: setattr(fake, "active", None)
    )
    monkeypatch.setattr(torch_flash, "_sample", sample)
    monkeypatch.setattr(cuda, "has_flash", lambda device: True)
    torch_flash.newer_kernels.cache_clear()
    yield fake
    torch_flash.newer_kernels.cache_clear()


@pytest.mark.parametrize(
    "error, result, said",
    [
        (None, 1.5, ("results", "results")),
        (RuntimeError("requires 9.0\nmore"), 1.0, ("requires 9.0)", "requires 9.0)")),
        (ImportError("libcudart"), 1.0, ("build hopper/", "flash-attn-4")),
    ],
)
def test_newer_kernels_are_tried_once(newer, error, result, said):
    newer.error = error
    newer.result = result
    for _ in range(2):
        reasons = torch_flash.newer_kernels(CUDA, torch.bfloat16, 4, 2, 64)
        assert list(reasons) == ["FlashAttention-3", "FlashAttention-4"]
        assert all(text in reason for text, reason in zip(said, reasons.values(), strict=True))
    assert newer.tried == ["FA3", "FA4"] and newer.active is None


@pytest.mark.parametrize("missing, active", [((), "FA3"), (("FA3",), "FA4"), (("FA4",), "FA3")])
def test_the_first_newer_kernel_that_runs_stays(newer, missing, active):
    newer.installed |= dict.fromkeys(missing, False)
    reasons = torch_flash.newer_kernels(CUDA, torch.bfloat16, 4, 2, 64)
    assert newer.active == active == newer.tried[-1]
    assert [why_not is None for why_not in reasons.values()][-1] and len(reasons) == len(
        newer.tried
    )


def test_its_trial_runs_documents_forward_and_backward():
    out, *grads = torch_flash._sample(torch.device("cpu"), torch.float64, 4, 2, 8)
    assert [t.shape[2] for t in (out, *grads)] == [4, 4, 2, 2] and out.isfinite().all()


@pytest.mark.parametrize(
    "flags, row",
    [
        ({"reset_attention_mask": True}, None),
        ({"reset_attention_mask": True, "torch_compile": True}, None),
        ({"reset_attention_mask": True, "deterministic_mode": True}, "flash-attn"),
        ({"reset_attention_mask": True, "attention_backend": "flash"}, "flash-attn"),
        ({"reset_attention_mask": True, "attention_dropout": 0.1}, "torch's flash kernel"),
        ({}, "torch's fused attention"),
    ],
)
@pytest.mark.parametrize("name, title", [("FA3", "FlashAttention-3"), ("FA4", "FlashAttention-4")])
def test_when_a_newer_kernel_is_selected(newer, monkeypatch, flags, row, name, title):
    newer.installed = {"FA3": False, "FA4": False, name: True}
    monkeypatch.setattr(flash_package, "unavailable_reason", lambda *_: None)
    shape = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "attention_dropout": 0.0}
    config = config_from(Config, shape | {"seq_length": 64} | flags)
    kernels = select.choose_kernels(CUDA, torch.bfloat16, config)
    rows = select._attention_rows(CUDA, torch.bfloat16, config, kernels)
    assert next(one.implementation for one in rows if one.on) == (row or title)
    assert newer.active == (None if row else name)
