"""Linear layers against the formulas in fp64, with and without native low-precision products."""

import pytest
import torch

from megatron.kernels import linear as module
from megatron.kernels import weight_grads
from tests.core.kernels.functional import linear, linear_weight_grad

LOW = [torch.bfloat16, torch.float16]
DTYPES = [torch.float64, torch.float32, *LOW]


def inputs(dtype: torch.dtype, out: int = 23, width: int = 12, lead: tuple[int, ...] = (5, 3)):
    generator = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)  # noqa: E731
    x = draw(*lead, width)
    weight = draw(out, width)
    bias = draw(out)
    grad = draw(*lead, out)
    return x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), grad


def formulas(x, weight, bias, grad):
    """Output and gradients in fp64 of the values given."""
    x, weight, bias, grad = (t.detach().double() for t in (x, weight, bias, grad))
    return (
        torch.einsum("abi,oi->abo", x, weight) + bias,
        torch.einsum("abo,oi->abi", grad, weight),
        torch.einsum("abo,abi->oi", grad, x),
        grad.sum((0, 1)),
    )


def assert_rounded_once(actual: torch.Tensor, exact: torch.Tensor) -> None:
    """Within half a unit in the last place of the dtype, and what fp32 sums may add."""
    unit = {
        torch.bfloat16: 2.0**-8,
        torch.float16: 2.0**-11,
        torch.float32: 1e-6,
        torch.float64: 1e-14,
    }[actual.dtype]
    atol = 1e-13 if actual.dtype == torch.float64 else 5e-6
    torch.testing.assert_close(actual.double(), exact, rtol=unit * 1.001, atol=atol)


@pytest.fixture(params=[True, False], ids=["native", "through fp32"])
def native(request, monkeypatch):
    """Low precision as on a machine that has, or has not, instructions for it."""
    monkeypatch.setattr(
        module, "low_precision_is_native", lambda _, dtype: request.param or dtype not in LOW
    )
    return request.param


@pytest.fixture(params=[1 << 24, 40], ids=["one block", "many blocks"])
def block_elements(request, monkeypatch):
    """Columns of a low-precision product in one piece, or in several with a shorter last one."""
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", request.param)


@pytest.mark.parametrize("dtype", DTYPES)
def test_output_and_gradients_are_the_formulas_rounded_once(dtype, native, block_elements):
    x, weight, bias, grad = inputs(dtype)
    out = linear(x, weight, bias)
    out.backward(grad)
    for actual, exact in zip(
        (out, x.grad, weight.grad, bias.grad), formulas(x, weight, bias, grad), strict=True
    ):
        assert actual.dtype == dtype
        assert_rounded_once(actual.detach(), exact)


def test_gradcheck_with_and_without_bias():
    x, weight, bias, _ = inputs(torch.float64, out=4, width=3, lead=(2, 2))
    assert torch.autograd.gradcheck(linear, (x, weight, bias))
    assert torch.autograd.gradcheck(linear, (x, weight))


def test_inputs_that_are_not_contiguous():
    x, weight, bias, grad = inputs(torch.float32)
    turned = x.detach().transpose(0, 1).requires_grad_()
    linear(turned, weight, bias).backward(grad.transpose(0, 1))
    assert_rounded_once(turned.grad.transpose(0, 1), formulas(x, weight, bias, grad)[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_weight_gradient_stands_alone(dtype, native, block_elements):
    x, weight, bias, grad = inputs(dtype)
    alone = linear_weight_grad(grad, x.detach())
    linear(x, weight, bias).backward(grad)
    assert torch.equal(alone, weight.grad)


@pytest.mark.parametrize("dtype", DTYPES)
def test_accumulation_adds_to_the_buffer_and_leaves_grad_alone(dtype, native, block_elements):
    x, weight, bias, grad = inputs(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    main_grad = torch.full(weight.shape, 3.0, dtype=wide)
    for _ in range(2):
        linear(x, weight, bias, accumulate_into=main_grad).backward(grad)
    assert weight.grad is None and x.grad is not None and bias.grad is not None
    exact = formulas(x, weight, bias, grad)[2]
    tolerance = (
        2e-6
        if dtype not in LOW or not native
        else {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    )
    torch.testing.assert_close(
        main_grad.double(),
        3 + 2 * exact,
        rtol=2 * tolerance,
        atol=1e-4 if tolerance < 1e-4 else 0.1,
    )


def test_a_low_precision_buffer_is_added_to_in_its_own_format(native):
    x, weight, bias, grad = inputs(torch.bfloat16)
    buffer = torch.zeros(weight.shape, dtype=torch.bfloat16)
    linear(x, weight, bias, accumulate_into=buffer).backward(grad)
    assert_rounded_once(buffer, formulas(x, weight, bias, grad)[2])


@pytest.mark.parametrize("view", [False, True])
def test_post_accumulate_hooks_run_also_for_an_accumulated_weight(view):
    """What overlaps communication with backward learns that main_grad is complete, although grad is
    None."""
    x, weight, bias, grad = inputs(torch.float32)
    main_grad = torch.zeros(weight.shape)
    seen = []
    weight.register_post_accumulate_grad_hook(
        lambda p: seen.append((p.grad, main_grad.any().item()))
    )
    used = weight.view(1, *weight.shape).flatten(0, 1) if view else weight
    linear(x, used, bias, accumulate_into=main_grad).backward(grad)
    assert seen == [(None, True)]


@pytest.fixture
def onednn_calls(monkeypatch):
    """The arguments of every linear layer that oneDNN computes."""
    calls = []
    real = torch.ops.mkldnn._linear_pointwise
    monkeypatch.setattr(
        torch.ops.mkldnn, "_linear_pointwise", lambda *a: calls.append(a) or real(*a)
    )
    module._onednn_linear.cache_clear()
    yield calls
    module._onednn_linear.cache_clear()


def test_a_bias_added_by_onednn_is_addmms_to_the_bit(onednn_calls):
    x, weight, bias, _ = inputs(torch.bfloat16, out=200, width=96, lead=(33, 2))
    rows = x.detach().flatten(0, 1)
    native = module.low_precision_is_native("cpu", torch.bfloat16)
    for part in (rows, rows[::2], rows[:, :50], rows[:1], rows[:0]):
        matrix = weight.detach()[:, : part.shape[1]].contiguous()
        # without oneDNN's bf16 in fp32, rounded once
        found = module.product(part, matrix, bias)
        assert torch.equal(found, torch.addmm(bias, part, matrix.t())) or not native
    assert len(onednn_calls) == (4 if native else 0)


@pytest.mark.parametrize("out, width", [(200, 96), (7, 3)])
def test_a_bf16_weight_gradient_is_added_in_fp32(out, width):
    x, weight, _, grad = inputs(torch.bfloat16, out=out, width=width, lead=(33, 2))
    kept = torch.full((out, width), 1024.0)
    module.linear(x, weight, accumulate_into=kept).backward(grad)
    right = grad.flatten(0, 1).double().t() @ x.detach().flatten(0, 1).double()
    # 1024 in bf16 would lose what is below 8
    torch.testing.assert_close(kept.double() - 1024, right, rtol=2**-8, atol=2e-3)


@pytest.mark.parametrize(
    "vendor, capability, calls",
    [
        ("AuthenticAMD", "AVX512", 5),
        ("AuthenticAMD", "AVX2", 5),
        ("AuthenticAMD", "DEFAULT", 0),
        ("GenuineIntel", "AVX512", 0),
    ],
)
def test_fp32_goes_to_onednn_on_amd_with_vectors(
    monkeypatch, onednn_calls, vendor, capability, calls
):
    monkeypatch.setattr(module.devices, "cpu_info", lambda key: vendor)
    monkeypatch.setattr(module, "FEW_MULTIPLICATIONS", 1000)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    x, weight, bias, grad = inputs(torch.float32, out=200, width=96, lead=(33, 2))
    rows = x.detach().flatten(0, 1)
    rows_out = grad.flatten(0, 1)
    weight = weight.detach()
    bias = bias.detach()
    wide = rows.double() @ weight.double().t()
    for found, right in (
        (module.product(rows, weight, bias), wide + bias.double()),
        (module.product(rows, weight, None), wide),
        (module.product(rows[::2], weight, bias), wide[::2] + bias.double()),
        (module.input_grad(rows_out, weight), rows_out.double() @ weight.double()),
        (
            module.input_grad(rows_out[:, :70], weight[:70]),
            rows_out[:, :70].double() @ weight[:70].double(),
        ),
    ):
        torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-5)
    assert module.product(rows[:0], weight, bias).shape == (0, 200)
    assert len(onednn_calls) == calls


BUFFERS = {
    "none": lambda *shape: None,
    "fp32": lambda *shape: torch.ones(shape),
    "fp64": lambda *shape: torch.ones(shape, dtype=torch.float64),
    "strided": lambda *shape: torch.ones(*shape, 2)[..., 0],
}


@pytest.mark.parametrize("buffer", BUFFERS)
@pytest.mark.parametrize("out, width", [(200, 96), (96, 200), (64, 64)])
def test_the_weight_gradient_goes_to_onednn_too(monkeypatch, onednn_calls, buffer, out, width):
    monkeypatch.setattr(module.devices, "cpu_info", lambda key: "AuthenticAMD")
    monkeypatch.setattr(module, "FEW_MULTIPLICATIONS", 1000)
    x, weight, bias, grad = inputs(torch.float32, out=out, width=width, lead=(33, 2))
    into = (BUFFERS[buffer](out, width), BUFFERS[buffer](out))
    module.linear(x, weight, bias, accumulate_into=into[0], accumulate_bias_into=into[1]).backward(
        grad
    )
    rows_out = grad.flatten(0, 1).double()
    right = (rows_out.t() @ x.detach().flatten(0, 1).double(), rows_out.sum(0))
    for kept, param, wanted in zip(into, (weight, bias), right, strict=True):
        found = param.grad if kept is None else kept - 1
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-4)
    if torch.backends.cpu.get_cpu_capability() in module.native.LEVELS:
        # the product, the gradient of its input, and by the C++ that of the weight
        assert len(onednn_calls) == 2 + module.native.runs(x)
    else:
        assert not onednn_calls


@pytest.mark.parametrize("dtype", LOW)
def test_where_the_gemm_cannot_add_in_fp32_its_product_is_rounded_once(native, dtype):
    """On a CPU torch's addmm has no other output format."""
    assert weight_grads._tried_in_fp32(torch.device("cpu"), dtype) is False
    x, weight, bias, grad = inputs(dtype)
    main_grad = torch.full(weight.shape, 3.0)
    linear(x, weight, bias, accumulate_into=main_grad).backward(grad)
    exact = 3 + formulas(x, weight, bias, grad)[2]
    if native:
        assert (main_grad - exact).abs().max() > 1e-4
    else:
        torch.testing.assert_close(main_grad.double(), exact, rtol=1e-6, atol=1e-5)


def test_only_cuda_and_16_bits_are_tried(monkeypatch):
    tried = []
    monkeypatch.setattr(weight_grads, "_tried_in_fp32", lambda *one: tried.append(one) or True)
    weight_grads.gemm_adds_in_fp32.cache_clear()
    for device in ("cpu", "meta", "cuda"):
        for dtype in (torch.float32, *LOW):
            can = weight_grads.gemm_adds_in_fp32(torch.device(device), dtype)
            assert can is (device == "cuda" and dtype in LOW)
    assert len(tried) == len(LOW)
    weight_grads.gemm_adds_in_fp32.cache_clear()
