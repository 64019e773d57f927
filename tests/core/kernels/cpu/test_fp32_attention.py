"""Attention in C++ with fp32 arithmetic against the formula in fp64, for each set of instructions
this processor has."""

import math
import subprocess
import sys

import pytest
import torch

from megatron.kernels.cpu import fp32_attention as module
from tests.core.kernels.attend import attention, plain_attention, select_attention
from tests.forkrun import ROOT

CPU = torch.device("cpu")
HERE = torch.backends.cpu.get_cpu_capability()
REASON = module.load(HERE)
needs_kernel = pytest.mark.skipif(isinstance(REASON, str), reason=str(REASON))


def inputs(s, b, n, g, d, dtype=torch.float32, seed=1):
    """q, k and v as views of one fused tensor, and a gradient that is not contiguous."""
    generator = torch.Generator().manual_seed(seed)
    fused = torch.randn(s, b, g, n // g + 2, d, generator=generator).to(dtype)
    parts = fused.split((n // g, 1, 1), 3)
    tensors = [parts[0].flatten(2, 3), parts[1].squeeze(3), parts[2].squeeze(3)]
    grad = torch.randn(b, n, s, d, generator=generator).to(dtype).permute(2, 0, 1, 3)
    return [t.detach().requires_grad_() for t in tensors], grad


def results(call, tensors, grad):
    out = call(*tensors)
    return out.detach(), *torch.autograd.grad(out, tensors, grad)


def expected(tensors, grad):
    wide = [t.detach().double().requires_grad_() for t in tensors]
    return results(
        lambda *t: plain_attention(*t, 1.0 / math.sqrt(t[0].shape[-1])), wide, grad.double()
    )


def vectors(q, k, v):
    return attention(q, k, v, scale=1.0 / math.sqrt(q.shape[-1]), implementation="cpp_fp32")


@pytest.mark.parametrize(
    "s, b, n, g, d",
    [
        (64, 12, 4, 4, 32),
        (33, 2, 4, 2, 48),
        (2, 1, 1, 1, 16),
        (100, 2, 2, 1, 20),
        (131, 1, 6, 2, 64),
        (256, 1, 1, 1, 128),
        (31, 3, 2, 2, 5),
    ],
)
def test_fp32_agrees_with_fp64(level, s, b, n, g, d):
    tensors, grad = inputs(s, b, n, g, d)
    for mine, right in zip(results(vectors, tensors, grad), expected(tensors, grad), strict=True):
        assert (mine - right).norm() <= 1e-6 * right.norm()


@pytest.mark.parametrize("d, w", [(192, 128), (24, 40), (5, 3)])
@pytest.mark.parametrize("s", [33, 100])
def test_values_of_another_width_than_keys(level, s, d, w):
    (q, k, _), _ = inputs(s, 2, 4, 2, d)
    (_, _, v), grad = inputs(s, 2, 4, 2, w, seed=2)
    tensors = q, k, v
    for mine, right in zip(results(vectors, tensors, grad), expected(tensors, grad), strict=True):
        assert mine.shape == right.shape
        assert (mine - right).norm() <= 1e-6 * right.norm()


def test_bf16_is_rounded_once(level):
    tensors, grad = inputs(70, 2, 4, 2, 32, torch.bfloat16)
    for mine, right in zip(results(vectors, tensors, grad), expected(tensors, grad), strict=True):
        assert mine.dtype == torch.bfloat16
        assert (mine - right).norm() <= 4e-3 * right.norm()


def test_large_scores_do_not_overflow(level):
    tensors, grad = inputs(40, 1, 2, 2, 32)
    tensors = [(60.0 * t).detach().requires_grad_() if i < 2 else t for i, t in enumerate(tensors)]
    for mine, right in zip(results(vectors, tensors, grad), expected(tensors, grad), strict=True):
        assert torch.isfinite(mine).all()
        assert (mine - right).norm() <= 1e-3 * right.norm()


def test_later_keys_are_not_read(level):
    (q, k, v), _ = inputs(50, 2, 2, 2, 32)
    before = vectors(q, k, v)
    k = k.detach().clone()
    v = v.detach().clone()
    k[20:], v[20:] = 1e4, -1e4
    assert torch.equal(vectors(q, k, v)[:20], before[:20])


def test_nan_stays_nan(level):
    (q, k, v), grad = inputs(40, 1, 1, 1, 32)
    k = k.detach().clone()
    k[7, 0, 0, 3] = torch.nan
    out = vectors(q, k, v)
    assert not torch.isnan(out[:7]).any() and torch.isnan(out[7:]).all()


def test_results_do_not_depend_on_the_number_of_threads(level):
    tensors, grad = inputs(96, 3, 4, 2, 32)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = results(vectors, tensors, grad)
        torch.set_num_threads(3)
        three = results(vectors, tensors, grad)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(one, three, strict=True))


@needs_kernel
def test_it_is_chosen_for_fp32_and_emulated_bf16_alone():
    assert select_attention(CPU, torch.float32, 0.0, False, seq_length=256)[0] == "cpp_fp32"
    assert select_attention(CPU, torch.float64, 0.0, False, seq_length=256)[0] == "chunked"
    assert select_attention(CPU, torch.float32, 0.1, False, seq_length=256)[0] == "chunked"
    assert select_attention(CPU, torch.float32, 0.0, True, seq_length=256)[0] == "chunked"
    assert select_attention(CPU, torch.float32, 0.0, False, seq_length=10**6)[0] == "sdpa"
    assert (
        select_attention(torch.device("cuda"), torch.float32, 0.0, False, seq_length=256)[0]
        == "sdpa"
    )


NO_MEMORY = """
import resource, torch
from megatron.kernels.cpu.fp32_attention import vector_attention
torch.set_num_threads(2)
q, k, v = (torch.zeros(8000, 1, 2, 256) for _ in range(3))
vector_attention(q[:64], k[:64], v[:64], 0.1)  # threads and stacks are there
torch.empty_like(q)
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + (24 << 20)  # for the output, not for the scratch memory
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    vector_attention(q, k, v, 0.1)
except MemoryError:
    print("MemoryError")
"""


@needs_kernel
@pytest.mark.campaign
def test_no_memory_for_a_thread_is_an_error_and_no_crash():
    done = subprocess.run(
        [sys.executable, "-c", NO_MEMORY], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout.strip()) == (0, "MemoryError"), done.stderr[-2000:]


@needs_kernel
@pytest.mark.parametrize(
    "dtype, dropout, documents",
    [
        (torch.float64, 0.0, False),
        (torch.float32, 0.1, False),
        (torch.float32, 0.0, True),
        (torch.float16, 0.0, False),
    ],
)
def test_what_it_cannot_do_is_refused(dtype, dropout, documents):
    with pytest.raises(ValueError, match="'cpp_fp32'"):
        select_attention(CPU, dtype, dropout, documents, "cpp_fp32")
