"""Activation functions of gated MLPs."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.config.model_flags import ModelFlags
from megatron.kernels.cpu import native
from megatron.kernels.cpu.blocking import for_each, row_blocks, wide_dtype
from megatron.kernels.gelu import TanhGelu, tanh_gelu, tanh_gelu_in_cpp
from megatron.kernels.implementation import Implementation, choose
from megatron.kernels.rows import COMPILED, ROW_BLOCKED, WORDS, Row, only, rivals, spec_of

STEEPNESS = {"swiglu": 1.0, "quick_geglu": 1.702}  # a of x sigmoid(a x)


def swiglu(gate_up: Tensor, fused: bool = True) -> Tensor:
    """SwiGLU (Shazeer 2020): silu(gate) * up; gate_up [..., 2, ffn] (gate first) -> [..., ffn].

    `fused` False: operation by operation on every device.
    """
    spec = spec_of(gate_up, no_swiglu_fusion=not fused)
    return choose(GATED["swiglu"], spec).implementation.forward(gate_up)


def _swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.unbind(-2)
    return F.silu(gate) * up


class _NativeSwiGlu(torch.autograd.Function):
    """Keeps its input alone."""

    @staticmethod
    def forward(ctx, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return native.swiglu(gate_up)

    @staticmethod
    def backward(ctx, grad_out: Tensor):
        (gate_up,) = ctx.saved_tensors
        return native.swiglu_grad(gate_up, grad_out)


class _SwiGlu(torch.autograd.Function):
    """Keeps its input alone and writes both halves of the gradient into one tensor."""

    @staticmethod
    def forward(ctx, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        source = gate_up.reshape(-1, *gate_up.shape[-2:])
        out = gate_up.new_empty(*gate_up.shape[:-2], gate_up.shape[-1])
        target = out.view(-1, out.shape[-1])

        def work(rows: slice) -> None:
            gate, up = source[rows].to(wide_dtype(gate_up)).unbind(1)
            torch.mul(F.silu(gate), up, out=target[rows])

        for_each(row_blocks(len(source), 2 * out.shape[-1]), gate_up.device, work)
        return out

    @staticmethod
    def backward(ctx, grad_out: Tensor):
        (gate_up,) = ctx.saved_tensors
        source = gate_up.reshape(-1, *gate_up.shape[-2:])
        grads = grad_out.reshape(-1, grad_out.shape[-1])
        target = torch.empty_like(source, memory_format=torch.contiguous_format)

        def work(rows: slice) -> None:
            gate, up = source[rows].to(wide_dtype(gate_up)).unbind(1)
            grad = grads[rows].to(gate.dtype)
            target[rows, 0] = torch.ops.aten.silu_backward(grad * up, gate)
            torch.mul(F.silu(gate), grad, out=target[rows, 1])

        for_each(row_blocks(len(source), 2 * grads.shape[1]), gate_up.device, work)
        return target.view(gate_up.shape)


def _swiglu_in_triton(gate_up: Tensor) -> Tensor:
    from megatron.kernels.cuda.fused_ops import SwiGlu

    return SwiGlu.apply(gate_up)


def _gated(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def gated(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.unbind(-2)
        return function(gate) * up

    return gated


def sigmoid_glu(
    gate_up: Tensor, steepness: float, clamp: float | None = None, offset: float = 0.0
) -> Tensor:
    """gate sigmoid(steepness gate) (up + offset), of gate <= clamp and |up| <= clamp; gate_up [...,
    2, ffn] (gate first) -> [..., ffn]. gpt-oss has 1.702, 7 and 1."""
    gate, up = gate_up.unbind(-2)
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    return gate * torch.sigmoid(steepness * gate) * (up + offset)


def _sigmoid_glu_in_blocks(
    gate_up: Tensor, steepness: float, clamp: float | None, offset: float
) -> Tensor:
    return _SigmoidGlu.apply(gate_up, steepness, math.inf if clamp is None else clamp, offset)


class _SigmoidGlu(torch.autograd.Function):
    """Keeps its input alone."""

    @staticmethod
    def forward(ctx, gate_up: Tensor, steepness: float, clamp: float, offset: float) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.numbers = steepness, clamp, offset
        source = gate_up.reshape(-1, *gate_up.shape[-2:])
        out = gate_up.new_empty(*gate_up.shape[:-2], gate_up.shape[-1])
        target = out.view(-1, out.shape[-1])

        def work(rows: slice) -> None:
            block = source[rows].to(wide_dtype(gate_up))
            target[rows] = sigmoid_glu(block, steepness, clamp, offset)

        for_each(row_blocks(len(source), 2 * out.shape[-1]), gate_up.device, work)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out: Tensor):
        (gate_up,) = ctx.saved_tensors
        steepness, clamp, offset = ctx.numbers
        source = gate_up.reshape(-1, *gate_up.shape[-2:])
        grads = grad_out.reshape(-1, grad_out.shape[-1])
        target = torch.empty_like(source, memory_format=torch.contiguous_format)

        def work(rows: slice) -> None:
            gate, up = source[rows].to(wide_dtype(gate_up)).unbind(1)
            grad = grads[rows].to(gate.dtype)
            low = gate.clamp(max=clamp)
            share = torch.sigmoid(steepness * low)
            slope = share * (1 + steepness * low * (1 - share))
            slope *= (up.clamp(-clamp, clamp) + offset) * (gate <= clamp)
            target[rows, 0] = slope * grad
            target[rows, 1] = low * share * (up.abs() <= clamp) * grad

        for_each(row_blocks(len(source), 2 * grads.shape[1]), gate_up.device, work)
        return target.view(gate_up.shape), None, None, None


SIGMOID_GLU = only(
    sigmoid_glu,
    Implementation(
        "blocked",
        ROW_BLOCKED,
        _sigmoid_glu_in_blocks,
        frozenset(WORDS),
        lambda spec: COMPILED if spec.compiled else None,
        why=lambda spec: "keeps its input alone",
    ),
)

GATED: dict[str, tuple[Row, ...]] = {
    "geglu": rivals(_gated(tanh_gelu), _gated(TanhGelu.apply), _gated(tanh_gelu_in_cpp)),
    "swiglu": rivals(
        _swiglu,
        _SwiGlu.apply,
        _NativeSwiGlu.apply,
        _swiglu_in_triton,
        plain_takes=frozenset({"no_swiglu_fusion"}),
    ),
}


def implementations(model: ModelFlags) -> tuple[tuple[Row, ...], dict[str, Any]]:
    """Those of a model's gated activation function, and its numbers."""
    name = model.activation
    if name != "quick_geglu" and not model.changed_glu:
        return GATED[name], {}
    numbers = {
        "steepness": STEEPNESS[name],
        "clamp": model.activation_func_clamp_value,
        "offset": model.glu_linear_offset,
    }
    return SIGMOID_GLU, numbers
