"""LayerNorm and RMSNorm over the last dimension."""

from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.kernels import libraries
from megatron.kernels.cpu import native
from megatron.kernels.cpu.blocking import for_each, row_blocks, wide_dtype
from megatron.kernels.implementation import Implementation, choose
from megatron.kernels.rows import COMPILED, Row, RowSpec, no_triton, only, rivals, spec_of


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool = False
) -> Tensor:
    """LayerNorm (Ba et al. 2016) over the last dimension: x [..., h], weight and bias [h] -> [...,
    h].

    Mean and variance are taken in fp32 for bf16 and fp16. `zero_centered`: the stored weight is
    gamma - 1, and the sum of the two is not rounded to a low precision.
    """
    spec = spec_of(x, zero_centered=zero_centered)
    forward = choose(LAYER_NORMS[1:], spec).implementation.forward
    return forward(x, weight, bias, eps, zero_centered)


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    """RMSNorm (Zhang and Sennrich 2019) over the last dimension: x [..., h], weight [h] -> [...,
    h].

    The mean square is taken in fp32 for bf16 and fp16. `zero_centered`: the stored weight is gamma
    - 1, and the sum of the two is not rounded to a low precision.
    """
    spec = spec_of(x, zero_centered=zero_centered)
    forward = choose(RMS_NORMS[1:], spec).implementation.forward
    return forward(x, weight, None, eps, zero_centered)


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
    ops = _one_pass_ops(x, weight) if bias is not None and not zero_centered else None
    if ops is not None:
        return ops.FusedNorm.apply(x, weight, bias, eps)
    return _layer_norm(x, weight, bias, eps, zero_centered)


def _widened(x: Tensor, weight: Tensor, zero_centered: bool) -> Tensor:
    return weight.to(wide_dtype(x)) + 1 if zero_centered else weight


def _rms_norm(x: Tensor, weight: Tensor, bias: None, eps: float, zero_centered: bool) -> Tensor:
    weight = _widened(x, weight, zero_centered)
    return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)


def _rms_norm_in_one_pass(
    x: Tensor, weight: Tensor, bias: None, eps: float, zero_centered: bool
) -> Tensor:
    weight = _widened(x, weight, zero_centered)
    if ops := _one_pass_ops(x, weight):
        return ops.FusedNorm.apply(x, weight, None, eps)
    return _rms_norm(x, weight, None, eps, False)


def _rms_norm_in_blocks(
    x: Tensor, weight: Tensor, bias: None, eps: float, zero_centered: bool
) -> Tensor:
    return _RmsNorm.apply(x, _widened(x, weight, zero_centered), eps)


def _rms_norm_in_cpp(
    x: Tensor, weight: Tensor, bias: None, eps: float, zero_centered: bool
) -> Tensor:
    wide = _widened(x, weight, True) if zero_centered else weight
    return _NativeRmsNorm.apply(x, wide, eps)


def _one_pass_ops(x: Tensor, weight: Tensor) -> ModuleType | None:
    """CUDA's operations with a backward of one pass, where such a norm is one for them."""
    from megatron.kernels.cuda import fused_ops

    fits = (
        x.dtype == weight.dtype
        and x.shape[-1] <= fused_ops.WIDEST_NORM
        and x.numel() >= fused_ops.MANY_ROWS * x.shape[-1]
    )
    return fused_ops if fits else None


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean square + eps) of each row, [rows, 1]."""
    return x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()


class _NativeRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return native.rms_norm(x, weight, eps)

    @staticmethod
    def backward(ctx, grad_out: Tensor):
        x, weight = ctx.saved_tensors
        grad_x, grad_weight = native.rms_norm_grad(x, weight, grad_out, ctx.eps)
        return grad_x, grad_weight.to(weight.dtype), None


class _RmsNorm(torch.autograd.Function):
    """With y = x / rms the gradient of x is (g w - y mean(g w y)) / rms."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        source = x.reshape(-1, x.shape[-1])
        target = out.view(-1, x.shape[-1])

        def work(rows: slice) -> None:
            block = source[rows].to(wide_dtype(x))
            torch.mul(block * _inverse_rms(block, eps), weight, out=target[rows])

        for_each(row_blocks(*source.shape), x.device, work)
        return out

    @staticmethod
    def backward(ctx, grad_out: Tensor):
        x, weight = ctx.saved_tensors
        grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        source, grads, target = (t.reshape(-1, x.shape[-1]) for t in (x, grad_out, grad_x))
        blocks = row_blocks(*source.shape)
        weight_grads = torch.empty((len(blocks), len(weight)), dtype=wide_dtype(x), device=x.device)

        def work(numbered: tuple[int, slice]) -> None:
            number, rows = numbered
            block = source[rows].to(wide_dtype(x))
            grad = grads[rows].to(wide_dtype(x))
            inverse = _inverse_rms(block, ctx.eps)
            y = block * inverse
            weight_grads[number] = (grad * y).sum(0)
            grad = grad * weight
            mean = (grad * y).mean(-1, keepdim=True)
            torch.mul(grad.addcmul_(y, mean, value=-1), inverse, out=target[rows])

        for_each(list(enumerate(blocks)), x.device, work)
        return grad_x, weight_grads.sum(0).to(weight.dtype), None


def _no_apex(spec: RowSpec) -> str | None:
    if spec.compiled:
        return COMPILED
    if why_not := libraries.cuda_only(spec.device):
        return why_not
    from megatron.kernels.cuda import apex

    return apex.unavailable_reason(spec.dtype)


def _by_apex(
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


_FUSED = "fused forward and backward"
_CENTERED = frozenset({"zero_centered"})
LAYER_NORMS: tuple[Row, ...] = only(
    _layer_norm,
    Implementation(
        "apex",
        "apex",
        _by_apex,
        unavailable=_no_apex,
        why=lambda spec: _FUSED,
    ),
    Implementation(
        "one_pass",
        "torch",
        _layer_norm_in_one_pass,
        _CENTERED,
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
RMS_NORMS: tuple[Row, ...] = (
    Implementation(
        "apex",
        "apex",
        _by_apex,
        unavailable=_no_apex,
        why=lambda spec: _FUSED,
    ),
    *rivals(
        _rms_norm,
        _rms_norm_in_blocks,
        _rms_norm_in_cpp,
        _rms_norm_in_one_pass,
        title="torch",
        why="single kernel",
        takes=_CENTERED,
        cpp_takes=_CENTERED,
    ),
)
NORMS = {"LayerNorm": LAYER_NORMS, "RMSNorm": RMS_NORMS}
