"""The Triton kernels on the CPU, by Triton's interpreter, against the formulas: a program that
test_fused_ops.py starts, because the interpreter is chosen before triton is imported."""

from __future__ import annotations

import torch

from megatron.kernels import functional
from megatron.kernels.cuda import fused_ops, triton_kernels

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.002}


def same(ours, formula, x: torch.Tensor) -> None:
    """Result and gradient, the formula in fp64."""
    wide = x.detach().double().requires_grad_()
    x = x.detach().requires_grad_()
    got = ours(x)
    wanted = formula(wide)
    grad = torch.randn_like(wanted).to(x.dtype)
    assert got.dtype == x.dtype and got.shape == wanted.shape
    pairs = (
        (got, wanted),
        (torch.autograd.grad(got, x, grad)[0], torch.autograd.grad(wanted, wide, grad.double())[0]),
    )
    close = TOLERANCE[x.dtype]
    for one, two in pairs:
        torch.testing.assert_close(one.double(), two, rtol=close, atol=close)


def swiglu(dtype: torch.dtype) -> None:
    x = torch.randn(5, 3, 2, 700).to(dtype)
    formula = lambda t: functional.swiglu(t, fused=False)  # noqa: E731
    same(fused_ops.SwiGlu.apply, formula, x)
    same(fused_ops.SwiGlu.apply, formula, x.transpose(0, 1))


def rotary(dtype: torch.dtype) -> None:
    for interleaved in (False, True):
        for positions in (7, torch.arange(14).view(2, 7)):
            for x in (torch.randn(7, 2, 3, 20), torch.randn(7, 2, 3, 60)[..., 20:40]):
                cos, sin = functional.rotary_tables(positions, 16)
                tables = [t.view(7, -1, 1, 8) for t in (cos, sin)]
                same(
                    lambda t, i=interleaved, tables=tables: fused_ops.Rotary.apply(t, *tables, i),
                    lambda t, i=interleaved, c=cos, s=sin: functional.apply_rotary(
                        t, c, s, interleaved=i, fused=False
                    ),
                    x.to(dtype),
                )


def dropout(dtype: torch.dtype) -> None:
    p = 0.1
    x = (torch.rand(200, 150) + 1).to(dtype).requires_grad_()
    call = lambda seed: fused_ops.Dropout.apply(x, p, torch.tensor(seed))  # noqa: E731
    out = call(2**62 + 5)
    kept = out != 0
    (grad,) = torch.autograd.grad(out, x, torch.ones_like(x))
    factors = kept.double() / (1 - p)
    for got, wanted in ((out, x.double() * factors), (grad, factors)):
        torch.testing.assert_close(got.double(), wanted, rtol=TOLERANCE[dtype], atol=0)
    assert abs(kept.double().mean() - (1 - p)) < 5 * (p * (1 - p) / x.numel()) ** 0.5
    assert torch.equal(call(2**62 + 5), out)
    assert not torch.equal(call(5) != 0, kept)
    assert not torch.equal(kept[0], kept[1])


if __name__ == "__main__":
    torch.manual_seed(1)
    for name, run in triton_kernels.RUNS.items():
        fused_ops.LIBRARY.impl(name, run, "CPU")
    for dtype in TOLERANCE:
        swiglu(dtype)
        rotary(dtype)
        dropout(dtype)
