"""LayerNorm and RMSNorm against their formulas in fp64."""

import pytest
import torch

from megatron.kernels.cpu import blocking, native
from tests.core.kernels.functional import layer_norm, rms_norm

EPS = 1e-3
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True, params=[1 << 18, 24, None], ids=["one run", "many runs", "C++"])
def run_of_rows(request, monkeypatch):
    if request.param:
        monkeypatch.setattr(blocking, "BLOCK_ELEMENTS", request.param)
        monkeypatch.setattr(native, "unavailable_reason", lambda *_: "not built")


def inputs(dtype: torch.dtype, zero_centered: bool = False):
    generator = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    x = draw(5, 2, 8) * 2 + 1
    weight = draw(8) * 0.3 + (0 if zero_centered else 1)
    bias = draw(8)
    grad = draw(5, 2, 8)
    x, weight, bias = (t.to(dtype).requires_grad_() for t in (x, weight, bias))
    return x, weight, bias, grad.to(dtype)


def layer_formula(x, weight, bias, zero_centered):
    centered = x - x.mean(-1, keepdim=True)
    y = centered / (centered.square().mean(-1, keepdim=True) + EPS).sqrt()
    return y * (weight + 1 if zero_centered else weight) + (0 if bias is None else bias)


def rms_formula(x, weight, zero_centered):
    return (
        x
        / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
        * (weight + 1 if zero_centered else weight)
    )


def assert_same(call, formula, tensors, grad) -> None:
    """Output and gradients, with the tolerance of one rounding (two for sums over rows in low
    precision)."""
    wide = tuple(t.detach().double().requires_grad_() for t in tensors)
    actual = call(*tensors)
    exact = formula(*wide)
    grads = torch.autograd.grad(actual, tensors, grad)
    exact_grads = torch.autograd.grad(exact, wide, grad.double())
    unit = torch.finfo(actual.dtype).eps
    for got, wanted in zip((actual, *grads), (exact, *exact_grads), strict=True):
        assert got.dtype == grad.dtype
        torch.testing.assert_close(
            got.double(), wanted, rtol=2 * unit, atol=8 * max(unit, 1e-14) if unit < 1e-5 else unit
        )


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm_is_the_formula(dtype, zero_centered):
    *tensors, grad = inputs(dtype, zero_centered)
    assert_same(
        lambda x, w, b: layer_norm(x, w, b, EPS, zero_centered),
        lambda x, w, b: layer_formula(x, w, b, zero_centered),
        tensors,
        grad,
    )


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_is_the_formula(dtype, zero_centered):
    x, weight, _, grad = inputs(dtype, zero_centered)
    assert_same(
        lambda x, w: rms_norm(x, w, EPS, zero_centered),
        lambda x, w: rms_formula(x, w, zero_centered),
        (x, weight),
        grad,
    )


@pytest.mark.parametrize("runs_pay_off", [True, False])
def test_both_ways_of_rms_norm_agree(monkeypatch, runs_pay_off):
    monkeypatch.setattr("megatron.kernels.rows.pays_off", lambda _: runs_pay_off)
    x, weight, _, grad = inputs(torch.float64)
    assert_same(
        lambda x, w: rms_norm(x, w, EPS), lambda x, w: rms_formula(x, w, False), (x, weight), grad
    )


def test_layer_norm_without_bias_and_gradchecks():
    x, weight, bias, _ = inputs(torch.float64)
    torch.testing.assert_close(
        layer_norm(x, weight, None, EPS), layer_formula(x, weight, None, False)
    )
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, EPS, True), (x, weight))
    assert torch.autograd.gradcheck(
        lambda x, w, b: layer_norm(x, w, b, EPS, True), (x, weight, bias)
    )


@pytest.mark.parametrize(
    "norm", [rms_norm, lambda x, w, eps, zero_centered: layer_norm(x, w, None, eps, zero_centered)]
)
def test_a_small_zero_centered_weight_is_not_rounded_away(norm):
    """1 + 2^-9 is no bf16 number: adding the one in bf16 would lose the weight."""
    x = torch.linspace(-2, 2, 64, dtype=torch.bfloat16).view(4, 16)
    weight = torch.full((16,), 2.0**-9, dtype=torch.bfloat16)
    exact = norm(x.double(), weight.double(), EPS, zero_centered=True)
    wrong = norm(x.double(), torch.zeros(16, dtype=torch.float64), EPS, zero_centered=True)
    actual = norm(x, weight, EPS, zero_centered=True)
    assert torch.equal(actual, exact.to(torch.bfloat16))
    assert not torch.equal(actual, wrong.to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_many_rows_are_summed_in_more_than_16_bits(dtype):
    """5,000 gradients of about one, which bf16 adds up to 256 and fp16 to 2,048."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(5000, 8, generator=generator).to(dtype).requires_grad_()
    weight, bias = (torch.ones(8, dtype=dtype, requires_grad=True) for _ in range(2))
    grad = torch.ones_like(x) + x.detach() / 4
    assert_same(
        lambda x, w, b: layer_norm(x, w, b, EPS),
        lambda x, w, b: layer_formula(x, w, b, False),
        (x, weight, bias),
        grad,
    )
    assert_same(
        lambda x, w: rms_norm(x, w, EPS),
        lambda x, w: rms_formula(x, w, False),
        (x, weight),
        grad,
    )


def test_statistics_of_low_precision_are_in_fp32():
    x = torch.full((2, 512), 300.0, dtype=torch.float16)  # 300^2 is no fp16 number
    assert torch.equal(rms_norm(x, torch.ones(512, dtype=torch.float16), 1e-5), torch.ones_like(x))
