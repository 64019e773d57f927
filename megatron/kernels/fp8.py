"""Linear layers, also those of experts, with FP8 GEMMs on local tensors.

A tensor t is cast as q = round(clamp(t * scale)) and stands for q / scale; the scale maps the
largest number that is expected onto the format's largest (Micikevicius et al. 2022). On CUDA the
GEMMs are torch._scaled_mm; a CPU has none, so the casts there are the same and the GEMM
is computed in fp32 from what they leave.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron.kernels.cuda import availability, fp8_ops  # noqa: F401 (defines operations)
from megatron.kernels.linear import TpComm

MULTIPLE = 16  # of both inner dimensions of every GEMM: rows of 16 bytes
ALIGNMENT = 16  # bytes: cuBLAS refuses a GEMM whose scales begin elsewhere


class Formats(NamedTuple):
    """The dtypes of a layer's tensors: of its input and weight, and of its output's
    gradient."""

    forward: torch.dtype
    backward: torch.dtype


FORMATS = {
    "e4m3": Formats(torch.float8_e4m3fn, torch.float8_e4m3fn),
    "hybrid": Formats(torch.float8_e4m3fn, torch.float8_e5m2),
}


class TensorScale(NamedTuple):
    """The scale of a tensor and its inverse, fp32 without dimensions; no views of one tensor
    (ALIGNMENT)."""

    factor: Tensor
    inverse: Tensor


class Scaling(Protocol):
    """Chooses a layer's scales from the largest magnitudes (fp32) of its local tensors. Called on
    all ranks that share the layer."""

    formats: Formats

    def scale(self, operand: int, amax: Tensor, training: bool) -> TensorScale:
        """`scale_of` the input (0), the weight (1) or the output's gradient (2), whose largest
        magnitude is `amax`. `training`: whether a backward can follow."""


class Cast(NamedTuple):
    """A matrix [m, n], or several [groups, m, n], in FP8: as it is, transposed [n, m], and the
    inverse of its scale. What was not asked for has no elements."""

    rows: Tensor
    columns: Tensor
    inverse: Tensor


@cache
def _kernels_run(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the Triton kernels do; the meta device stands for CUDA."""
    if availability.unavailable_reason(device, dtype) is not None:
        return False
    if device.type == "cuda":
        from megatron.kernels.cuda import fp8_triton  # noqa: F401
    return True


def _by_triton(x: Tensor) -> bool:
    """torch.compile fuses the formulas itself."""
    return not torch.compiler.is_compiling() and _kernels_run(x.device, x.dtype)


def largest_magnitude(x: Tensor) -> Tensor:
    """max |x| as an fp32 scalar, 0 without elements; NaN if x has a NaN."""
    if x.numel() == 0:
        return torch.zeros((), device=x.device)
    if _by_triton(x):
        amax = torch.zeros((), device=x.device)
        torch.ops.megatron.fp8_amax_(amax, x.detach())
        return amax
    low, high = torch.aminmax(x.detach())
    return torch.maximum(-low, high).float()


def fitting_scale(amax: Tensor, largest: Tensor | float) -> Tensor:
    """The scale that maps `amax` onto `largest`, 1 for a tensor of zeros; finite wherever amax
    is."""
    scale = torch.where(amax > 0, largest / amax, torch.ones_like(amax))
    return torch.where(amax.isfinite(), scale.clamp(max=torch.finfo(torch.float32).max), scale)


def scale_of(amax: Tensor, fixed: Tensor | None, largest: float) -> TensorScale:
    """The scale `fixed`, or the one that maps `amax` onto `largest`. NaN where amax is not finite:
    the clamp of the cast must not hide what the checks of a step look for. Every scale that a GEMM
    reads is made here."""
    if _by_triton(amax):
        return TensorScale(*torch.ops.megatron.fp8_scale(amax, fixed, largest))
    scale = fitting_scale(amax, largest) if fixed is None else fixed
    scale = scale + (amax - amax)
    return TensorScale(scale, scale.reciprocal())


def quantize(x: Tensor, dtype: torch.dtype, scale: Tensor) -> Tensor:
    """x * scale in `dtype`, rounded to nearest even; values out of range become its
    largest number."""
    limit = torch.finfo(dtype).max
    return (x.float() * scale).clamp_(-limit, limit).to(dtype)


def cast(
    x: Tensor, dtype: torch.dtype, scale: TensorScale, *, rows: bool = True, columns: bool = True
) -> Cast:
    """x [m, n] or [groups, m, n] in `dtype`. A CPU's transposed cast is a view of the other."""
    if _by_triton(x):
        q, transposed = torch.ops.megatron.fp8_cast(x.detach(), scale.factor, dtype, rows, columns)
        return Cast(q, transposed, scale.inverse)
    q = quantize(x.detach(), dtype, scale.factor)
    transposed = q.mT if q.device.type == "cpu" or not columns else q.mT.contiguous()
    return Cast(q, transposed, scale.inverse)


@torch.no_grad()
def cast_weight(weight: Tensor, scaling: Scaling, training: bool) -> Cast:
    """The weight of `linear_fp8` or `grouped_linear_fp8`; transposed too if `training`."""
    scale = scaling.scale(1, largest_magnitude(weight), training)
    return cast(weight, scaling.formats.forward, scale, columns=training)


def gemm(
    a: Tensor,
    b: Tensor,
    inverse_a: Tensor,
    inverse_b: Tensor,
    dtype: torch.dtype,
    fast: bool = False,
) -> Tensor:
    """a [m, k] and b [n, k] in FP8 and the inverses of their scales -> a b^T [m, n] in `dtype`,
    summed in fp32; `fast`: on CUDA with fewer bits."""
    if not torch.compiler.is_compiling():
        for inverse in (inverse_a, inverse_b):
            assert inverse.data_ptr() % ALIGNMENT == 0, f"a scale at {inverse.data_ptr():#x}"
    if a.device.type == "cpu":
        return torch.mm(a.float(), b.float().t()).mul_(inverse_a * inverse_b).to(dtype)
    return native_gemm(a, b, inverse_a, inverse_b, dtype, fast)


def native_gemm(
    a: Tensor,
    b: Tensor,
    inverse_a: Tensor,
    inverse_b: Tensor,
    dtype: torch.dtype,
    fast: bool = False,
) -> Tensor:
    """`gemm` by the device's own instructions, which need rows of one operand and columns of the
    other."""
    return torch._scaled_mm(
        a.contiguous(),
        b.contiguous().t(),
        scale_a=inverse_a,
        scale_b=inverse_b,
        out_dtype=dtype,
        use_fast_accum=fast,
    )


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        weight_cast: Cast,
        accumulate_into: Tensor | None,
        tp_comm: TpComm | None,
        scaling: Scaling,
        training: bool,
    ) -> Tensor:
        scale = scaling.scale(0, largest_magnitude(x), training)
        ctx.accumulate_into = accumulate_into
        ctx.tp_comm = tp_comm
        ctx.scaling = scaling
        full_x = tp_comm.gather(x)() if tp_comm else x
        q = cast(full_x.reshape(-1, x.shape[-1]), scaling.formats.forward, scale, columns=False)
        ctx.save_for_backward(x, *scale, weight_cast.columns, weight_cast.inverse)
        out = gemm(q.rows, weight_cast.rows, q.inverse, weight_cast.inverse, x.dtype, fast=True)
        if bias is not None:
            out += bias
        return out.view(*full_x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx, grad_out: Tensor):
        x, factor, inverse_x, weight_columns, inverse = ctx.saved_tensors
        scale = TensorScale(factor, inverse_x)
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_x = grad_weight = grad_bias = reduced = None
        gathered = ctx.tp_comm.gather(x) if ctx.tp_comm and needs_weight else None
        wide = grad_out.reshape(-1, grad_out.shape[-1])
        if needs_bias:
            grad_bias = wide.sum(0)
        formats = ctx.scaling.formats
        of_grad = ctx.scaling.scale(2, largest_magnitude(wide), True)
        grad = cast(wide, formats.backward, of_grad, rows=needs_x, columns=needs_weight)
        if needs_x:
            grad_x = gemm(grad.rows, weight_columns, grad.inverse, inverse, x.dtype)
            grad_x = grad_x.view(*grad_out.shape[:-1], x.shape[-1])
            reduced = ctx.tp_comm.reduce(grad_x) if ctx.tp_comm else None
        if needs_weight:
            full_x = gathered() if gathered else x
            q = cast(full_x.reshape(-1, x.shape[-1]), formats.forward, scale, rows=False)
            total = ctx.accumulate_into
            dtype = x.dtype if total is None else torch.float32
            grad_weight = gemm(grad.columns, q.columns, grad.inverse, q.inverse, dtype)
            if total is not None:
                total.add_(grad_weight.view(total.shape))
                grad_weight = None
        return reduced() if reduced else grad_x, grad_weight, grad_bias, *[None] * 5


def linear_fp8(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    scaling: Scaling,
    weight_cast: Cast | None = None,
    accumulate_into: Tensor | None = None,
    tp_comm: TpComm | None = None,
) -> Tensor:
    """y = x w^T + bias as `linear.linear`, its three GEMMs in FP8 with the scales of
    `scaling`, the first with fast accumulation.

    x [..., in], weight [out, in], bias [out] or None, all bf16, fp16 or fp32 -> [..., out]. in, out
    and the number of rows are multiples of 16 (config/checks/fp8.py sees to it; torch refuses
    others on CUDA). Sums are fp32, the bias and its gradient are not cast. For backward x itself is
    kept and cast again with the same scale. `weight_cast`: `cast_weight` of the weight, if there is
    one.
    """
    training = torch.is_grad_enabled()
    if weight_cast is None:
        weight_cast = cast_weight(weight, scaling, training)
    return _Fp8Linear.apply(
        x, weight, bias, weight_cast, accumulate_into, tp_comm, scaling, training
    )


class _Fp8GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        weight: Tensor,
        weight_cast: Cast,
        counts: Sequence[int],
        accumulate_into: Tensor | None,
        scaling: Scaling,
        training: bool,
    ) -> Tensor:
        scale = scaling.scale(0, largest_magnitude(x), training)
        rows, columns, inverse = weight_cast
        ctx.save_for_backward(x, *scale, columns, inverse)
        ctx.shape = weight.shape
        ctx.counts = counts
        ctx.accumulate_into = accumulate_into
        ctx.scaling = scaling
        q = cast(x, scaling.formats.forward, scale, columns=False)
        out = x.new_empty(len(x), weight.shape[1])
        groups = zip(q.rows.split(counts), out.split(counts), rows, strict=True)
        for group_rows, result, matrix in groups:
            if len(group_rows):
                result.copy_(gemm(group_rows, matrix, q.inverse, inverse, x.dtype, fast=True))
        return out

    @staticmethod
    def backward(ctx, grad_out: Tensor):
        x, factor, inverse_x, weight_columns, inverse_weight = ctx.saved_tensors
        forward, backward = ctx.scaling.formats
        of_grad = ctx.scaling.scale(2, largest_magnitude(grad_out), True)
        grad = cast(grad_out, backward, of_grad, columns=False)
        q = cast(x, forward, TensorScale(factor, inverse_x), columns=False)
        total = ctx.accumulate_into
        grad_x = torch.empty_like(x)
        needs_weight = ctx.needs_input_grad[1]
        grad_weight = x.new_zeros(ctx.shape) if total is None else total
        groups = zip(
            q.rows.split(ctx.counts),
            grad.rows.split(ctx.counts),
            grad_x.split(ctx.counts),
            weight_columns,
            grad_weight,
            strict=True,
        )
        for rows, grads, grad_rows, columns, grad_matrix in groups:
            if not len(rows):
                continue
            grad_rows.copy_(gemm(grads, columns, grad.inverse, inverse_weight, x.dtype))
            if not needs_weight:
                continue
            rows, grads = _padded_rows(rows), _padded_rows(grads)
            wide = grad_weight.dtype
            grad_matrix += gemm(grads.t(), rows.t(), grad.inverse, q.inverse, wide)
        return grad_x, grad_weight if total is None else None, *[None] * 5


def _padded_rows(x: Tensor) -> Tensor:
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
    weight_cast: Cast | None = None,
    accumulate_into: Tensor | None = None,
) -> Tensor:
    """`grouped_linear.grouped_linear` without copies, its GEMMs in FP8 as in `linear_fp8`: one
    scale for the rows of all groups, one for all matrices.

    x [n, in], weight [groups, out, in] -> [n, out]; in and out are multiples of 16, counts any.
    """
    training = torch.is_grad_enabled()
    if weight_cast is None:
        weight_cast = cast_weight(weight, scaling, training)
    return _Fp8GroupedLinear.apply(
        x, weight, weight_cast, counts, accumulate_into, scaling, training
    )
