"""Activation functions of the MLP, gated ones included; knows tensors, no module."""

import torch.nn.functional as F
from torch import Tensor


def gelu(x: Tensor, approximate: bool) -> Tensor:
    """GELU (Hendrycks and Gimpel 2016): the tanh form if `approximate`, else the exact one with erf. Any shape."""
    return F.gelu(x, approximate="tanh" if approximate else "none")


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """tanh GELU of x + bias: x [..., ffn], bias [ffn] -> [..., ffn]."""
    return F.gelu(x + bias, approximate="tanh")


def swiglu(gate_up: Tensor) -> Tensor:
    """SwiGLU (Shazeer 2020): silu(gate) * up; gate_up [..., 2, ffn] (gate first) -> [..., ffn]."""
    gate, up = gate_up.unbind(-2)
    return F.silu(gate) * up


def geglu(gate_up: Tensor) -> Tensor:
    """GEGLU (Shazeer 2020): tanh gelu(gate) * up; gate_up [..., 2, ffn] (gate first) -> [..., ffn]."""
    gate, up = gate_up.unbind(-2)
    return F.gelu(gate, approximate="tanh") * up


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2 (So et al. 2021, Primer). Any shape."""
    return F.relu(x).square()
