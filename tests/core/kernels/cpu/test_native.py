"""The C++ over rows against formulas in fp64, and where it must not run."""

import sys
import types

import pytest
import torch
import torch.nn.functional as F

from megatron.kernels import linear, rotary
from megatron.kernels.cpu import native
from megatron.kernels.cpu.blocking import FEW
from tests.core.kernels import functional

LOADED = native.load(torch.backends.cpu.get_cpu_capability())
pytestmark = pytest.mark.skipif(isinstance(LOADED, str), reason=str(LOADED))
DTYPES = [torch.float32, torch.bfloat16]
EPS = 1e-5
CPU = torch.device("cpu")
COS, SIN = rotary.rotary_tables(33, 6, dtype=torch.float64)


def rotated(x):
    cos = COS[:, None, None]
    sin = SIN[:, None, None]
    first, second, rest = x.split((3, 3, x.shape[-1] - 6), -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


# Shapes of the inputs (rows, then what hangs on their width), what is called, its formula.
WIDTHS = [1, 15, 16, 17, 37, 64, 130]
CASES = {
    "gelu": (
        lambda w: [(FEW, w)],
        lambda x: functional.gelu(x, True),
        lambda x: F.gelu(x, approximate="tanh"),
    ),
    "swiglu": (
        lambda w: [(33, 2, w)],
        functional.swiglu,
        lambda x: F.silu(x[:, 0]) * x[:, 1],
    ),
    "rms_norm": (
        lambda w: [(33, w), (w,)],
        lambda x, w: functional.rms_norm(x, w, EPS),
        lambda x, w: F.rms_norm(x, w.shape, w, EPS),
    ),
    "rotary": (
        lambda w: [(33, 2, 3, w + 6)],
        lambda x: functional.apply_rotary(x, COS.to(x.dtype), SIN.to(x.dtype)),
        rotated,
    ),
    "linear": (lambda w: [(33, 5), (w, 5), (w,)], linear.linear, F.linear),
}


def draw(shapes, dtype, scale=2.0):
    generator = torch.Generator().manual_seed(7)
    return [
        (torch.randn(shape, generator=generator, dtype=torch.float64) * scale)
        .to(dtype)
        .requires_grad_()
        for shape in shapes
    ]


def results(call, tensors, grad):
    out = call(*tensors)
    return out, *torch.autograd.grad(out, tensors, grad.to(out.dtype))


@pytest.fixture
def calls(monkeypatch):
    """The names of the C++ functions that were called."""
    names = []
    real = native._call

    def noted(name, *arguments):
        names.append(name)
        return real(name, *arguments)

    monkeypatch.setattr(native, "_call", noted)
    return names


def assert_formula(case, tensors, dtype):
    _, call, formula = CASES[case]
    wide = [t.detach().double().requires_grad_() for t in tensors]
    grad = draw([formula(*wide).shape], dtype)[0].detach()
    slack = 2.0 if case == "rotary" else 1.0  # its tables are rounded, too
    unit = torch.finfo(dtype).eps
    for got, wanted in zip(results(call, tensors, grad), results(formula, wide, grad), strict=True):
        assert got.dtype == dtype and got.shape == wanted.shape
        scale = max(1.0, wanted.abs().max().item()) if wanted.numel() else 1.0
        torch.testing.assert_close(
            got.double(), wanted, rtol=0, atol=slack * (0.6 if unit > 1e-5 else 24) * unit * scale
        )


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_value_and_gradients_are_the_formula(calls, case, dtype, width):
    assert_formula(case, draw(CASES[case][0](width), dtype), dtype)
    assert calls


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_strides_do_not_matter(calls, case, dtype):
    tensors = draw(CASES[case][0](20), dtype)
    odd = [
        t.detach().transpose(0, -1).contiguous().transpose(0, -1).requires_grad_() for t in tensors
    ]
    assert not odd[0].is_contiguous()
    assert_formula(case, odd, dtype)
    assert calls


@pytest.mark.parametrize("case", [case for case in CASES if case not in ("rotary", "linear")])
def test_no_rows_and_no_columns(case):
    for shapes in (CASES[case][0](0), [(0, *CASES[case][0](8)[0][1:]), *CASES[case][0](8)[1:]]):
        tensors = draw(shapes, torch.bfloat16)
        out, *grads = results(CASES[case][1], tensors, torch.empty(CASES[case][1](*tensors).shape))
        assert out.numel() == 0 and [g.shape for g in grads] == [t.shape for t in tensors]
        assert not any(g.any() for g in grads)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_the_number_of_threads_changes_no_bit(monkeypatch, case, dtype):
    shapes = CASES[case][0](70)
    if case != "rotary":
        shapes[0] = (1001, *shapes[0][1:])
    tensors = draw(shapes, dtype)
    grad = draw([CASES[case][1](*tensors).shape], dtype)[0].detach()
    runs = []
    for threads in (1, 2, 5):
        monkeypatch.setattr(native.torch, "get_num_threads", lambda threads=threads: threads)
        runs.append([t.detach() for t in results(CASES[case][1], tensors, grad)])
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_numbers_infinities_and_nan(dtype):
    x = torch.tensor(
        [-torch.inf, -3e38, -1e4, -87, -11, -10, 10, 11, 87, 1e4, 3e38, torch.inf, torch.nan] * 3
    ).to(dtype)
    value = native.gelu(x)
    slope = native.gelu_grad(x, torch.ones_like(x))
    wanted = torch.where(x > 0, x, 0).where(~x.isnan(), x)
    torch.testing.assert_close(value, wanted, rtol=0, atol=1e-21, equal_nan=True)
    rising = torch.where(x > 0, 1, 0).to(dtype)
    torch.testing.assert_close(
        slope, rising.where(~x.isnan(), x), rtol=0, atol=1e-18, equal_nan=True
    )
    x = torch.where(x.abs() > 80, x, 0)[1:]
    gate_up = torch.stack((x, torch.ones_like(x)), 0)
    torch.testing.assert_close(
        native.swiglu(gate_up), torch.where(x > 0, x, 0), rtol=0, atol=1e-30, equal_nan=True
    )
    grad = native.swiglu_grad(gate_up, torch.ones_like(x))
    torch.testing.assert_close(grad[0], rising[1:].where(x != 0, 0.5), rtol=0, atol=1e-30)


def test_rounding_to_bf16_is_torchs():
    bits = torch.arange(0, 2**32, 65537 // 8 * 3, dtype=torch.int64)
    x = (bits - 2**31).to(torch.int32).view(torch.float32)
    x = x[(x.abs() > 1e-30) & x.isfinite()]
    ones = torch.ones(1)
    assert torch.equal(
        native.rotate(
            x.view(-1, 1, 1, 1).bfloat16(),
            ones.expand(len(x), 1, 1, 1)[..., :0],
            ones.expand(len(x), 1, 1, 1)[..., :0],
            1,
        ).flatten(),
        x.bfloat16(),
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_formats_do_not_come_here(calls, dtype):
    for case in CASES:
        tensors = draw(CASES[case][0](20), dtype)
        results(CASES[case][1], tensors, torch.ones(CASES[case][1](*tensors).shape, dtype=dtype))
    assert not calls
    assert str(dtype).removeprefix("torch.") in native.unavailable_reason(CPU, dtype)


def test_torch_compile_and_other_devices_do_not_come_here(monkeypatch):
    x = torch.ones(3)
    assert native.runs(x) and not native.runs(x.to("meta"))
    monkeypatch.setattr(native, "is_dynamo_compiling", lambda: True)
    assert not native.runs(x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_level_of_instructions_answers_alike(monkeypatch, dtype):
    mine = torch.backends.cpu.get_cpu_capability()
    levels = list(native.LEVELS)[list(native.LEVELS).index(mine) :]
    x, weight, grad = (t.detach() for t in draw([(50, 70), (70,), (50, 70)], dtype))
    found = []
    for level in levels:
        monkeypatch.setattr(native, "capability", lambda level=level: level)
        assert native.runs(x), native.unavailable_reason(CPU, dtype)
        found.append(
            (native.gelu(x), native.gelu_grad(x, grad), *native.rms_norm_grad(x, weight, grad, EPS))
        )
        if dtype == torch.float32:
            found[-1] += native.gelu_with_slope(x)
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("file", ["rows", "fp32_attention", "few_rows"])
def test_without_the_right_build_there_is_a_reason(monkeypatch, file):
    load = native.load_built.__wrapped__
    assert "DEFAULT" in load(file, 1, "DEFAULT")
    name = f"megatron.kernels.cpu.{file}_v3"
    monkeypatch.setitem(sys.modules, name, None)
    assert name in load(file, 1, "AVX2")
    monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(INTERFACE=0))
    assert "version" in load(file, 1, "AVX2")


@pytest.mark.parametrize("rows, width", [(1, 1), (17, 33), (32, 16), (47, 128), (96, 65)])
def test_a_transposed_matrix_is_contiguous(rows, width):
    x = draw([(rows, width)], torch.float32)[0].detach()
    transposed = native.transposed(x)
    assert torch.equal(transposed, x.t()) and transposed.is_contiguous()
    total = torch.ones(width, rows)
    native.add_transposed(x, total)
    assert torch.equal(total, 1 + x.t())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (17, 33), (300, 401), (0, 4)])
def test_a_gradient_is_added_in_fp32(dtype, shape):
    x = draw([shape], dtype)[0].detach()
    total = torch.full(shape, 1000.0)
    native.add(x, total)
    assert torch.equal(total, 1000.0 + x.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sum_of_squares_of_many_tensors(dtype):
    tensors = [
        t.detach() for t in draw([(1,), (7, 3), (1024,), (33, 1025), (0,), (300, 400)], dtype)
    ]
    exact = sum(t.double().square().sum().item() for t in tensors)
    assert native.sum_of_squares(tensors) == pytest.approx(exact, rel=1e-7)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = native.sum_of_squares(tensors)
    finally:
        torch.set_num_threads(threads)
    assert native.sum_of_squares(tensors) == alone
