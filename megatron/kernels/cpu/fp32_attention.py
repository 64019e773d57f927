"""Causal attention on a CPU in fp32 arithmetic by this suite's C++ (fp32_attention.cpp)."""

from functools import partial

import torch
from torch import Tensor

from megatron.kernels.cpu import native
from megatron.kernels.qkv import contiguous_vectors, gradients_like, sizes

INTERFACE = 2
BLOCK = 32  # queries of a block in the C++
# Up to so many positions: scores of BLOCK queries against more keys do not fit a core's second
# cache, or (AVX2) torch's kernel is faster (docs/benchmarks.md).
LONGEST = {"AVX512": 8192, "AVX2": 4096}


# fp32_attention.cpp as built for a processor of this capability, or why there is none (a str).
load = partial(native.load_built, "fp32_attention", INTERFACE)


def unavailable_reason(
    device: torch.device, dtype: torch.dtype, head_dim: int, seq_length: int
) -> str | None:
    """Why the C++ is unavailable for such tensors, None if it is available."""
    if torch.compiler.is_compiling():
        return "not supported under torch.compile"
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return "only fp32 and bf16 on a CPU"
    if head_dim < 1:
        return "needs equal head widths of queries, keys and values"
    capability = native.capability()
    if seq_length > LONGEST.get(capability, seq_length):
        return f"supports at most {LONGEST[capability]} positions"
    module = load(capability)
    return module if isinstance(module, str) else None


def vector_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None
) -> Tensor:
    """softmax(scale q k^T, causal) v: q [s, b, n, d], k and v [s, b, g, d] of one dtype, fp32 or
    bf16 -> [s, b, n, d]. window: a position sees itself and the `window` - 1 before it, None for
    all before it."""
    # The C++ reads memory by these sizes.
    assert q.dtype == k.dtype == v.dtype, (q.dtype, k.dtype, v.dtype)
    assert k.shape == v.shape == (*q.shape[:2], k.shape[2], q.shape[3]), (q.shape, k.shape, v.shape)
    return _VectorAttention.apply(q, k, v, scale, q.shape[0] if window is None else window)


def _call(name: str, dtype: torch.dtype, *arguments) -> None:
    library = load(native.capability())
    function = getattr(library, f"{name}_{str(dtype).removeprefix('torch.')}")
    function(*arguments, torch.get_num_threads())


class _VectorAttention(torch.autograd.Function):
    """Keeps q, k, v, the output, and of each query the logarithm of its sum of exponentials."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
        q = contiguous_vectors(q)
        k = contiguous_vectors(k)
        v = contiguous_vectors(v)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        s, b, n, _ = q.shape
        log_sums = torch.empty(b, n, -(-s // BLOCK) * BLOCK)
        addresses = [t.data_ptr() for t in (q, k, v, out, log_sums)]
        steps = [t.stride()[:3] for t in (q, k, v)]
        _call("forward", q.dtype, addresses, steps, sizes(q, k), window, scale)
        ctx.save_for_backward(q, k, v, out, log_sums)
        ctx.options = window, scale
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_out: Tensor):
        q, k, v, out, log_sums = ctx.saved_tensors
        grads = gradients_like(q, k, v)
        grad_out = contiguous_vectors(grad_out.to(q.dtype))
        tensors = [q, k, v, grad_out, out, log_sums.unsqueeze(-1), *grads]
        addresses = [t.data_ptr() for t in tensors]
        steps = [t.stride()[:3] for t in tensors]
        _call("backward", q.dtype, addresses, steps, sizes(q, k), *ctx.options)
        return *grads, None, None
