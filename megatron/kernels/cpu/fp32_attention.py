"""Causal attention on a CPU in fp32 arithmetic by this suite's C++ (fp32_attention.cpp)."""

from functools import cache, partial

import torch
from torch import Tensor

from megatron.kernels.cpu import native
from megatron.kernels.qkv import contiguous_vectors, gradients_like, sizes
from megatron.kernels.sinks import sink_grads, with_sinks

INTERFACE = 4
BLOCK = 32  # queries of a block in the C++
# Up to so many positions: scores of BLOCK queries against more keys do not fit a core's second
# cache, or (AVX2) torch's kernel is faster (docs/benchmarks.md).
LONGEST = {"AVX512": 8192, "AVX2": 4096}
ONE_THREAD = 1 << 17  # multiplications of queries and keys


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
        return "needs equal head widths of queries and keys"
    capability = native.capability()
    if seq_length > LONGEST.get(capability, seq_length):
        return f"supports at most {LONGEST[capability]} positions"
    module = load(capability)
    return module if isinstance(module, str) else None


def vector_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(scale q k^T, causal) v: q [s, b, n, d], k [s, b, g, d] and v [s, b, g, w] of one
    dtype, fp32 or bf16 -> [s, b, n, w]. window: a position sees itself and the `window` - 1 before
    it, None for all before it. softcap: scores x become softcap tanh(x / softcap). sinks [n]: of
    each head one more score, which has no value."""
    # The C++ reads memory by these sizes.
    assert q.dtype == k.dtype == v.dtype, (q.dtype, k.dtype, v.dtype)
    assert k.shape == (*q.shape[:2], k.shape[2], q.shape[3]), (q.shape, k.shape)
    assert v.shape[:3] == k.shape[:3], (k.shape, v.shape)
    options = q.shape[0] if window is None else window, scale, softcap or 0.0
    return _VectorAttention.apply(q, k, v, sinks, options)


def _call(name: str, dtype: torch.dtype, threads: int, *arguments) -> None:
    _function(name, dtype, native.capability())(*arguments, threads)


@cache
def _function(name: str, dtype: torch.dtype, capability: str):
    """The C++ function `name` for tensors of that dtype."""
    return getattr(load(capability), f"{name}_{str(dtype).removeprefix('torch.')}")


def _threads(q: Tensor) -> int:
    """One for so few multiplications that another would start in vain."""
    return torch.get_num_threads() if len(q) * q.numel() >= ONE_THREAD else 1


class _VectorAttention(torch.autograd.Function):
    """Keeps q, k, v, the output, and of each query the logarithm of its sum of exponentials."""

    @staticmethod
    def forward(
        ctx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        options: tuple[int, float, float],  # window, scale, cap
    ) -> Tensor:
        q = contiguous_vectors(q)
        k = contiguous_vectors(k)
        v = contiguous_vectors(v)
        s, b, n, _ = q.shape
        out = q.new_empty(s, b, n, v.shape[-1])
        log_sums = torch.empty(b, n, -(-s // BLOCK) * BLOCK)
        addresses = [t.data_ptr() for t in (q, k, v, out, log_sums)]
        steps = [t.stride()[:3] for t in (q, k, v)]
        widths = *sizes(q, k), v.shape[-1]
        _call("forward", q.dtype, _threads(q), addresses, steps, widths, *options)
        if sinks is not None:
            of_queries = _by_query(log_sums, s)
            out, total = with_sinks(out, of_queries, sinks)
            of_queries.copy_(total)
        ctx.save_for_backward(q, k, v, sinks, out, log_sums)
        ctx.options = options
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_out: Tensor):
        q, k, v, sinks, out, log_sums = ctx.saved_tensors
        grads = gradients_like(q, k, v)
        grad_out = contiguous_vectors(grad_out.to(q.dtype))
        tensors = [q, k, v, grad_out, out, log_sums.unsqueeze(-1), *grads]
        addresses = [t.data_ptr() for t in tensors]
        steps = [t.stride()[:3] for t in tensors]
        widths = *sizes(q, k), v.shape[-1]
        _call("backward", q.dtype, _threads(q), addresses, steps, widths, *ctx.options)
        of_sinks = None
        if sinks is not None:
            of_sinks = sink_grads(out, _by_query(log_sums, len(q)), grad_out, sinks)
        return *grads, of_sinks, None


def _by_query(log_sums: Tensor, s: int) -> Tensor:
    """[b, n, rows] -> [s, b, n], a view of the rows that are queries."""
    return log_sums[..., :s].permute(2, 0, 1)
