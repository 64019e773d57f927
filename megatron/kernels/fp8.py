"""Linear layers, also those of experts, with FP8 GEMMs on local tensors.

A tensor t is cast as q = round(clamp(t * scale)) and stands for q / scale; the scale maps the
largest number that is expected onto the format's largest (Micikevicius et al. 2022). On CUDA the
GEMMs are torch._scaled_mm; a CPU has none, so the casts there are the same and the GEMM
is computed in fp32 from what they leave.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron.kernels.linear import TpComm

MULTIPLE = 16  # of both inner dimensions of every GEMM: rows of 16 bytes


class Formats(NamedTuple):
    """The dtypes of a layer's tensors: of its input and weight, and of its output's
    gradient."""

    forward: torch.dtype
    backward: torch.dtype


FORMATS = {
    "e4m3": Formats(torch.float8_e4m3fn, torch.float8_e4m3fn),
    "hybrid": Formats(torch.float8_e4m3fn, torch.float8_e5m2),
}


class Scaling(Protocol):
    """Chooses a layer's scales from the largest magnitudes (fp32 vectors) of the local tensors.

    `training`: whether a backward can follow. Both are called on all ranks that share the layer.
    """

    formats: Formats

    def forward(self, amax: Tensor, training: bool) -> Tensor:
        """[2] of input and weight -> their scales [2]."""

    def backward(self, amax: Tensor) -> Tensor:
        """[1] of the output's gradient -> its scale [1]."""


def largest_magnitude(x: Tensor) -> Tensor:
    """max |x| as an fp32 scalar, 0 without elements; NaN if x has a NaN."""
    if x.numel() == 0:
        return torch.zeros((), device=x.device)
    low, high = torch.aminmax(x.detach())
    return torch.maximum(-low, high).float()


def fitting_scale(amax: Tensor, largest: Tensor | float) -> Tensor:
    """The scale that maps `amax` onto `largest`, 1 for a tensor of zeros; finite wherever amax
    is."""
    scale = torch.where(amax > 0, largest / amax, torch.ones_like(amax))
    return torch.where(amax.isfinite(), scale.clamp(max=torch.finfo(torch.float32).max), scale)


def quantize(x: Tensor, dtype: torch.dtype, scale: Tensor) -> Tensor:
    """x * scale in `dtype`, rounded to nearest even; values out of range become its
    largest number."""
    limit = torch.finfo(dtype).max
    return (x.float() * scale).clamp_(-limit, limit).to(dtype)


def gemm(a: Tensor, b: Tensor, inverse_a: Tensor, inverse_b: Tensor, dtype: torch.dtype) -> Tensor:
    """a [m, k] and b [n, k] in FP8 and the inverses of their scales -> a b^T [m, n] in `dtype`,
    summed in fp32."""
    if a.device.type == "cpu":
        return torch.mm(a.float(), b.float().t()).mul_(inverse_a * inverse_b).to(dtype)
    return native_gemm(a, b, inverse_a, inverse_b, dtype)


def native_gemm(
    a: Tensor, b: Tensor, inverse_a: Tensor, inverse_b: Tensor, dtype: torch.dtype
) -> Tensor:
    """`gemm` by the device's own instructions, which need rows of one operand and columns of the
    other."""
    return torch._scaled_mm(
        a.contiguous(), b.contiguous().t(), scale_a=inverse_a, scale_b=inverse_b, out_dtype=dtype
    )


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        accumulate_into: Tensor | None,
        tp_comm: TpComm | None,
        scaling: Scaling,
        training: bool,
    ) -> Tensor:
        amax = torch.stack((largest_magnitude(x), largest_magnitude(weight)))
        scales = _poisoned(scaling.forward(amax, training), amax)
        ctx.save_for_backward(x, weight, scales)
        ctx.accumulate_into = accumulate_into
        ctx.tp_comm = tp_comm
        ctx.scaling = scaling
        whole = tp_comm.gather(x)() if tp_comm else x
        format8 = scaling.formats.forward
        inverse = scales.reciprocal()
        out = gemm(
            quantize(whole.reshape(-1, x.shape[-1]), format8, scales[0]),
            quantize(weight, format8, scales[1]),
            inverse[0],
            inverse[1],
            x.dtype,
        )
        if bias is not None:
            out += bias
        return out.view(*whole.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx, grad_out: Tensor):
        x, weight, scales = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = reduced = None
        gathered = ctx.tp_comm.gather(x) if ctx.tp_comm and ctx.needs_input_grad[1] else None
        wide = grad_out.reshape(-1, grad_out.shape[-1])
        if ctx.needs_input_grad[2]:
            grad_bias = wide.sum(0)
        amax = largest_magnitude(wide).view(1)
        scale = _poisoned(ctx.scaling.backward(amax), amax)
        formats = ctx.scaling.formats
        inverse = scales.reciprocal()
        rows = quantize(wide, formats.backward, scale)
        inverse_rows = scale.reciprocal()[0]
        if ctx.needs_input_grad[0]:
            columns = quantize(weight, formats.forward, scales[1]).t()
            grad_x = gemm(rows, columns, inverse_rows, inverse[1], x.dtype)
            grad_x = grad_x.view(*grad_out.shape[:-1], weight.shape[1])
            reduced = ctx.tp_comm.reduce(grad_x) if ctx.tp_comm else None
        if ctx.needs_input_grad[1]:
            whole = gathered() if gathered else x
            columns = quantize(whole.reshape(-1, x.shape[-1]), formats.forward, scales[0]).t()
            total = ctx.accumulate_into
            grad_weight = gemm(
                rows.t(),
                columns,
                inverse_rows,
                inverse[0],
                x.dtype if total is None else torch.float32,
            )
            if total is not None:
                total.add_(grad_weight.view(total.shape))
                grad_weight = None
        return reduced() if reduced else grad_x, grad_weight, grad_bias, None, None, None, None


def _poisoned(scales: Tensor, amax: Tensor) -> Tensor:
    """NaN for a tensor that is not finite: the clamp of the cast must not hide what the checks of a
    step look for."""
    return scales + (amax - amax)


def linear_fp8(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    scaling: Scaling,
    accumulate_into: Tensor | None = None,
    tp_comm: TpComm | None = None,
) -> Tensor:
    """y = x w^T + bias as `linear.linear`, its three GEMMs in FP8 with the scales of
    `scaling`.

    x [..., in], weight [out, in], bias [out] or None, all bf16, fp16 or fp32 -> [..., out]. in, out
    and the number of rows are multiples of 16 (config/checks/fp8.py sees to it; torch refuses
    others on CUDA). Sums are fp32, the bias and its gradient are not cast. For backward x itself is
    kept and cast again with the same scale.
    """
    return _Fp8Linear.apply(
        x, weight, bias, accumulate_into, tp_comm, scaling, torch.is_grad_enabled()
    )


class _Fp8GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        weight: Tensor,
        counts: Sequence[int],
        accumulate_into: Tensor | None,
        scaling: Scaling,
        training: bool,
    ) -> Tensor:
        amax = torch.stack((largest_magnitude(x), largest_magnitude(weight)))
        scales = _poisoned(scaling.forward(amax, training), amax)
        ctx.save_for_backward(x, weight, scales)
        ctx.counts = counts
        ctx.accumulate_into = accumulate_into
        ctx.scaling = scaling
        format8 = scaling.formats.forward
        rows = quantize(x, format8, scales[0]).split(counts)
        inverse = scales.reciprocal()
        out = x.new_empty(len(x), weight.shape[1])
        for part, result, matrix in zip(rows, out.split(counts), weight, strict=True):
            if len(part):
                matrix = quantize(matrix, format8, scales[1])
                result.copy_(gemm(part, matrix, inverse[0], inverse[1], x.dtype))
        return out

    @staticmethod
    def backward(ctx, grad_out: Tensor):
        x, weight, scales = ctx.saved_tensors
        amax = largest_magnitude(grad_out).view(1)
        scale = _poisoned(ctx.scaling.backward(amax), amax)
        forward, backward = ctx.scaling.formats
        inverse_x, inverse_weight = scales.reciprocal()
        inverse_grad = scale.reciprocal()[0]
        total = ctx.accumulate_into
        grad_x = torch.empty_like(x)
        grad_weight = torch.zeros_like(weight) if total is None else total
        parts = zip(
            quantize(x, forward, scales[0]).split(ctx.counts),
            quantize(grad_out, backward, scale).split(ctx.counts),
            grad_x.split(ctx.counts),
            weight,
            grad_weight,
            strict=True,
        )
        for rows, grads, grad_rows, matrix, grad_matrix in parts:
            if not len(rows):
                continue
            columns = quantize(matrix, forward, scales[1]).t()
            grad_rows.copy_(gemm(grads, columns, inverse_grad, inverse_weight, x.dtype))
            rows, grads = _whole_rows(rows), _whole_rows(grads)
            wide = grad_weight.dtype
            grad_matrix += gemm(grads.t(), rows.t(), inverse_grad, inverse_x, wide)
        return grad_x, grad_weight if total is None else None, None, None, None, None


def _whole_rows(x: Tensor) -> Tensor:
    """x [n, k] in FP8 with rows of zeros behind it, as many as make n a multiple of 16: n is the
    inner dimension of the weight gradient's GEMM."""
    if len(x) % MULTIPLE == 0:
        return x
    padded = x.new_zeros(-(-len(x) // MULTIPLE) * MULTIPLE, x.shape[1])
    padded[: len(x)] = x
    return padded


def grouped_linear_fp8(
    x: Tensor,
    weight: Tensor,
    counts: Sequence[int],
    *,
    scaling: Scaling,
    accumulate_into: Tensor | None = None,
) -> Tensor:
    """`grouped_linear.grouped_linear` without copies, its GEMMs in FP8 as in `linear_fp8`: one
    scale for the rows of all groups, one for all matrices.

    x [n, in], weight [groups, out, in] -> [n, out]; in and out are multiples of 16, counts any.
    """
    return _Fp8GroupedLinear.apply(
        x, weight, counts, accumulate_into, scaling, torch.is_grad_enabled()
    )
