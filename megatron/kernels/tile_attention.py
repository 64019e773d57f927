"""Causal attention in bf16 on a CPU with AMX by this suite's C++ (tiles.cpp); knows tensors and addresses, no layer."""

from functools import cache

import torch
from torch import Tensor

from megatron.kernels.linear import low_precision_is_native

INTERFACE = 1
BLOCK = 32  # of queries and keys in the C++
LONGEST = 8192  # scores of 32 lines of so many positions still lie in a core's second cache


@cache
def _load():
    """The C++, or why it does not run here (a str)."""
    if not torch.cpu._is_amx_tile_supported():
        return "needs AMX, which this processor has not"
    try:
        from megatron.kernels import tiles_cpp as found
    except ImportError as error:
        return f"megatron.kernels.tiles_cpp is not built ({error}); pip install . builds it"
    if getattr(found, "INTERFACE", None) != INTERFACE:
        return "megatron.kernels.tiles_cpp is of another version; pip install . builds it anew"
    return found if found.tiles_are_there() else "the system gives no leave to use AMX"


def obstacle(device: torch.device, dtype: torch.dtype, head_dim: int, seq_length: int) -> str | None:
    """Why the C++ does not compute attention of heads so wide, None if it does."""
    if torch.compiler.is_compiling():
        return "torch.compile has none of it"
    if device.type != "cpu" or dtype != torch.bfloat16:
        return "for bf16 on a CPU"
    if head_dim % 32 or not 0 < head_dim <= 256:
        return f"needs heads of a multiple of 32 up to 256 wide, not {head_dim}"
    if seq_length > LONGEST:
        return f"needs at most {LONGEST} positions"
    if not low_precision_is_native(device.type, dtype):
        return "oneDNN has no bf16 here"
    found = _load()
    return found if isinstance(found, str) else None


def tile_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """softmax(scale q k^T, causal) v in bf16: q [s, b, n, d], k and v [s, b, g, d] -> [s, b, n, d]."""
    return _TileAttention.apply(q, k, v, scale)


def _steps(t: Tensor) -> tuple[int, int, int]:
    return t.stride()[:3]


def _lines(t: Tensor) -> Tensor:
    """With the numbers of a head side by side."""
    return t if t.stride(-1) == 1 or t.numel() == 0 else t.contiguous()


def _sizes(q: Tensor, k: Tensor) -> tuple[int, ...]:
    s, b, n, d = q.shape
    return s, b, n, k.shape[2], d


class _TileAttention(torch.autograd.Function):
    """Keeps q, k, v, the output, and of each query the logarithm of its sum."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        q, k, v = _lines(q), _lines(k), _lines(v)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        s, b, n, _ = q.shape
        log_sums = torch.empty(b, n, -(-s // BLOCK) * BLOCK)
        addresses = [t.data_ptr() for t in (q, k, v, out, log_sums)]
        _load().forward(addresses, [_steps(t) for t in (q, k, v)], _sizes(q, k), scale, torch.get_num_threads())
        ctx.save_for_backward(q, k, v, out, log_sums)
        ctx.scale = scale
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_out: Tensor):
        q, k, v, out, log_sums = ctx.saved_tensors
        grads = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v)]
        tensors = [q, k, v, _lines(grad_out.to(q.dtype)), out, log_sums.unsqueeze(-1), *grads]
        _load().backward([t.data_ptr() for t in tensors], [_steps(t) for t in tensors], _sizes(q, k), ctx.scale,
                         torch.get_num_threads())
        return *grads, None
