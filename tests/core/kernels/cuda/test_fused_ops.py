"""SwiGLU, rotary positions and dropout of CUDA: one launch each on the meta device, and what the
kernels compute, by Triton's interpreter."""

import os
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

import megatron.kernels.cuda as cuda_kernels
from megatron.kernels.cross_entropy import CROSS_ENTROPY
from megatron.kernels.cuda import availability, fused_ops
from megatron.kernels.gated_activations import GATED
from megatron.kernels.rows import ROW_BLOCKED, RowSpec
from megatron.kernels.select import listed
from tests.core.kernels import functional
from tests.core.kernels.cuda.launches import Launches
from tests.forkrun import ROOT

TABLES = [torch.empty(7, 8, device="meta") for _ in range(2)]
CALLS = {
    "swiglu": lambda x, fused: functional.swiglu(x, fused=fused),
    "rotate": lambda x, fused: functional.apply_rotary(x, *TABLES, fused=fused),
    "drop": lambda x, fused: functional.dropout(x, 0.1, 7),
}
MANY = torch.empty(fused_ops.MANY_ROWS, 48, device="meta")
VECTORS = [torch.empty(48, device="meta", requires_grad=True) for _ in range(2)]
SUMS = {
    "LayerNorm": (
        lambda x: functional.layer_norm(x, *VECTORS, 1e-5),
        ["native_layer_norm", "norm_backward", "sum"],
    ),
    "RMSNorm": (
        lambda x: functional.rms_norm(x, VECTORS[0], 1e-5),
        ["rms_norm", "norm_backward", "sum"],
    ),
    "bias": (
        lambda x: functional.linear(x, torch.empty(48, 48, device="meta"), VECTORS[1]),
        ["addmm", "column_sums", "sum", "mm"],
    ),
}


def launched(call: Callable, dtype: torch.dtype, fused: bool = True) -> list[str]:
    """The operations of a call and of its gradient."""
    x = torch.empty(7, 2, 2, 16, dtype=dtype, device="meta", requires_grad=True)
    with Launches() as launches:
        out = call(x, fused)
        torch.autograd.grad(out, x, torch.empty_like(out))
    return launches.names


@pytest.mark.parametrize("name", CALLS)
def test_one_launch_forward_and_one_backward(name):
    for dtype in availability.DTYPES:
        names = launched(CALLS[name], dtype)
        assert names == [name, "swiglu_backward" if name == "swiglu" else name]
    assert name not in launched(CALLS[name], torch.float64)
    if name != "drop":
        assert name not in launched(CALLS[name], torch.float32, fused=False)


@pytest.mark.parametrize("name", SUMS)
def test_sums_of_many_rows_are_a_kernel_and_the_sum_of_its_parts(name):
    """Few rows, wider norms and other dtypes are torch's."""
    call, names = SUMS[name]
    with Launches() as launches:
        torch.autograd.grad(
            call(MANY.requires_grad_()), [MANY, VECTORS[-1]], MANY, allow_unused=True
        )
    assert launches.names == names
    with Launches() as launches:
        call(MANY[1:]).sum().backward()
    assert not {"norm_backward", "column_sums"} & set(launches.names)


def test_dropout_adds_to_the_residual_stream_in_its_kernel():
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.empty(7, 2, 16, device="meta", dtype=torch.bfloat16, requires_grad=True)
        residual = torch.empty(7, 2, 16, device="meta", dtype=dtype)
        with Launches() as launches:
            out = functional.dropout(x, 0.1, 7, residual)
            assert out.dtype == dtype
            out.backward(torch.empty_like(out))
        assert [name for name in launches.names if name != "_to_copy"] == ["drop", "drop"]


def test_where_they_run(monkeypatch):
    cuda = torch.device("cuda", 0)
    launched = []
    kernels = SimpleNamespace(RUNS={"swiglu": lambda x: launched.append(x) or x})
    monkeypatch.setattr(cuda_kernels, "triton_kernels", kernels, raising=False)
    monkeypatch.setattr(torch, "zeros", lambda *_, device: torch.ones(2, 1))
    monkeypatch.setattr(availability, "load_problem", lambda *_: "no triton")
    availability._launch_problem.cache_clear()
    assert availability.unavailable_reason(cuda, torch.bfloat16) == "no triton" and not launched
    monkeypatch.setattr(availability, "load_problem", lambda *_: None)
    for _ in range(2):  # it is tried once
        assert availability.unavailable_reason(cuda, torch.bfloat16) is None and len(launched) == 1
    assert availability.unavailable_reason(torch.device("cpu"), torch.bfloat16)
    assert availability.unavailable_reason(cuda, torch.float64)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Failed to find C compiler.\nPlease specify"),
        subprocess.CalledProcessError(1, ["gcc", "main.c"]),
        OSError("Python.h"),
    ],
)
def test_a_first_launch_that_fails_is_a_reason(monkeypatch, error):
    """As on images without a C compiler: operations then run as several kernels of torch."""

    def launch(_):
        raise error

    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(availability, "load_problem", lambda *_: None)
    kernels = SimpleNamespace(RUNS={"swiglu": launch})
    monkeypatch.setattr(cuda_kernels, "triton_kernels", kernels, raising=False)
    monkeypatch.setattr(torch, "zeros", lambda *_, device: torch.ones(2, 1))
    availability._launch_problem.cache_clear()
    reason = availability.unavailable_reason(cuda, torch.bfloat16)
    assert str(error).splitlines()[0] in reason and "\n" not in reason
    assert availability.fused_ops(cuda, torch.bfloat16) is None
    monkeypatch.setattr(availability, "unavailable_reason", lambda *_: reason)
    spec = RowSpec(torch.device("meta"), torch.bfloat16)
    rows = {r.implementation: r for r in listed("swiglu", GATED["swiglu"], spec)}
    assert rows["torch"].on and not rows["Triton"].on and rows["Triton"].reason == reason
    rows = {r.implementation: r for r in listed("cross entropy", CROSS_ENTROPY, spec)}
    assert rows[ROW_BLOCKED].on and rows["Triton"].reason == reason
    availability._launch_problem.cache_clear()


def test_another_package_may_define_the_namespace():
    program = (
        "import torch; theirs = torch.library.Library('megatron', 'DEF'); "
        "import megatron.kernels.cuda.fused_ops"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


@pytest.mark.peers
@pytest.mark.campaign
def test_the_kernels_are_the_formulas():
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "tests.core.kernels.cuda.interpreted"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
