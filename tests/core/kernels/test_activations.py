"""Activations against their formulas in fp64."""

import math

import pytest
import torch

from megatron.kernels.cpu import blocking, native
from megatron.kernels.gated_activations import SIGMOID_GLU
from megatron.kernels.implementation import choose
from megatron.kernels.rows import spec_of
from tests.core.kernels.functional import bias_gelu, geglu, gelu, squared_relu, swiglu

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True, params=[1 << 18, 24, None], ids=["one run", "many runs", "C++"])
def run_of_rows(request, monkeypatch):
    if request.param:
        monkeypatch.setattr(blocking, "BLOCK_ELEMENTS", request.param)
        monkeypatch.setattr(native, "unavailable_reason", lambda *_: "not built")


def tanh_gelu(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def erf_gelu(x):
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def sigmoid_glu(x, compiled=False, **numbers):
    spec = spec_of(x)._replace(compiled=compiled)
    return choose(SIGMOID_GLU, spec).implementation.forward(x, **numbers)


GPT_OSS = dict(steepness=1.702, clamp=1.5, offset=1.0)


def gpt_oss(x):
    gate, up = x[..., 0, :], x[..., 1, :]
    gate = torch.where(gate > 1.5, 1.5, gate)
    up = torch.where(up > 1.5, 1.5, torch.where(up < -1.5, -1.5, up))
    return gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)


CASES = {
    "gelu tanh": (lambda x: gelu(x, True), tanh_gelu, [(3, 4, 6)]),
    "gelu erf": (lambda x: gelu(x, False), erf_gelu, [(3, 4, 6)]),
    "bias gelu": (bias_gelu, lambda x, b: tanh_gelu(x + b), [(3, 4, 6), (6,)]),
    "swiglu": (
        swiglu,
        lambda x: x[..., 0, :] * torch.sigmoid(x[..., 0, :]) * x[..., 1, :],
        [(3, 4, 2, 6)],
    ),
    "geglu": (geglu, lambda x: tanh_gelu(x[..., 0, :]) * x[..., 1, :], [(3, 4, 2, 6)]),
    "gpt-oss": (lambda x: sigmoid_glu(x, **GPT_OSS), gpt_oss, [(3, 4, 2, 6)]),
    "without a clamp": (
        lambda x: sigmoid_glu(x, steepness=1.0, clamp=None, offset=0.5),
        lambda x: x[..., 0, :] * torch.sigmoid(x[..., 0, :]) * (x[..., 1, :] + 0.5),
        [(3, 4, 2, 6)],
    ),
    "squared relu": (squared_relu, lambda x: torch.where(x > 0, x, 0) ** 2, [(3, 4, 6)]),
}


def inputs(name: str, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(4)
    return [
        (torch.randn(*shape, generator=generator, dtype=torch.float64) * 2)
        .to(dtype)
        .requires_grad_()
        for shape in CASES[name][2]
    ]


@pytest.mark.parametrize("runs_pay_off", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_are_the_formula(monkeypatch, name, dtype, runs_pay_off):
    monkeypatch.setattr("megatron.kernels.rows.pays_off", lambda _: runs_pay_off)
    call, formula, _ = CASES[name]
    tensors = inputs(name, dtype)
    wide = [t.detach().double().requires_grad_() for t in tensors]
    actual = call(*tensors)
    exact = formula(*wide)
    grad = torch.randn(
        exact.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64
    ).to(dtype)
    results = (actual, *torch.autograd.grad(actual, tensors, grad))
    wanted = (exact, *torch.autograd.grad(exact, wide, grad.double()))
    unit = torch.finfo(dtype).eps
    for got, value in zip(results, wanted, strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(
            got.double(), value, rtol=4 * unit, atol=(6 if unit > 1e-5 else 100) * unit
        )


@pytest.mark.parametrize("name", ["gelu erf", "swiglu", "squared relu"])
def test_gradcheck(name):
    assert torch.autograd.gradcheck(CASES[name][0], inputs(name, torch.float64))


@pytest.mark.parametrize("name", ["gelu tanh", "bias gelu", "geglu"])
def test_slope_is_the_numerical_one_and_a_second_backward_is_refused(name):
    tensors = inputs(name, torch.float64)
    value = CASES[name][0](*tensors)
    weights = torch.linspace(-1, 1, value.numel(), dtype=torch.float64).view(value.shape)
    step = 1e-6
    grads = torch.autograd.grad(value, tensors, weights, retain_graph=True)
    ahead, behind = (
        CASES[name][0](*(t.detach() + sign * step for t in tensors)) for sign in (1, -1)
    )
    torch.testing.assert_close(
        sum(g.sum() for g in grads),
        ((ahead - behind) * weights).sum() / (2 * step),
        rtol=1e-7,
        atol=1e-7,
    )
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(value, tensors, weights)


def test_a_graph_computes_the_same_glu():
    (x,) = inputs("gpt-oss", torch.float64)
    torch.testing.assert_close(sigmoid_glu(x, True, **GPT_OSS), gpt_oss(x), rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_far_from_zero_is_the_identity_or_zero(dtype):
    x = torch.tensor([-1e4, -60.0, 60.0, 1e4], dtype=dtype, requires_grad=True)
    y = gelu(x, True)
    y.sum().backward()
    torch.testing.assert_close(y, torch.tensor([0.0, 0.0, 60.0, 1e4], dtype=dtype))
    torch.testing.assert_close(x.grad, torch.tensor([0.0, 0.0, 1.0, 1.0], dtype=dtype))


def test_inputs_that_are_not_contiguous_and_scalars():
    x = torch.randn(6, 5, dtype=torch.float64)
    torch.testing.assert_close(gelu(x.t(), True), tanh_gelu(x.t()))
    gate_up = torch.randn(2, 7, 6, dtype=torch.float64)
    torch.testing.assert_close(
        swiglu(gate_up.transpose(0, 1)), gate_up[0] * torch.sigmoid(gate_up[0]) * gate_up[1]
    )
    torch.testing.assert_close(gelu(x[0, 0], True), tanh_gelu(x[0, 0]))
