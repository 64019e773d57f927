"""Causal attention in bf16 on a CPU by this suite's C++ (bf16_attention.cpp), with AMX or
AVX512_BF16 instructions."""

from functools import cache
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.kernels.cpu.native import BUILD
from megatron.kernels.linear import low_precision_is_native
from megatron.kernels.qkv import contiguous_vectors, gradients_like, sizes

NAME = "megatron.kernels.cpu.bf16_attention_cpp"
INTERFACE = 2
BLOCK = 32  # of queries and keys in the C++
LONGEST = 8192  # scores of 32 lines of so many positions still fit the L2 cache of a core


class _Kernel(NamedTuple):
    library: ModuleType
    amx: bool  # does it multiply on AMX tiles? else by AVX512_BF16


@cache
def _load() -> _Kernel | str:
    """The C++ and its instructions for GEMMs, or why it does not run here (a str)."""
    amx = torch.cpu._is_amx_tile_supported()
    if not (amx or getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()):
        return "needs a CPU with AMX or AVX512_BF16"
    try:
        module = import_module(NAME)
    except ImportError as error:
        return f"{NAME} is not built ({error}); {BUILD} builds it"
    if getattr(module, "INTERFACE", None) != INTERFACE:
        return f"{NAME} is of another version; {BUILD} rebuilds it"
    return _Kernel(module, amx and module.tiles_are_there())


def _loaded() -> _Kernel:
    kernel = _load()
    assert isinstance(kernel, _Kernel), kernel
    return kernel


def instructions() -> str:
    """The instructions used for GEMMs on this processor, if `unavailable_reason` has found
    nothing."""
    return "AMX" if _loaded().amx else "AVX512_BF16"


def unavailable_reason(head_dim: int, seq_length: int) -> str | None:
    """Why the C++ does not compute attention of heads so wide on a CPU, None if it does."""
    if torch.compiler.is_compiling():
        return "not supported under torch.compile"
    if head_dim % 32 or not 0 < head_dim <= 256:
        return f"needs a head width that is a multiple of 32 up to 256, not {head_dim}"
    if seq_length > LONGEST:
        return f"supports at most {LONGEST} positions"
    if not low_precision_is_native("cpu", torch.bfloat16):
        return "needs a CPU with bf16 in oneDNN"
    kernel = _load()
    return kernel if isinstance(kernel, str) else None


def tile_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    dropout_p: float = 0.0,
    dropout_seed: int = 0,
    run_starts: Tensor | None = None,
) -> Tensor:
    """softmax(scale q k^T, causal) v in bf16: q [s, b, n, d], k and v [s, b, g, d] -> [s, b, n, d].

    `run_starts` int32 [b, s]: the first position that each one sees, None for 0 everywhere; it must
    not fall. The dropout mask is a function of the seed and of each probability's sample, head,
    query and key.
    """
    assert 0.0 <= dropout_p <= 1.0 - 2**-16, (
        f"dropout probability must be in [0, 1), got {dropout_p}"
    )
    return _TileAttention.apply(q, k, v, scale, (dropout_p, dropout_seed % 2**64), run_starts)


def keep_mask(s: int, b: int, n: int, dropout_p: float, dropout_seed: int) -> Tensor:
    """What dropout of `tile_attention` keeps of n heads: bool [b, n, s, s]. For tests: nothing else
    holds it."""
    mask = torch.empty(b, n, s, s, dtype=torch.uint8)
    _loaded().library.keep_mask(mask.data_ptr(), (s, b, n), dropout_p, dropout_seed % 2**64)
    return mask.bool()


def _steps(t: Tensor) -> tuple[int, int, int]:
    return t.stride(0), t.stride(1), t.stride(2)


def _address(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


class _TileAttention(torch.autograd.Function):
    """Keeps q, k, v, the output, and of each query the logarithm of its sum; dropout masks are
    generated again."""

    @staticmethod
    def forward(
        ctx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        dropout: tuple[float, int],
        run_starts: Tensor | None,
    ):
        q = contiguous_vectors(q)
        k = contiguous_vectors(k)
        v = contiguous_vectors(v)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        s, b, n, _ = q.shape
        log_sums = torch.empty(b, n, -(-s // BLOCK) * BLOCK)
        library, amx = _loaded()
        addresses = [_address(t) for t in (q, k, v, out, log_sums, run_starts)]
        steps = [_steps(t) for t in (q, k, v)]
        library.forward(
            addresses, steps, sizes(q, k), scale, *dropout, amx, torch.get_num_threads()
        )
        ctx.save_for_backward(q, k, v, out, log_sums, run_starts)
        ctx.scale = scale
        ctx.dropout = dropout
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_out: Tensor):
        q, k, v, out, log_sums, run_starts = ctx.saved_tensors
        grads = gradients_like(q, k, v)
        grad_out = contiguous_vectors(grad_out.to(q.dtype))
        tensors = [q, k, v, grad_out, out, log_sums.unsqueeze(-1), *grads]
        library, amx = _loaded()
        addresses = [_address(t) for t in (*tensors, run_starts)]
        steps = [_steps(t) for t in tensors]
        library.backward(
            addresses, steps, sizes(q, k), ctx.scale, *ctx.dropout, amx, torch.get_num_threads()
        )
        return *grads, None, None, None
