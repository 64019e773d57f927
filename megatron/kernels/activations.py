"""Activation functions of the MLP, gated ones included."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.config.model_flags import ModelFlags
from megatron.kernels.cpu import native
from megatron.kernels.cpu.blocking import FEW, for_each, row_blocks, wide_dtype
from megatron.kernels.implementation import Implementation, choose
from megatron.kernels.rows import COMPILED, ROW_BLOCKED, WORDS, Row, only, rivals, spec_of

GELU_LINEAR = 2 * math.sqrt(2 / math.pi)  # tanh GELU is x sigmoid(GELU_LINEAR x + GELU_CUBIC x^3)
GELU_CUBIC = 0.044715 * GELU_LINEAR
STEEPNESS = {"swiglu": 1.0, "quick_geglu": 1.702}  # a of x sigmoid(a x)


def gelu(x: Tensor, approximate: bool) -> Tensor:
    """GELU (Hendrycks and Gimpel 2016): the tanh form if `approximate`, else the exact one with
    erf. Any shape."""
    name = "gelu (tanh)" if approximate else "gelu (erf)"
    return choose(ACTIVATIONS[name], spec_of(x)).implementation.forward(x)


def _tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _tanh_gelu_in_cpp(x: Tensor) -> Tensor:
    if x.dtype == torch.bfloat16:
        return _NativeTanhGelu.apply(x)
    return _tanh_gelu(x) if x.numel() < FEW else _NativeSlope.apply(x)


class _NativeTanhGelu(torch.autograd.Function):
    """Keeps its input: a slope in bf16 would be rounded."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return native.gelu(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out: Tensor):
        (x,) = ctx.saved_tensors
        return native.gelu_grad(x, grad_out)


class _TanhGelu(torch.autograd.Function):
    """Computes the slope together with the value, while the sigmoid is in registers, and keeps it
    instead of the input.

    Backward turns the slope into the gradient in place; torch refuses a second backward over
    it.
    """

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        out, slope = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))
        source = x.reshape(-1)
        targets = (out.view(-1), slope.view(-1))
        linear = torch.tensor(GELU_LINEAR, dtype=wide_dtype(x), device=x.device)

        def work(run: slice) -> None:
            block = source[run].to(wide_dtype(x))
            value, rise = (
                t[run] if t.dtype == block.dtype else torch.empty_like(block) for t in targets
            )
            torch.mul(block, block, out=rise)
            torch.add(linear, rise, alpha=GELU_CUBIC, out=rise).mul_(block)
            torch.sigmoid(rise, out=value)
            # a third of x times the slope of what the sigmoid is taken of
            rise.add_(block, alpha=-2 / 3 * GELU_LINEAR)
            torch.ops.aten.sigmoid_backward.grad_input(rise, value, grad_input=rise)
            torch.add(value, rise, alpha=3, out=rise)
            value.mul_(block)
            if block.dtype != x.dtype:
                targets[0][run], targets[1][run] = value, rise

        for_each(row_blocks(len(source), 1), x.device, work)
        ctx.save_for_backward(slope)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out: Tensor):
        (slope,) = ctx.saved_tensors
        return slope.mul_(grad_out)


class _NativeSlope(_TanhGelu):
    """The same by the C++."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        out, slope = native.gelu_with_slope(x)
        ctx.save_for_backward(slope)
        return out


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """tanh GELU of x + bias: x [..., ffn], bias [ffn] -> [..., ffn]."""
    return gelu(x + bias, approximate=True)


def swiglu(gate_up: Tensor, fused: bool = True) -> Tensor:
    """SwiGLU (Shazeer 2020): silu(gate) * up; gate_up [..., 2, ffn] (gate first) -> [..., ffn].

    `fused` False: operation by operation on every device.
    """
    spec = spec_of(gate_up, no_swiglu_fusion=not fused)
    return choose(ACTIVATIONS["swiglu"], spec).implementation.forward(gate_up)


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


def geglu(gate_up: Tensor) -> Tensor:
    """GEGLU (Shazeer 2020): tanh gelu(gate) * up; gate_up [..., 2, ffn] (gate first) -> [...,
    ffn]."""
    return choose(ACTIVATIONS["geglu"], spec_of(gate_up)).implementation.forward(gate_up)


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


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2 (So et al. 2021, Primer). Any shape."""
    return F.relu(x).square()


ACTIVATIONS: dict[str, tuple[Row, ...]] = {
    "gelu (tanh)": rivals(_tanh_gelu, _TanhGelu.apply, _tanh_gelu_in_cpp, why="single kernel"),
    "gelu (erf)": only(F.gelu),
    "geglu": rivals(_gated(_tanh_gelu), _gated(_TanhGelu.apply), _gated(_tanh_gelu_in_cpp)),
    "squared_relu": only(squared_relu),
    "swiglu": rivals(
        _swiglu,
        _SwiGlu.apply,
        _NativeSwiGlu.apply,
        _swiglu_in_triton,
        plain_takes=frozenset({"no_swiglu_fusion"}),
    ),
}
# a module of its own, of operations of torch
XIELU = only(F.silu)
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


def implementations(model: ModelFlags) -> tuple[tuple[Row, ...], dict[str, Any]]:
    """Those of a model's activation function, and its numbers."""
    name = model.activation
    if name != "quick_geglu" and not model.changed_glu:
        return ACTIVATIONS.get(name, XIELU), {}
    numbers = {
        "steepness": STEEPNESS[name],
        "clamp": model.activation_func_clamp_value,
        "offset": model.glu_linear_offset,
    }
    return SIGMOID_GLU, numbers
