"""GEMMs of linear layers on local tensors, with a separable weight gradient."""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from megatron import device as devices
from megatron.kernels.cpu import native
from megatron.kernels.cuda.availability import fused_ops
from megatron.kernels.weight_grads import LOW_PRECISION, add, add_weight_grad, takes_sums

# multiplications: below it a call of oneDNN's costs more than it gains over MKL in fp32, and
# Python's part of `linear` more than a second pass over the sum of weight gradients
FEW_MULTIPLICATIONS = 1 << 23
# of one fp32 copy of columns of a low-precision matrix: bounds the scratch memory
BLOCK_ELEMENTS = 1 << 24


def low_precision_is_native(device_type: str, dtype: torch.dtype) -> bool:
    """Whether GEMMs of `dtype` run at full speed on this kind of device.

    Decided by the capability flags of the library, never by timing: a resumed run must decide
    alike. fp32 and fp64 are always native; bf16 and fp16 on a CPU are so only where oneDNN has
    instructions for them (AVX512, AMX, ARM).
    """
    return dtype not in LOW_PRECISION or device_type != "cpu" or _onednn_has(dtype)


def _onednn_has(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies bf16 or fp16 on this processor."""
    name = "_is_mkldnn_bf16_supported" if dtype == torch.bfloat16 else "_is_mkldnn_fp16_supported"
    supported = getattr(torch.ops.mkldnn, name, None)
    return bool(supported is not None and torch.backends.mkldnn.is_available() and supported())


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which GEMMs of `tensor` are computed: its own, or fp32 where its own
    is emulated."""
    dtype = tensor.dtype
    if dtype not in LOW_PRECISION or low_precision_is_native(tensor.device.type, dtype):
        return dtype
    return torch.float32


def _column_blocks(rows: int, columns: int) -> list[slice]:
    width = max(1, BLOCK_ELEMENTS // max(1, rows))
    return [slice(start, min(start + width, columns)) for start in range(0, columns, width)]


def linear_weight_grad(
    grad_out: Tensor, x: Tensor, accumulate_into: Tensor | None = None
) -> Tensor | None:
    """Gradient of the weight of y = x w^T.

    grad_out [..., out], x [..., in] -> [out, in] in x's dtype, rounded once. With `accumulate_into`
    (a buffer [..., in] of as many rows, as a rule fp32) the gradient is added there instead and
    None is returned; where low-precision GEMMs are computed in fp32 it is then never rounded to x's
    dtype.
    """
    dtype = compute_dtype(x)
    rows_out = grad_out.reshape(-1, grad_out.shape[-1])
    rows_in = x.reshape(-1, x.shape[-1])
    if dtype == x.dtype:
        if accumulate_into is not None and is_dynamo_compiling():
            return torch.ops.megatron.add_product_(accumulate_into, rows_out, rows_in)
        return _native_weight_grad(rows_out, rows_in, _as_matrix(accumulate_into))
    accumulate_into = _as_matrix(accumulate_into)
    rows_in = rows_in.to(dtype)
    grad = (
        x.new_empty(rows_out.shape[1], rows_in.shape[1])
        if accumulate_into is None
        else accumulate_into
    )
    for columns in _column_blocks(*rows_out.shape):
        block = rows_out[:, columns].to(dtype).t()
        if grad.dtype == dtype:
            grad[columns].addmm_(block, rows_in)
        elif accumulate_into is not None:
            grad[columns].add_(torch.mm(block, rows_in))
        else:
            grad[columns] = torch.mm(block, rows_in)
    return grad if accumulate_into is None else None


def _native_weight_grad(
    rows_out: Tensor, rows_in: Tensor, accumulate_into: Tensor | None
) -> Tensor | None:
    """`linear_weight_grad` where GEMMs in the dtype of rows_in [m, in] are computed in it;
    rows_out [m, out]."""
    if _onednn_multiplies_transposed(rows_out, rows_in):
        return _onednn_weight_grad(rows_out, rows_in, accumulate_into)
    if accumulate_into is None:
        return torch.mm(rows_out.t(), rows_in)
    add_weight_grad(rows_out, rows_in, accumulate_into)
    return None


def _as_matrix(total: Tensor | None) -> Tensor | None:
    return None if total is None else total.flatten(0, -2)


LIBRARY = torch.library.Library("megatron", "FRAGMENT")
# For graphs, which then add weight gradients as eager layers do. It takes the parameter's buffer:
# of a view made in the graph torch keeps the first layer's place in the buffer of all gradients.
LIBRARY.define("add_product_(Tensor(a!) total, Tensor rows_out, Tensor rows_in) -> ()")
LIBRARY.impl("add_product_", lambda *_: None, "Meta")
LIBRARY.impl(
    "add_product_",
    lambda total, rows_out, rows_in: _native_weight_grad(rows_out, rows_in, _as_matrix(total)),
    "CompositeExplicitAutograd",
)


@cache
def _onednn_linear(dtype: torch.dtype):
    """oneDNN's operation for a linear layer with its bias on a CPU, None where torch's own is as
    fast.

    In bf16 it adds the bias while it multiplies, where torch's addmm copies it to every row of the
    result first. In fp32 torch calls MKL, which has no AVX512 for processors other than Intel's,
    and on AMD's is slower with AVX2 too. It is no public operation: another torch may not have it.
    """
    operation = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if operation is None or not torch.backends.mkldnn.is_available():
        return None
    if dtype == torch.bfloat16:
        return operation if _onednn_has(dtype) else None
    has_vectors = torch.backends.cpu.get_cpu_capability() in native.LEVELS
    on_amd = has_vectors and devices.cpu_info("vendor_id") == "AuthenticAMD"
    return operation if dtype == torch.float32 and on_amd else None


def _by_onednn(rows: Tensor, outputs: int):
    """`_onednn_linear` for rows [m, in] and so many outputs, None where it is not for them."""
    dtype = rows.dtype
    least = FEW_MULTIPLICATIONS if dtype == torch.float32 else 1
    if rows.numel() * outputs < least or rows.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    return _onednn_linear(dtype)


def product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """rows [m, in], weight [out, in] -> rows weight^T + bias, [m, out]."""
    dtype = compute_dtype(rows)
    if dtype == rows.dtype:
        operation = _by_onednn(rows, weight.shape[0])
        if operation and (bias is not None or dtype == torch.float32):
            return operation(rows.contiguous(), weight, bias, "none", [], "")
        return torch.mm(rows, weight.t()) if bias is None else torch.addmm(bias, rows, weight.t())
    wide = rows.to(dtype)
    out = rows.new_empty(rows.shape[0], weight.shape[0])
    for columns in _column_blocks(*out.shape):
        block = weight[columns].to(dtype).t()
        out[:, columns] = (
            torch.mm(wide, block)
            if bias is None
            else torch.addmm(bias[columns].to(dtype), wide, block)
        )
    return out


def input_grad(rows: Tensor, weight: Tensor) -> Tensor:
    """rows [m, out] of the output's gradient, weight [out, in] -> [m, in] in weight's dtype."""
    dtype = compute_dtype(weight)
    if dtype == weight.dtype:
        operation = _by_onednn(rows, weight.shape[1]) if dtype == torch.float32 else None
        if operation:
            return operation(rows.contiguous(), weight.t(), None, "none", [], "")
        return torch.mm(rows, weight)
    grad = torch.zeros(rows.shape[0], weight.shape[1], dtype=dtype, device=rows.device)
    for columns in _column_blocks(*rows.shape):
        grad.addmm_(rows[:, columns].to(dtype), weight[columns].to(dtype))
    return grad.to(weight.dtype)


def _onednn_multiplies_transposed(rows_out: Tensor, rows_in: Tensor) -> bool:
    """Whether `_onednn_weight_grad` is for such matrices."""
    rows, outputs = rows_out.shape
    inputs = rows_in.shape[1]
    return (
        rows_out.dtype == rows_in.dtype == torch.float32
        and rows * min(outputs, inputs) <= BLOCK_ELEMENTS
        and _by_onednn(rows_out, inputs) is not None
        and native.runs(rows_out)
    )


def _onednn_weight_grad(
    rows_out: Tensor, rows_in: Tensor, accumulate_into: Tensor | None
) -> Tensor | None:
    """rows_out^T rows_in of fp32 by oneDNN; rows_out [m, out], rows_in [m, in] -> [out, in], or
    None where it was added to `accumulate_into`.

    It is faster where the left matrix is contiguous, so the narrower one is transposed first.
    """
    multiply = _onednn_linear(torch.float32)
    if rows_out.shape[1] <= rows_in.shape[1]:
        grad = multiply(native.transposed(rows_out), rows_in.t(), None, "none", [], "")
        return _added(grad, accumulate_into, torch.float32)
    grad = multiply(native.transposed(rows_in), rows_out.t(), None, "none", [], "")
    if takes_sums(accumulate_into):
        native.add_transposed(grad, accumulate_into)
        return None
    return _added(grad.t(), accumulate_into, torch.float32)


Start = Callable[[Tensor], Callable[[], Tensor]]


class TpComm(NamedTuple):
    """Communication of the ranks that share a layer. Each function starts it and returns what waits
    for the result.

    `gather` makes the whole input of this rank's part; `reduce` is its adjoint, of the input's
    gradient.
    """

    gather: Start
    reduce: Start


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        accumulate_into: Tensor | None,
        accumulate_bias_into: Tensor | None,
        tp_comm: TpComm | None,
    ) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        # No views of them: torch.compile keeps what is set here without checking its version, but
        # of a view it keeps the base with the check, and all main_grads are one buffer's.
        ctx.accumulate_into = accumulate_into
        ctx.accumulate_bias_into = accumulate_bias_into
        ctx.tp_comm = tp_comm
        if tp_comm:
            x = tp_comm.gather(x)()
        out = product(x.reshape(-1, x.shape[-1]), weight, bias)
        return out.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx, grad_out: Tensor):
        x, weight = ctx.saved_tensors
        rows = grad_out.reshape(-1, grad_out.shape[-1])
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_x = grad_weight = grad_bias = reduced = None
        gathered = ctx.tp_comm.gather(x) if ctx.tp_comm and needs_weight else None
        if needs_bias:
            total = ctx.accumulate_bias_into
            grad_bias = _bias_grad(rows, None if total is None else total.flatten())
        if rows.dtype != weight.dtype or weight.dtype in LOW_PRECISION:
            dtype = compute_dtype(weight)
            if rows.dtype != dtype and len(_column_blocks(*rows.shape)) == 1:
                rows = rows.to(dtype)  # once for both GEMMs
        if needs_x:
            grad_x = input_grad(rows, weight).view(*grad_out.shape[:-1], weight.shape[1])
            reduced = ctx.tp_comm.reduce(grad_x) if ctx.tp_comm else None
        if needs_weight:
            x = gathered() if gathered else x
            total = ctx.accumulate_into
            grad_weight = linear_weight_grad(rows, x, total)
        return reduced() if reduced else grad_x, grad_weight, grad_bias, None, None, None


def _bias_grad(rows: Tensor, accumulate_into: Tensor | None) -> Tensor | None:
    """Sums over the rows of the output's gradient [m, out] -> [out], or None where they were added
    to `accumulate_into`."""
    ops = fused_ops(rows.device, rows.dtype)
    if ops is not None and rows.shape[0] >= ops.MANY_ROWS:
        total = torch.ops.megatron.column_sums(rows).sum(0)
        return _added(total, accumulate_into, rows.dtype)
    if not native.runs(rows):
        dtype = rows.dtype if accumulate_into is None else accumulate_into.dtype
        return _added(rows.sum(0, dtype=dtype), accumulate_into, rows.dtype)
    if takes_sums(accumulate_into):
        native.add_column_sums(rows, accumulate_into)
        return None
    total = torch.zeros(rows.shape[1])
    native.add_column_sums(rows, total)
    return _added(total, accumulate_into, rows.dtype)


def _added(grad: Tensor, accumulate_into: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A gradient in this dtype, or None where it was added to `accumulate_into`."""
    if accumulate_into is None:
        return grad.to(dtype)
    add(grad, accumulate_into)
    return None


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    accumulate_into: Tensor | None = None,
    accumulate_bias_into: Tensor | None = None,
    tp_comm: TpComm | None = None,
) -> Tensor:
    """y = x w^T + bias.

    x [..., in], weight [out, in], bias [out] or None, all of one dtype (bf16, fp16, fp32, fp64) ->
    [..., out].

    `accumulate_into`: None, or a buffer [out, in] (the parameter's fp32 `main_grad`; of a gated
    layer [2, out / 2, in]). Then backward does `accumulate_into += weight gradient` itself, before
    any rounding to a low precision where the GEMM is computed in fp32, and autograd sees no
    gradient for the weight: its `.grad` is left alone. Its post-accumulate hooks do run.
    `accumulate_bias_into` [out]: the same for the bias.

    `tp_comm`: x is what this rank has of an input that ranks share. It is gathered for the
    product, and once more in backward, so that only this rank's part is kept; there gathering runs
    during the GEMM of the input's gradient, and the reduction of that during the GEMM of
    the weight's.
    """
    return _Linear.apply(x, weight, bias, accumulate_into, accumulate_bias_into, tp_comm)
