"""What experts compute on a CPU by this suite's C++ (experts.cpp): GEMMs in fp32 or bf16, one
expert per thread, rows gathered while they are read; SwiGLU times probabilities; sums of the copies
of tokens."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.kernels.cpu.native import load_built

INTERFACE = 2


def load(capability: str):
    """experts.cpp as built for this processor, or why there is none (a str)."""
    return load_built("experts", INTERFACE, capability)


def unavailable_reason(
    device: torch.device, dtype: torch.dtype, dtypes: Sequence[torch.dtype] = (torch.float32,)
) -> str | None:
    """Why the C++, which supports `dtypes`, is unavailable for such tensors; None if it is
    available."""
    if torch.compiler.is_compiling():
        return "not supported under torch.compile"
    if device.type != "cpu" or dtype not in dtypes:
        return f"only {' and '.join(map(str, dtypes))} on a CPU"
    module = load(torch.backends.cpu.get_cpu_capability())
    return module if isinstance(module, str) else None


def multiplies(x: Tensor, weight: Tensor, accumulate_into: Tensor | None = None) -> bool:
    """Whether the GEMMs are available for all of these: in fp32, or in bf16 with gradients in
    fp32 (on processors with AVX512_BF16 and without AMX, and for even sizes)."""
    total = torch.float32 if accumulate_into is None else accumulate_into.dtype
    if x.dtype != weight.dtype or total != torch.float32:
        return False
    if x.dtype == torch.bfloat16:
        sizes_fit = all(size % 2 == 0 for size in weight.shape[1:])
        return runs(x) and sizes_fit and _library().multiplies_bf16()
    return unavailable_reason(x.device, x.dtype) is None


def runs(x: Tensor) -> bool:
    """Whether the other functions are available for `x`."""
    return unavailable_reason(x.device, x.dtype, (torch.float32, torch.bfloat16)) is None


def _library():
    return load(torch.backends.cpu.get_cpu_capability())


def _call(name: str, x: Tensor, *arguments) -> None:
    """The C++ function `name` for the dtype of `x`; tensors are given by their addresses, 0 for
    None."""
    function = getattr(_library(), f"{name}_{str(x.dtype).removeprefix('torch.')}")
    function(*map(_address, arguments), torch.get_num_threads())


def _address(argument: Any) -> Any:
    if argument is None:
        return 0
    return argument.data_ptr() if isinstance(argument, Tensor) else argument


def _check(rows: Tensor, numbers: Tensor | None, weight: Tensor, counts: Sequence[int]) -> None:
    """The C++ reads memory by these sizes."""
    n = len(rows if numbers is None else numbers)
    assert sum(counts) == n and len(weight) == len(counts), (n, counts, weight.shape)
    assert weight.is_contiguous(), weight.stride()
    assert numbers is None or numbers.dtype == torch.int64 and numbers.is_contiguous()


def product(
    x: Tensor, numbers: Tensor | None, weight: Tensor, counts: Sequence[int], transposed: bool
) -> Tensor:
    """x [n, in] times, in groups of so many rows, weight[group]^T ([groups, out, in], `transposed`)
    or weight[group] ([groups, in, out]) -> [n, out]. With `numbers` [n] row i is x[numbers[i]]."""
    x = x.contiguous()
    inputs = x.shape[1]
    outputs = weight.shape[1 if transposed else 2]
    assert weight[0].numel() == inputs * outputs, (x.shape, weight.shape)
    assert weight.dtype == x.dtype, (weight.dtype, x.dtype)
    _check(x, numbers, weight, counts)
    out = x.new_empty(sum(counts), outputs)
    _call("product", x, x, numbers, weight, out, counts, inputs, outputs, transposed)
    return out


def weight_grad(
    grad: Tensor,
    grad_numbers: Tensor | None,
    x: Tensor,
    numbers: Tensor | None,
    counts: Sequence[int],
    out: Tensor | None = None,
    add: bool = True,
) -> Tensor | None:
    """Of each group the rows of grad [n, out], transposed, times those of x [n, in] -> [groups,
    out, in] in x's dtype, or None where they were added to `out` (fp32), or written there. Rows as
    in `product`."""
    grad, x = grad.to(x.dtype).contiguous(), x.contiguous()
    shape = len(counts), grad.shape[1], x.shape[1]
    sums = x.new_empty(shape, dtype=torch.float32) if out is None else out
    assert sums.shape == shape and sums.dtype == torch.float32, (sums.shape, shape, sums.dtype)
    _check(grad, grad_numbers, sums, counts)
    _check(x, numbers, sums, counts)
    add = add and out is not None
    sizes = x.shape[1], grad.shape[1]
    _call("weight_grad", x, grad, grad_numbers, x, numbers, sums, counts, *sizes, add)
    return sums.to(x.dtype) if out is None else None


def swiglu(gate_up: Tensor, weights: Tensor) -> Tensor:
    """silu(gate) * up * weight: [n, 2, ffn], weights fp32 [n] -> [n, ffn]."""
    gate_up, weights = gate_up.contiguous(), weights.contiguous()
    rows, _, width = gate_up.shape
    assert weights.shape == (rows,) and weights.dtype == torch.float32, (weights.shape, rows)
    out = gate_up.new_empty(rows, width)
    _call("swiglu", gate_up, gate_up, weights, out, rows, width)
    return out


def swiglu_grad(gate_up: Tensor, weights: Tensor, grad_out: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `swiglu`'s gate_up and weights, of their shapes and dtypes."""
    gate_up, weights = gate_up.contiguous(), weights.contiguous()
    grad_out = grad_out.to(gate_up.dtype).contiguous()
    rows, _, width = gate_up.shape
    assert grad_out.shape == (rows, width), (grad_out.shape, gate_up.shape)
    grads = torch.empty_like(gate_up), torch.empty_like(weights)
    _call("swiglu_grad", gate_up, gate_up, weights, grad_out, *grads, rows, width)
    return grads


def sum_rows(x: Tensor, numbers: Tensor) -> Tensor:
    """Sums of the rows of fp32 or bf16 x [n, h] whose numbers are in `numbers` [rows, copies], none
    for -1 -> [rows, h], in fp32 arithmetic and in the order of the copies."""
    x, numbers = x.contiguous(), numbers.contiguous()
    rows, copies = numbers.shape
    out = x.new_empty(rows, x.shape[1])
    _call("sum_rows", x, x, numbers, out, rows, copies, x.shape[1])
    return out
