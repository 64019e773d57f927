"""Every library's kernels on a CUDA device against this suite's own; what ran there so far is in
docs/gpu.md."""

import pytest
import torch

from megatron.kernels import grouped_linear, transformer_engine
from megatron.kernels.attention_spec import AttentionCall, AttentionSpec
from megatron.kernels.cuda import apex
from megatron.kernels.kernels import Kernels
from tests.core.kernels import functional
from tests.core.kernels.attend import attention
from tests.core.kernels.attention_formula import cut
from tests.core.model.tiny import MODELS, tiny_model, tokens

pytestmark = pytest.mark.gpu
DTYPE = torch.bfloat16


def inputs(g: int, d: int = 64) -> tuple[torch.Tensor, ...]:
    """q, k, v and a gradient."""
    generator = torch.Generator("cuda").manual_seed(1)
    return tuple(
        torch.randn(256, 2, heads, d, generator=generator, device="cuda").to(DTYPE).requires_grad_()
        for heads in (8, g, g, 8)
    )


def same(call, reference_call, tensors, grad) -> None:
    """Output and gradients within what 16 bits allow."""
    results = [
        (out, *torch.autograd.grad(out, tensors, grad)) for out in (call(), reference_call())
    ]
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got.float(), wanted.float(), rtol=0.02, atol=0.02)


def step(model: torch.nn.Module, warm_up: int = 0) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Losses and gradients of a model on the device; `warm_up`: steps before it, in which delayed
    scaling finds its scales (the first one has scale 1, which flushes gradients to 0)."""
    ids, labels = (t.cuda() for t in tokens())
    for _ in range(warm_up):
        model(ids, labels=labels).mean().backward()
    model.zero_grad()
    losses = model(ids, labels=labels)
    losses.mean().backward()
    return losses.detach(), {p.sharding.name: p.grad for p in model.parameters()}


@pytest.mark.parametrize("groups", [8, 2])
@pytest.mark.parametrize("with_documents", [False, True])
@pytest.mark.parametrize("library", ["flash_attn", "transformer_engine"])
def test_attention(library, with_documents, groups):
    pytest.importorskip(library)
    q, k, v, grad = inputs(groups)
    ids = cut(256).cuda() if with_documents else None
    spec = AttentionSpec.of(q, k, v, 0.125, documents=with_documents)
    engine = (
        transformer_engine.TransformerEngine().attention(spec)
        if library == "transformer_engine"
        else None
    )
    same(
        lambda: (
            engine(q, k, v, AttentionCall(spec, ids))
            if engine
            else attention(q, k, v, scale=0.125, document_ids=ids, implementation="flash")
        ),
        lambda: attention(q, k, v, scale=0.125, document_ids=ids, implementation="plain"),
        (q, k, v),
        grad,
    )


def test_apex():
    pytest.importorskip("apex")
    x, weight, bias, grad = (
        torch.randn(*shape, device="cuda", requires_grad=True)
        for shape in ((32, 512), (512,), (512,), (32, 512))
    )
    same(
        lambda: apex.layer_norm(x, weight, bias, 1e-5),
        lambda: functional.layer_norm(x, weight, bias, 1e-5),
        (x, weight, bias),
        grad,
    )
    same(
        lambda: apex.rms_norm(x, weight, 1e-5),
        lambda: functional.rms_norm(x, weight, 1e-5),
        (x, weight),
        grad,
    )
    pytest.importorskip("fused_weight_gradient_mlp_cuda")
    x = x.detach().to(DTYPE)
    grad = grad.detach().to(DTYPE)
    total = torch.ones(512, 512, device="cuda")
    apex.accumulate_weight_grad(x, grad, total)
    torch.testing.assert_close(total, 1 + grad.float().t() @ x.float(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("flags", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize(
    "fp8",
    [
        None,
        transformer_engine.Fp8("hybrid", "tensorwise"),
        transformer_engine.Fp8("hybrid", "delayed", amax_history_len=16),
    ],
)
def test_a_model_of_transformer_engine(flags, fp8):
    pytest.importorskip("transformer_engine")
    kernels = Kernels(
        "transformer_engine", transformer_engine=transformer_engine.TransformerEngine(False, fp8)
    )
    shape = {"hidden_size": 256, "num_attention_heads": 4, **flags}
    ours, theirs = (tiny_model(DTYPE, kernels=one, **shape).cuda() for one in (None, kernels))
    (loss, grads), (their_loss, their_grads) = (step(model, 3) for model in (ours, theirs))
    torch.testing.assert_close(
        their_loss.float(), loss.float(), rtol=0.05 if fp8 else 0.02, atol=0.05
    )
    for name, grad in grads.items():
        apart = (their_grads[name].float() - grad.float()).norm() / grad.float().norm().clamp(
            min=1e-6
        )
        assert apart < (0.3 if fp8 else 0.1), (name, apart)


@pytest.mark.parametrize("accumulate", [False, True])
def test_experts_in_one_call(accumulate):
    """Grouped GEMMs, with sizes on the device, against a loop over the experts, one of them without
    tokens; sums of weight gradients are fp32."""
    generator = torch.Generator("cuda").manual_seed(1)
    counts = [5, 0, 19, 40]

    def random(*shape):
        return torch.randn(*shape, generator=generator, device="cuda").to(DTYPE)

    x, weight, grad = random(64, 64), random(4, 48, 64), random(64, 48)
    x.requires_grad_()
    weight.requires_grad_()
    calls = []
    ends = torch.tensor(counts, device="cuda").cumsum(0, dtype=torch.int32)
    for groups in (ends, counts):
        total = torch.full((4, 48, 64), 2.0**-12, device="cuda") if accumulate else None
        weight.grad = x.grad = None
        y = grouped_linear.grouped_linear(x, weight, groups, total)
        y.backward(grad)
        calls.append((y, x.grad, weight.grad if total is None else total))
    if accumulate:
        torch.testing.assert_close(calls[0][2], calls[1][2], rtol=1e-5, atol=1e-5)
    for got, wanted in zip(*calls, strict=True):
        torch.testing.assert_close(got.float(), wanted.float(), rtol=0.02, atol=0.1)
