"""Torch's flash kernel on CUDA where its public entrance does not lead: attention with reproducible
dropout, and inside documents or windows. One operation (`megatron::flash_attention`), so that a
compiled layer seeds the generator too."""

import contextlib
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

from megatron import cuda
from megatron.kernels.attention_spec import AttentionCall, AttentionSpec
from megatron.kernels.cu_seqlens import cumulative_lengths
from megatron.kernels.cuda.availability import arranged
from megatron.kernels.cuda.fused_ops import LIBRARY
from megatron.kernels.sinks import sink_grads, with_sinks

# By torch's names for them, the faster first: title, how to install it.
NEWER = {
    "FA3": ("FlashAttention-3", "build hopper/ of github.com/Dao-AILab/flash-attention"),
    "FA4": ("FlashAttention-4", "pip install 'flash-attn-4[cu13]'"),
}
MULTIPLE = 8  # what the width of heads is a multiple of
DROPOUT_HEAD_DIM = 192  # the widest head that it trains with dropout on every GPU
TOLERANCE = 0.05  # between two kernels of 16 bits

# The arguments begin as those of torch's _flash_attention_forward.
LIBRARY.define(
    "flash_attention(Tensor q, Tensor k, Tensor v, Tensor? ends, Tensor? ends_k, int s, int s_k, "
    "float p, float scale, int? before, Tensor? seed) -> (Tensor, Tensor, Tensor, Tensor)"
)


def _forward(  # noqa: PLR0913 (as the operation)
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends: Tensor | None,
    ends_k: Tensor | None,
    s: int,
    s_k: int,
    p: float,
    scale: float,
    before: int | None,
    seed: Tensor | None,
) -> tuple[Tensor, ...]:
    with contextlib.nullcontext() if seed is None else cuda.kernel_seed(q.device, seed):
        return torch.ops.aten._flash_attention_forward(
            q, k, v, ends, ends_k, s, s_k, p, True, False, scale=scale, **_window(before)
        )[:4]


def _window(before: int | None) -> dict[str, int]:
    """The arguments for so many positions before each one; None for all."""
    return {} if before is None else {"window_size_left": before, "window_size_right": 0}


LIBRARY.impl("flash_attention", _forward, "CompositeExplicitAutograd")


class _FlashAttention(torch.autograd.Function):
    """Keeps what torch's derivative keeps; `state` is that of the generator in forward.

    q [s, b, n, d], k and v [s, b, g, d]. The kernel takes samples as they lie in memory; with
    documents it takes one row of them, sample by sample.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        *tensors, sinks, ends, p, scale, before, seed = args
        s = len(tensors[0])
        q, k, v = (t.transpose(0, 1) if ends is None else _row_of_samples(t) for t in tensors)
        out, lse, state, unused = torch.ops.megatron.flash_attention(
            q, k, v, ends, ends, s, s, p, scale, before, seed
        )
        if sinks is not None:
            out, by_position = with_sinks(out, lse.transpose(-1, -2), sinks)
            lse = by_position.transpose(-1, -2).contiguous()
        ctx.save_for_backward(q, k, v, sinks, out, lse, state, unused, ends)
        ctx.options = s, p, scale, before
        return out.transpose(0, 1) if ends is None else arranged(_positions(out, s), False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        q, k, v, sinks, out, lse, state, unused, ends = ctx.saved_tensors
        s, p, scale, before = ctx.options
        if ends is None:  # torch would copy both, slowly
            grad, out = (arranged(t, True).transpose(0, 1) for t in (grad, out.transpose(0, 1)))
        else:
            grad = _row_of_samples(grad)
        tensors = grad, q, k, v, out, lse
        of_sinks = None
        if sinks is not None:
            of_sinks = sink_grads(out, lse.transpose(-1, -2), grad, sinks)
        grads = torch.ops.aten._flash_attention_backward(
            *tensors, ends, ends, s, s, p, True, state, unused, scale=scale, **_window(before)
        )
        grads = (t.transpose(0, 1) if ends is None else _positions(t, s) for t in grads)
        return *grads, of_sinks, None, None, None, None, None


def _row_of_samples(x: Tensor) -> Tensor:
    """[s, b, n, d] -> [b s, n, d]; one sample is a row already."""
    x = x if x.shape[1] == 1 else arranged(x, True)
    return x.transpose(0, 1).flatten(0, 1)


def _positions(row: Tensor, s: int) -> Tensor:
    """[b s, n, d] -> [s, b, n, d], a view."""
    return row.unflatten(0, (-1, s)).transpose(0, 1)


def unavailable_reason(
    device: torch.device, dtype: torch.dtype, head_dim: int, compiled: bool = False
) -> str | None:
    """Why this kernel cannot take dropout, documents and windows on a CUDA device; None if it can.
    The meta device (--dry-run --trace) stands for one. In a graph (`compiled`) the layer has asked,
    and keeps what it cannot take outside."""
    if compiled and dtype != torch.float64:
        return None
    if dtype not in (torch.float16, torch.bfloat16):
        return f"has fp16 and bf16 only, no {dtype}"
    if not 0 < head_dim <= DROPOUT_HEAD_DIM or head_dim % MULTIPLE:
        return (
            f"has heads of a multiple of {MULTIPLE} and at most {DROPOUT_HEAD_DIM}, not {head_dim}"
        )
    return None if cuda.has_flash(device) else "needs compute capability 8.0 or newer"


def flash_attention(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    """q [s, b, n, d], k and v [s, b, g, d], fp16 or bf16 -> [s, b, n, d]; causal, inside documents
    [b, s] if there are any, and inside the window of the spec. The seed of dropout is as of
    kernels/dropout.py.

    Dao 2023 (FlashAttention-2). The kernel draws dropout masks from the device's generator, which
    gets `seed` before, and backward draws them again from the state it had: the mask is a pure
    function of seed, shape and kind of GPU. With documents the batch becomes one row of documents,
    and nothing outside them is computed.
    """
    spec, ids = call.spec, call.document_ids
    ends = None if ids is None else cumulative_lengths(ids)
    seed = torch.as_tensor(call.dropout_seed) if spec.dropout else None
    before = None if spec.window is None else spec.window - 1
    return _FlashAttention.apply(q, k, v, call.sinks, ends, spec.dropout, spec.scale, before, seed)


@cache
def newer_kernels(
    device: torch.device, dtype: torch.dtype, heads: int, groups: int, head_dim: int
) -> dict[str, str | None]:
    """Titles of NEWER, and why each cannot run in place of torch's own flash kernel; None for the
    last one if it does from now on, in this process. Each is tried against that kernel with
    documents, forward and backward."""
    shape = (device, dtype, heads, groups, head_dim)
    found: dict[str, str | None] = {}
    for name, (title, install) in NEWER.items():
        found[title] = _tried(name, install, *shape)
        if found[title] is None:
            break
    return found


def _tried(name: str, install: str, *shape: Any) -> str | None:
    """Why torch's flash kernel of this name cannot run; None once it is in place."""
    try:
        expected = _sample(*shape)
        activate_flash_attention_impl(name)
        pairs = zip(_sample(*shape), expected, strict=True)
        if all(torch.allclose(*pair, TOLERANCE, TOLERANCE) for pair in pairs):
            return None
        reason = "fails here (its results are not those of FlashAttention-2)"
    except ImportError as error:
        reason = f"does not load ({error}); {install}"
    except Exception as error:  # a kernel compiled at its first launch raises anything
        reason = f"fails here ({(str(error) or type(error).__name__).splitlines()[0]})"
    restore_flash_attention_impl(_raise_warn=False)  # also where it was not activated
    return reason


def _sample(
    device: torch.device, dtype: torch.dtype, heads: int, groups: int, head_dim: int
) -> list[Tensor]:
    """The result of two documents of 128 positions, and its gradients."""
    random = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(128, 1, n, head_dim, generator=random).to(device, dtype).requires_grad_()
        for n in (heads, groups, groups)
    )
    ids = (torch.arange(128) >= 40).long().unsqueeze(0).to(device)
    with torch.enable_grad():
        spec = AttentionSpec.of(q, k, v, head_dim**-0.5, documents=True)
        out = flash_attention(q, k, v, AttentionCall(spec, ids))
        return [out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))]
