"""Linear layers in 8 bits against formats written out bit by bit in float64."""

import pytest
import torch

from megatron.kernels.fp8 import (
    FORMATS,
    Formats,
    fitting_scale,
    gemm,
    grouped_linear_fp8,
    linear_fp8,
    native_gemm,
    quantize,
    scale_of,
)

E4M3, E5M2 = FORMATS["hybrid"]
LARGEST = {E4M3: 448.0, E5M2: 57344.0}


def numbers(dtype: torch.dtype) -> torch.Tensor:
    """Every finite number that is not negative, in order of its bits, by the definition of the
    format."""
    mantissa, bias = (3, 7) if dtype == E4M3 else (2, 15)
    found = []
    for bits in range(128):
        exponent = bits >> mantissa
        fraction = bits & ((1 << mantissa) - 1)
        value = (
            fraction / 2**mantissa * 2.0 ** (1 - bias)
            if exponent == 0
            else (1 + fraction / 2**mantissa) * 2.0 ** (exponent - bias)
        )
        if value <= LARGEST[dtype]:
            found.append(value)
    return torch.tensor(found, dtype=torch.float64)


def nearest(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x (float64) to the nearest number of the format, halfway to that with an even last bit; large
    ones to the largest."""
    grid = numbers(dtype)
    size = x.abs()
    above = torch.searchsorted(grid, size).clamp(1, len(grid) - 1)
    low = grid[above - 1]
    high = grid[above]
    up = (size - low > high - size) | ((size - low == high - size) & (above % 2 == 0))
    return torch.where(up, high, low) * x.sign()


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What x stands for after its cast, scaled by itself; the scale and its inverse are fp32 as in
    the kernel."""
    scale = torch.tensor(LARGEST[dtype]) / x.abs().max().float()
    return nearest((x.float() * scale).double(), dtype) * scale.reciprocal().double()


class Itself:
    """Scales every tensor by itself, or as given, and notes what it was asked."""

    def __init__(self, formats: Formats = FORMATS["hybrid"], given=None):
        self.formats = formats
        self.asked = []
        self.given = given

    def scale(self, which, amax, training):
        self.asked.append((which, 0.0 if amax.is_meta else amax.item(), training))
        return scale_of(amax, self.given, LARGEST[self.formats[which // 2]])


def inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(5)
    shapes = (4, 8, 48), (64, 48), (64,), (4, 8, 64)
    return [
        (torch.randn(shape, generator=generator) * size).to(dtype)
        for shape, size in zip(shapes, (3.0, 0.02, 0.1, 1e-6), strict=True)
    ]


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_casts_round_as_the_format_says(dtype):
    grid = numbers(dtype)
    assert grid[-1] == LARGEST[dtype] == torch.finfo(dtype).max
    # ties; all of them are fp32 numbers
    middle = (grid[1:] + grid[:-1]) / 2
    x = torch.cat(
        [
            grid,
            middle,
            middle * (1 + 1e-6),
            middle * (1 - 1e-6),
            torch.tensor([1e9, LARGEST[dtype] * 1.05]),
        ]
    )
    x = torch.cat([x, -x]).float()
    one = torch.tensor(1.0)
    assert torch.equal(quantize(x, dtype, one).double(), nearest(x.double(), dtype))
    scale = torch.tensor(0.37)
    assert torch.equal(quantize(x, dtype, scale).double(), nearest((x * scale).double(), dtype))


@pytest.mark.parametrize("kind", ["hybrid", "e4m3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_is_three_products_of_casts(kind, dtype):
    x, weight, bias, grad = inputs(dtype)
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    scaling = Itself(FORMATS[kind])
    out = linear_fp8(*leaves, scaling=scaling)
    out.backward(grad)
    back = FORMATS[kind].backward
    qx = cast(x, E4M3)
    qw = cast(weight, E4M3)
    qg = cast(grad, back)
    close = (
        dict(rtol=1e-5, atol=1e-5) if dtype == torch.float32 else dict(rtol=2.0**-7, atol=2.0**-8)
    )
    torch.testing.assert_close(out.double(), qx @ qw.t() + bias.double(), **close)
    close["atol"] *= 1e-6
    torch.testing.assert_close(leaves[0].grad.double(), qg @ qw, **close)
    torch.testing.assert_close(
        leaves[1].grad.double(),
        qg.flatten(0, 1).t() @ qx.flatten(0, 1),
        **close | {"atol": 40 * close["atol"]},
    )
    assert torch.equal(leaves[2].grad, grad.flatten(0, 1).sum(0))
    order = (1, weight), (0, x), (2, grad)
    assert scaling.asked == [(which, t.abs().max().item(), True) for which, t in order]


def test_gradients_are_within_the_bounds_of_the_formats():
    """A cast moves a number by at most half a step: 2^-4 (e4m3) or 2^-3 (e5m2) of it, or half the
    smallest number."""
    x, weight, _, grad = inputs()
    leaves = [t.clone().requires_grad_() for t in (x, weight)]
    linear_fp8(*leaves, scaling=Itself()).backward(grad)
    x, weight, grad = (t.double().flatten(0, -2) for t in (x, weight, grad))

    def moved(t, dtype):
        share, smallest = (2.0**-4, 2.0**-9) if dtype == E4M3 else (2.0**-3, 2.0**-16)
        return torch.maximum(t.abs() * share, t.abs().max() / LARGEST[dtype] * smallest / 2) * (
            1 + 1e-5
        )

    def bound(a, moved_a, b, moved_b):
        return a.abs() @ moved_b + moved_a @ b.abs() + moved_a @ moved_b

    dx = moved(x, E4M3)
    dw = moved(weight, E4M3)
    dg = moved(grad, E5M2)
    for got, exact, most in (
        (leaves[0].grad.flatten(0, 1), grad @ weight, bound(grad, dg, weight, dw)),
        (leaves[1].grad, grad.t() @ x, bound(grad.t(), dg.t(), x, dx)),
    ):
        error = (got.double() - exact).abs()
        assert (error <= most).all()
        assert error.norm() > 0.005 * exact.norm()  # they really are of 8 bits


def test_the_weight_gradient_is_added_to_its_buffer():
    x, weight, _, grad = inputs(torch.bfloat16)
    leaves = [t.clone().requires_grad_() for t in (x, weight)]
    total = torch.ones(64, 48)
    linear_fp8(*leaves, scaling=Itself(), accumulate_into=total).backward(grad)
    assert leaves[1].grad is None
    expected = cast(grad, E5M2).flatten(0, 1).t() @ cast(x, E4M3).flatten(0, 1)
    torch.testing.assert_close(total.double() - 1, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_is_not_finite_is_not_hidden(bad, place):
    x, weight, _, grad = inputs()
    tensors = [x, weight, grad]
    tensors[place].view(-1)[3] = bad
    for scaling in (Itself(), Itself(given=torch.tensor(10.0))):
        leaves = [t.clone().requires_grad_() for t in tensors[:2]]
        out = linear_fp8(*leaves, scaling=scaling)
        out.backward(tensors[2])
        assert out.isfinite().all() == (place == 2)
        assert not leaves[0].grad.isfinite().any() if place else not leaves[1].grad.isfinite().any()


def test_a_scale_that_cublas_refuses_is_refused_on_every_device():
    a, b = (torch.ones(16, 16).to(E4M3) for _ in range(2))
    scale = scale_of(torch.tensor(448.0), None, 448.0)
    assert gemm(a, b, scale.inverse, scale.inverse, torch.float32).eq(16).all()
    second = torch.ones(2)[1]  # of a tensor that holds scale and inverse
    for inverses in ((second, scale.inverse), (scale.inverse, second)):
        with pytest.raises(AssertionError):
            gemm(a, b, *inverses, torch.float32)


def test_zeros_and_tiny_numbers():
    for size in (0.0, 1e-38, 1e-44):
        x = torch.full((16, 16), size)
        weight = torch.eye(16)
        assert linear_fp8(x, weight, scaling=Itself()).allclose(x, rtol=2.0**-4, atol=1e-40)
    assert fitting_scale(torch.tensor([0.0, 2.0]), 448.0).tolist() == [1.0, 224.0]


@pytest.mark.parametrize("first", [E4M3, E5M2])
def test_torchs_fp8_gemm_is_the_emulated_one(first):
    """torch has it for CPUs too, which shows how it wants its arguments; both sum in fp32."""
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(32, 64, generator=generator).to(dtype) for dtype in (first, E4M3))
    inverses = torch.tensor(0.5), torch.tensor(0.125)
    # the second as in the weight's gradient
    for left, right in ((a, b), (b.view(64, 32).t(), b)):
        for dtype in (torch.float32, torch.bfloat16):
            torch.testing.assert_close(
                native_gemm(left, right, *inverses, dtype),
                gemm(left, right, *inverses, dtype),
                rtol=2.0**-7,
                atol=1e-5,
            )


def test_only_the_forward_product_accumulates_fast(monkeypatch):
    """As in torchao and Transformer Engine. The meta device stands for CUDA."""
    fast = []
    scaled_mm = torch._scaled_mm
    monkeypatch.setattr(
        torch,
        "_scaled_mm",
        lambda *a, **kw: fast.append(kw.get("use_fast_accum", False)) or scaled_mm(*a, **kw),
    )
    x, weight, _, grad = (t.to("meta", torch.bfloat16) for t in inputs())
    linear_fp8(x.requires_grad_(), weight.requires_grad_(), scaling=Itself()).backward(grad)
    assert fast == [True, False, False]
    rows = x.detach().flatten(0, 1).requires_grad_()
    weight = weight.detach()[None].requires_grad_()
    grouped_linear_fp8(rows, weight, [32], scaling=Itself()).backward(grad.flatten(0, 1))
    assert fast[3:] == [True, False, False]


@pytest.mark.parametrize("counts", [[5, 0, 19, 16], [0, 0, 0, 0]])
@pytest.mark.parametrize("accumulate", [False, True])
def test_a_layer_of_experts_is_one_layer_per_expert(counts, accumulate):
    """With the scales of all rows and all matrices, any number of rows, and no rows."""
    n = sum(counts)
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(n, 32, generator=generator).requires_grad_()
    weight = torch.randn(4, 48, 32, generator=generator).requires_grad_()
    grad = torch.randn(n, 48, generator=generator)
    total = torch.ones_like(weight) if accumulate else None
    scaling = Itself()
    y = grouped_linear_fp8(x, weight, counts, scaling=scaling, accumulate_into=total)
    y.backward(grad)
    order = (1, weight), (0, x), (2, grad)
    largest = [(which, float(t.detach().abs().max()) if len(t) else 0.0) for which, t in order]
    assert scaling.asked == [(*one, True) for one in largest]
    pairs = ((x.detach(), E4M3), (weight.detach(), E4M3), (grad, E5M2))
    qx, qw, qg = (cast(t, dtype) if len(t) else t.double() for t, dtype in pairs)
    grad_x, grad_weight = torch.zeros_like(qx), torch.zeros_like(qw)
    parts = zip(qx.split(counts), qg.split(counts), grad_x.split(counts), strict=True)
    out = []
    for number, (rows, grads, grad_rows) in enumerate(parts):
        out.append(rows @ qw[number].t())
        grad_rows.copy_(grads @ qw[number])
        grad_weight[number] = grads.t() @ rows
    close = dict(rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(y.double(), torch.cat(out), **close)
    torch.testing.assert_close(x.grad.double(), grad_x, **close)
    found = total - 1 if accumulate else weight.grad
    torch.testing.assert_close(found.double(), grad_weight, **close)
