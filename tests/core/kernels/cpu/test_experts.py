"""The C++ of experts against the formulas in fp64, and where it is not used."""

import pytest
import torch
import torch.nn.functional as F

from megatron.kernels import grouped_linear as kernels
from megatron.kernels.cpu import experts

CPU = torch.device("cpu")
# inputs, outputs, rows of each group
CASES = [
    (1, 1, [1]),
    (7, 5, [3, 0, 4]),
    (48, 96, [8, 16]),
    (33, 50, [0, 0, 9]),
    (70, 37, [12, 1, 0, 300, 7]),
    (600, 40, [5, 530]),
    (20, 100, [i % 5 for i in range(20)]),
    (4, 4, [0, 0]),
]


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def results(
    case, copied: bool, accumulate: bool, wide: bool, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """Output and gradients of `grouped_linear` in `dtype`, or if `wide` in fp64 with what it reads
    rounded to `dtype`; of copies of half as many rows if `copied`."""
    torch.manual_seed(1)
    inputs, outputs, counts = case
    n = sum(counts)
    rows = max(1, n // 2 + 1)
    order = torch.randperm(2 * rows)[:n]
    copies = kernels.Copies.of(order, 2, rows) if copied else None
    drawn = draw(rows if copied else n, inputs), draw(len(counts), outputs, inputs)
    x, weight = (t.detach().to(dtype).requires_grad_() for t in drawn)
    grad = torch.randn(rows if copied else n, outputs).to(dtype)
    total = torch.ones(weight.shape) if accumulate else None
    if wide:
        x, weight = (t.detach().double().requires_grad_() for t in (x, weight))
        total = None if total is None else total.double()
    y = kernels.grouped_linear(x, weight, counts, total, of=copies, to=copies)
    y.backward(grad.to(y.dtype))
    return [y.detach(), x.grad, weight.grad if total is None else total]


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_value_and_gradients_are_those_of_the_loop_in_fp64(level, case, copied, accumulate):
    found = results(case, copied, accumulate, False)
    right = results(case, copied, accumulate, True)
    for got, wanted in zip(found, right, strict=True):
        assert got.dtype == torch.float32
        size = max(case[0], case[1], max(case[2]))
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=3e-6 * size**0.5)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_number_of_threads_changes_no_bit(level, monkeypatch, case):
    one = results(case, True, True, False)
    for threads in (2, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        for a, b in zip(one, results(case, True, True, False), strict=True):
            assert torch.equal(a, b)


BF16_CASES = [
    (2, 2, [1]),
    (34, 50, [0, 3, 9]),
    (48, 96, [8, 16]),
    (70, 38, [12, 1, 0, 301, 7]),
    (1060, 40, [5, 530]),
    (64, 36, [2200]),
    (20, 100, [i % 5 for i in range(20)]),
]


@pytest.fixture
def bf16():
    """The C++ for AVX512, on a processor where it multiplies bf16."""
    if reason := experts.unavailable_reason(CPU, torch.float32):
        pytest.skip(reason)
    if not experts.multiplies(*(torch.zeros(2, 2, 2, dtype=torch.bfloat16) for _ in range(2))):
        pytest.skip("needs a CPU with AVX512_BF16 and without AMX")


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("case", BF16_CASES, ids=str)
def test_bf16_sums_in_fp32(bf16, case, copied, accumulate):
    """The output is rounded once for each copy; weight gradients that are added to fp32 are not
    rounded."""
    *found, grad = results(case, copied, accumulate, False, torch.bfloat16)
    *right, wanted = results(case, copied, accumulate, True, torch.bfloat16)
    for got, expected in zip(found, right, strict=True):
        assert got.dtype == torch.bfloat16
        error = (got.double() - expected).abs().max()
        assert error <= 2**-7 * max(1.0, expected.abs().max().item())
    slack = 1e-5 if accumulate else 2**-8
    assert grad.dtype == (torch.float32 if accumulate else torch.bfloat16)
    size = max(case[0], case[1], max(case[2]))
    torch.testing.assert_close(grad.double(), wanted, rtol=slack, atol=3e-6 * size**0.5)


@pytest.mark.parametrize("case", BF16_CASES, ids=str)
def test_the_number_of_threads_changes_no_bit_in_bf16(bf16, monkeypatch, case):
    one = results(case, True, True, False, torch.bfloat16)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for a, b in zip(one, results(case, True, True, False, torch.bfloat16), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 16, 37, 192])
def test_swiglu_times_probabilities(level, dtype, width):
    torch.manual_seed(2)
    gate_up = (4 * torch.randn(9, 2, width)).to(dtype).requires_grad_()
    probs = torch.rand(9, requires_grad=True)
    y = kernels.weighted_swiglu(gate_up, probs)
    wide = [t.detach().double().requires_grad_() for t in (gate_up, probs)]
    gate, up = wide[0].unbind(1)
    right = F.silu(gate) * up * wide[1].unsqueeze(1)
    grad = torch.randn(right.shape).to(dtype)
    found = torch.autograd.grad(y, (gate_up, probs), grad)
    expected = torch.autograd.grad(right, wide, grad.double())
    assert y.dtype == found[0].dtype == dtype and found[1].dtype == torch.float32
    slack = 1e-5 if dtype == torch.float32 else 1e-2
    for a, b in zip((y, *found), (right, *expected), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=slack, atol=slack)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_copies_that_are_there(level, dtype):
    x = torch.randn(5, 21).to(dtype)
    numbers = torch.tensor([[0, 3], [-1, 2], [-1, -1], [4, 1]])
    right = torch.stack([x.double()[[i for i in row if i >= 0]].sum(0) for row in numbers.tolist()])
    torch.testing.assert_close(experts.sum_rows(x, numbers), right.to(dtype))


def test_where_it_is_not_used():
    assert experts.unavailable_reason(torch.device("cuda"), torch.float32)
    assert experts.unavailable_reason(CPU, torch.float64)
    assert experts.unavailable_reason(CPU, torch.bfloat16)
    single, double = torch.zeros(2, 2, 2), torch.zeros(2, 2, 2, dtype=torch.float64)
    assert not experts.multiplies(single, single, double)
    assert not experts.multiplies(double, double)
    half = single.bfloat16()
    assert not experts.multiplies(half, half, half)
    assert not experts.multiplies(half[..., :1], half[..., :1].contiguous())
