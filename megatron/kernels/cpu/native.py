"""Activations, RMSNorm, rotary positions, dropout and sums of bf16 and fp32 on a CPU by this
suite's C++ (rows.cpp), one pass over memory each."""

from collections.abc import Sequence
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

# torch's word for the processor's instructions, and the file built for them
LEVELS = {"AVX512": "v4", "AVX2": "v3"}
INTERFACE = 6
DTYPES = (torch.bfloat16, torch.float32)
BUILD = "MEGATRON_CPU_KERNELS=1 pip install ."  # setup.py omits them where there is a GPU


@cache
def load_built(file: str, interface: int, capability: str):
    """The module built from `file`.cpp for a processor with this capability, or why there is none
    (a str)."""
    if capability not in LEVELS:
        return f"needs a CPU with AVX2, not {capability}"
    name = f"megatron.kernels.cpu.{file}_{LEVELS[capability]}"
    try:
        module = import_module(name)
    except ImportError as error:
        return f"{name} is not built ({error}); {BUILD} builds it"
    if getattr(module, "INTERFACE", None) != interface:
        return f"{name} is of another version; {BUILD} rebuilds it"
    return module


def load(capability: str):
    """rows.cpp as built for this processor, or why there is none (a str)."""
    return load_built("rows", INTERFACE, capability)


def unavailable_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the C++ does not compute with such tensors, None if it does."""
    if device.type != "cpu":
        return f"CPU only; the device is {device.type}"
    if dtype not in DTYPES:
        return f"has no {str(dtype).removeprefix('torch.')}"
    module = load(capability())
    return module if isinstance(module, str) else None


# Asked in each operation: what `cache` knows costs no call of Python.
capability = cache(torch.backends.cpu.get_cpu_capability)


@cache
def _is_built(capability: str) -> bool:
    return not isinstance(load(capability), str)


def runs(x: Tensor) -> bool:
    """Whether the C++ can compute with `x`: contiguous or not, on a CPU, bf16 or fp32, outside
    torch.compile."""
    return x.is_cpu and x.dtype in DTYPES and not is_dynamo_compiling() and _is_built(capability())


def _call(name: str, x: Tensor, *arguments) -> Any:
    """The C++ function `name` for the dtype of `x`; tensors are given by their addresses."""
    words = []
    for argument in arguments:
        words.append(argument.data_ptr() if isinstance(argument, Tensor) else argument)
    return _function(name, x.dtype, capability())(*words, torch.get_num_threads())


@cache
def _function(name: str, dtype: torch.dtype, capability: str):
    """The C++ function `name` for tensors of that dtype."""
    return getattr(load(capability), f"{name}_{str(dtype).removeprefix('torch.')}")


_like = partial(torch.empty_like, memory_format=torch.contiguous_format)


def _alike(x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Both contiguous and of the dtype of x."""
    return x.contiguous(), grad.to(x.dtype).contiguous()


def gelu(x: Tensor) -> Tensor:
    """tanh GELU. Any shape."""
    x, out = x.contiguous(), _like(x)
    _call("gelu", x, x, out, x.numel())
    return out


def gelu_with_slope(x: Tensor) -> tuple[Tensor, Tensor]:
    """`gelu` of fp32 and its derivative. Any shape."""
    x, out, slope = x.contiguous(), _like(x), _like(x)
    _call("gelu_with_slope", x, x, out, slope, x.numel())
    return out, slope


def gelu_grad(x: Tensor, grad_out: Tensor) -> Tensor:
    """Gradient of `gelu`'s x, of its shape."""
    (x, grad_out), grad = _alike(x, grad_out), _like(x)
    _call("gelu_grad", x, x, grad_out, grad, x.numel())
    return grad


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up: [..., 2, ffn] -> [..., ffn]."""
    gate_up, out = gate_up.contiguous(), gate_up.new_empty(*gate_up.shape[:-2], gate_up.shape[-1])
    width = gate_up.shape[-1]
    _call("swiglu", gate_up, gate_up, out, out.numel() // max(1, width), width)
    return out


def swiglu_grad(gate_up: Tensor, grad_out: Tensor) -> Tensor:
    """Gradient of `swiglu`'s gate_up, of its shape."""
    (gate_up, grad_out), grad = _alike(gate_up, grad_out), _like(gate_up)
    width = gate_up.shape[-1]
    _call("swiglu_grad", gate_up, gate_up, grad_out, grad, grad_out.numel() // max(1, width), width)
    return grad


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension: x [..., h], weight [h] of any float dtype."""
    x, out, weight = x.contiguous(), _like(x), weight.float().contiguous()
    width = x.shape[-1]
    _call("rms_norm", x, x, weight, out, x.numel() // max(1, width), width, eps)
    return out


def rms_norm_grad(x: Tensor, weight: Tensor, grad_out: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Gradients of `rms_norm`: of x in its dtype, of weight in fp32 [h]."""
    (x, grad_out), grad, weight = _alike(x, grad_out), _like(x), weight.float().contiguous()
    width = x.shape[-1]
    rows = x.numel() // max(1, width)
    grad_weight = torch.zeros(width)
    _call("rms_norm_grad", x, x, weight, grad_out, grad, grad_weight, rows, width, eps)
    return grad, grad_weight


def add(x: Tensor, total: Tensor) -> None:
    """total += x, of one shape. `total` is fp32; both are contiguous."""
    _call("add", x, x, total, x.numel())


def add_column_sums(x: Tensor, total: Tensor) -> None:
    """total [width] += the sum over the rows of x [rows, width]. `total` is fp32 and contiguous."""
    x = x.contiguous()
    _call("column_sums", x, x, total, *x.shape)


def transposed(x: Tensor) -> Tensor:
    """fp32 x [rows, width] -> [width, rows], contiguous."""
    x, out = x.contiguous(), x.new_empty(x.shape[::-1])
    _call("transposed", x, x, out, *x.shape)
    return out


def add_transposed(x: Tensor, total: Tensor) -> None:
    """total [width, rows] += the transpose of x [rows, width], both fp32. `total` is contiguous."""
    x = x.contiguous()
    _call("add_transposed", x, x, total, *x.shape)


def sum_of_squares(tensors: Sequence[Tensor]) -> float:
    """Sum of the squares of contiguous tensors of one dtype, added up in fp64."""
    pointers = [(t.data_ptr(), t.numel()) for t in tensors]
    return _call("sum_of_squares", tensors[0], pointers)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """Turns the pairs (i, i + half) of x [s, b, n, d] by the tables' angles, in the opposite
    direction with `sign` -1.

    cos and sin [s, 1 or b, 1, half]; numbers from 2 half on pass through. -> x's shape and dtype,
    contiguous.
    """
    x, out = x if x.stride(-1) == 1 else x.contiguous(), _like(x)
    cos, sin = cos.float().contiguous(), sin.float().contiguous()
    per_sample = cos.shape[1] != 1
    sizes = (*x.shape, cos.shape[-1])
    _call("rotate", x, x, *x.stride()[:3], out, cos, sin, *sizes, per_sample, float(sign))
    return out


def drop(x: Tensor, bits: Tensor, most: int, factor: float, out: Tensor) -> None:
    """out = x * factor where the int16 `bits` are at most `most`, else x * 0. All contiguous, of
    x's number of elements."""
    _call("drop", x, x, bits, out, x.numel(), most, factor)


def row_losses(
    logits: Tensor, columns: Tensor, valid: int, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Of the first `valid` columns of each row of contiguous logits [n, v]: the loss, fp32 [n], of
    the label in `columns` (int64 [n], each below `valid`) with label smoothing; and, fp32 [4, n],
    the largest, what the logsumexp is above it, the sum, and the label's logit."""
    out = torch.empty(4, len(logits))
    _call("log_sums", logits, logits, out, *logits.shape, valid)
    largest, logs, sums, target = out
    target.copy_(logits[:, :valid].gather(1, columns[:, None]).squeeze(1))
    loss = logs + (largest - target)
    if smoothing:
        loss = loss * (1.0 - smoothing) + (logs + (largest - sums / valid)) * smoothing
    return loss, out


def loss_grad(
    logits: Tensor,
    valid: int,
    largest: Tensor,
    logs: Tensor,
    columns: Tensor,
    grads: Tensor,
    hits: Tensor,
    share: float,
    uniform: float,
) -> None:
    """Puts (exp(logits - largest - logs) - uniform) * grads - onehot(columns) * hits * share into
    the memory of contiguous logits [n, v], 0 in columns from `valid` on. largest, logs, grads, hits
    fp32 [n], columns int64 [n], each below `valid`."""
    rows = [t.contiguous() for t in (largest, logs, grads, hits * share, columns)]
    _call("loss_grad", logits, logits, *rows, *logits.shape, valid, uniform)
