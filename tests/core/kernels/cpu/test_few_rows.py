"""Linear layers of a few rows by C++ against the formula in fp64, and where the C++ is not used."""

import pytest
import torch
import torch.nn.functional as F

from megatron.inference.linear import product
from megatron.kernels.cpu import few_rows

CPU = torch.device("cpu")
SHAPES = [(1, 1), (3, 7), (33, 50), (64, 160), (130, 576), (17, 4001)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_number_of_rows(level, shape, bias, dtype):
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(shape, generator=generator).to(dtype)
    b = torch.randn(shape[0], generator=generator) if bias else None
    for rows in range(1, few_rows.MOST_ROWS + 1):
        x = torch.randn(rows, 1, shape[1], generator=generator)
        right = F.linear(x.double(), weight.double(), None if b is None else b.double())
        found = few_rows.linear(x, weight, b)
        assert found.shape == right.shape
        torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-5 * shape[1] ** 0.5)


def test_threads_give_the_same_bits(level, monkeypatch):
    weight = torch.randn(3000, 300)
    x = torch.randn(5, 300)
    one = few_rows.linear(x, weight, None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert torch.equal(one, few_rows.linear(x, weight, None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 16, 17, 100])
def test_the_layer_is_that_of_torch_in_every_dtype(dtype, rows):
    weight = torch.randn(2, 24, 40).to(dtype)
    bias = torch.randn(2, 24).to(dtype)
    x = torch.randn(rows, 40).to(dtype)
    found = product(x, weight.flatten(0, 1), bias.flatten())
    assert found.dtype == dtype
    torch.testing.assert_close(found, F.linear(x, weight.flatten(0, 1), bias.flatten()))
    turned = product(x[:, :24], weight[0].t())
    torch.testing.assert_close(turned, F.linear(x[:, :24], weight[0].t()))


def test_without_the_build_torch_computes(monkeypatch):
    monkeypatch.setattr(few_rows, "load", lambda capability: "not built")
    weight = torch.randn(8, 8)
    x = torch.randn(1, 8)
    assert torch.equal(product(x, weight), F.linear(x, weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_number_of_16_bits_is_read_as_it_is(level, dtype):
    """Subnormal ones and infinities, too; NaN stays NaN."""
    weight = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(dtype).view(-1, 1)
    found = few_rows.linear(torch.ones(1, 1), weight, None)
    torch.testing.assert_close(found[0], weight.flatten().float(), rtol=0, atol=0, equal_nan=True)
