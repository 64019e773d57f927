"""LayerNorm over the last dimension, and what RMSNorm shares with it."""

from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.kernels import libraries
from megatron.kernels.cpu.blocking import wide_dtype
from megatron.kernels.implementation import Implementation
from megatron.kernels.rows import COMPILED, Row, RowSpec, no_triton, only


def _layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool
) -> Tensor:
    if not zero_centered:
        return torch.layer_norm(x, weight.shape, weight, bias, eps)
    wide = wide_dtype(x)
    bias = None if bias is None else bias.to(wide)
    return F.layer_norm(x.to(wide), weight.shape, weight.to(wide) + 1, bias, eps).to(x.dtype)


class _LayerNorm(torch.autograd.Function):
    """torch's, whose gradients of weight and bias are summed in fp32. On a CPU torch sums them in
    the format of x: in bf16 a sum of ones ends at 256."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        wide_bias = None if bias is None else bias.float()
        out, mean, inverse = torch.native_layer_norm(
            x, weight.shape, weight.float(), wide_bias, eps
        )
        ctx.save_for_backward(x, weight, bias, mean, inverse)
        return out

    @staticmethod
    def backward(ctx, grad_out: Tensor):
        x, weight, bias, mean, inverse = ctx.saved_tensors
        wide_bias = None if bias is None else bias.float()
        wanted = [True, True, bias is not None]
        grads = torch.ops.aten.native_layer_norm_backward(
            grad_out.float(),
            x.float(),
            weight.shape,
            mean,
            inverse,
            weight.float(),
            wide_bias,
            wanted,
        )
        return *(None if grad is None else grad.to(x.dtype) for grad in grads), None


def _layer_norm_with_wide_sums(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool
) -> Tensor:
    return _LayerNorm.apply(x, weight, bias, eps)


def _layer_norm_in_one_pass(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool
) -> Tensor:
    ops = one_pass_ops(x, weight) if bias is not None and not zero_centered else None
    if ops is not None:
        return ops.FusedNorm.apply(x, weight, bias, eps)
    return _layer_norm(x, weight, bias, eps, zero_centered)


def one_pass_ops(x: Tensor, weight: Tensor) -> ModuleType | None:
    """CUDA's operations with a backward of one pass, where such a norm is one for them."""
    from megatron.kernels.cuda import fused_ops

    fits = (
        x.dtype == weight.dtype
        and x.shape[-1] <= fused_ops.WIDEST_NORM
        and x.numel() >= fused_ops.MANY_ROWS * x.shape[-1]
    )
    return fused_ops if fits else None


def no_apex(spec: RowSpec) -> str | None:
    if spec.compiled:
        return COMPILED
    if why_not := libraries.cuda_only(spec.device):
        return why_not
    from megatron.kernels.cuda import apex

    return apex.unavailable_reason(spec.dtype)


def by_apex(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool
) -> Tensor:
    from megatron.kernels.cuda import apex

    if bias is None:
        return apex.rms_norm(x, weight, eps)
    return apex.layer_norm(x, weight, bias, eps)


def _not_16_bits_on_a_cpu(spec: RowSpec) -> str | None:
    if spec.compiled:
        return COMPILED
    low = spec.dtype in (torch.bfloat16, torch.float16)
    return None if low and spec.device.type == "cpu" else "only for 16 bits on a CPU"


FUSED = "fused forward and backward"
CENTERED = frozenset({"zero_centered"})
LAYER_NORMS: tuple[Row, ...] = only(
    _layer_norm,
    Implementation(
        "apex",
        "apex",
        by_apex,
        unavailable=no_apex,
        why=lambda spec: FUSED,
    ),
    Implementation(
        "one_pass",
        "torch",
        _layer_norm_in_one_pass,
        CENTERED,
        no_triton,
        why=lambda spec: "only implementation",
    ),
    Implementation(
        "wide_sums",
        "torch",
        _layer_norm_with_wide_sums,
        unavailable=_not_16_bits_on_a_cpu,
        why=lambda spec: "only implementation",
    ),
)
