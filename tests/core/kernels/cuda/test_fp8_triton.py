"""The Triton kernels of FP8: what they compute, by Triton's interpreter (as a program), and how they
are compiled for GPUs. Neither needs a device."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch

from megatron.kernels import fp8
from tests.forkrun import ROOT

FORMATS = {torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5"}


@pytest.mark.peers
def test_the_kernels_are_the_formulas():
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "tests.core.kernels.cuda.test_fp8_triton"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr


def same_bits(a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.dtype == b.dtype and torch.equal(*(t.contiguous().view(torch.uint8) for t in (a, b)))


def scales(amax: float) -> None:
    for given in (None, torch.tensor(37.0)):
        args = torch.tensor(amax), given, 448.0
        torch.testing.assert_close(
            torch.ops.megatron.fp8_scale(*args),
            fp8.scale_pair(*args),
            rtol=0,
            atol=0,
            equal_nan=True,
        )


def casts(shape: tuple[int, ...], x_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """Numbers of the format, with a scale that leaves them so: the instruction rounds, and the
    interpreter rounds wrongly, and loses NaN. And numbers beyond it."""
    scale = torch.tensor(0.25)
    x = fp8.quantize(torch.randn(shape) * 20, dtype, torch.tensor(1.0)).to(x_dtype) * 4
    beyond = 32768.0 if x_dtype == torch.float16 else 1e6
    x[..., 0, 1] = beyond
    x[..., -1, -1] = -beyond
    for one in (x, x.mT.contiguous().mT):
        wanted = fp8.cast(one, dtype, torch.stack((scale, scale)))
        for rows, columns in ((True, True), (True, False), (False, True)):
            found = torch.ops.megatron.fp8_cast(one, scale, dtype, rows, columns)
            for got, expected, there in zip(found, wanted, (rows, columns), strict=False):
                if there:
                    same_bits(got, expected)
                else:
                    assert got.numel() == 0


def maxima(dtype: torch.dtype) -> None:
    x = torch.randn(3, 20000).to(dtype)
    x[1, 777] = -9
    for worst in (None, -torch.inf, torch.nan):
        if worst is not None:
            x[2, 19990] = worst
        amax = torch.zeros(())
        torch.ops.megatron.fp8_amax_(amax, x)
        assert torch.equal(amax.nan_to_num(-1), fp8.largest_magnitude(x).nan_to_num(-1))


@pytest.mark.peers
@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("name", ["amax", "scale", *FORMATS.values()])
def test_the_kernels_compile(name, capability):
    """Numbers are rounded by the format's instruction; loads and both stores have 16 bytes."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from megatron.kernels.cuda import fp8_triton as kernels

    pointers = {"amax": "*fp32", "scale": "*fp32", "given": "*fp32", "out": "*fp32", "x": "*bf16"}
    others = pointers | dict.fromkeys(("largest", "most", "limit"), "fp32")
    kernel, constants = {
        "amax": (kernels._amax_kernel, {"BLOCK": kernels.BLOCK, "STEPS": kernels.STEPS}),
        "scale": (kernels._scale_kernel, {"FIXED": False}),
    }.get(name, (kernels._cast_kernel, {"ROWS": True, "COLUMNS": True, "T": kernels.TILE}))
    if name == "amax":
        others["amax"] = "*i32"
    others |= {"rows": f"*{name}", "columns": f"*{name}"}
    names = kernel.arg_names
    types = {one: others.get(one, "i32") for one in names} | dict.fromkeys(constants, "constexpr")
    divisible = {
        (i,): [["tt.divisibility", 16]] for i, one in enumerate(names) if types[one][0] in "*i"
    }
    source = ASTSource(
        kernel, types, {(names.index(one),): value for one, value in constants.items()}, divisible
    )
    target = GPUTarget("cuda", capability, 32)
    ptx = triton.compile(source, target=target, options={"num_warps": 8}).asm["ptx"]
    if name == "scale":
        assert "div.rn.f32" in ptx
        return
    assert "ld.global.v4.b32" in ptx
    if name != "amax":
        assert "max.NaN.f32" in ptx or "min.NaN" in ptx
        assert ("e4m3x2" if name == "fp8e4nv" else "e5m2x2") + ".f32" in ptx
        assert set(re.findall(r"st\.global\S*", ptx)) == {"st.global.v4.b32"}


if __name__ == "__main__":
    from megatron.kernels.cuda import fp8_ops, fp8_triton

    for operation, run in fp8_triton.RUNS.items():
        fp8_ops.LIBRARY.impl(operation, run, "CPU")
    torch.manual_seed(1)
    for amax in (0.0, 1e-44, 1e-38, 13.6875, 3e38, float("inf"), float("nan")):
        scales(amax)
    for x_dtype in (torch.bfloat16, torch.float16, torch.float32):
        maxima(x_dtype)
        for dtype in FORMATS:
            casts((144, 272), x_dtype, dtype)
            casts((2, 48, 16), x_dtype, dtype)
