"""Activation functions of the MLP."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from megatron.config.model_flags import ModelFlags
from megatron.kernels.gelu import TanhGelu, tanh_gelu, tanh_gelu_in_cpp
from megatron.kernels.rows import Row, only, rivals


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2 (So et al. 2021, Primer). Any shape."""
    return F.relu(x).square()


ACTIVATIONS: dict[str, tuple[Row, ...]] = {
    "gelu (tanh)": rivals(tanh_gelu, TanhGelu.apply, tanh_gelu_in_cpp, why="single kernel"),
    "gelu (erf)": only(F.gelu),
    "squared_relu": only(squared_relu),
}
# a module of its own, of operations of torch
XIELU = only(F.silu)


def implementations(model: ModelFlags) -> tuple[tuple[Row, ...], dict[str, Any]]:
    """Those of a model's activation function, and its numbers."""
    if model.gated:
        from megatron.kernels import gated_activations

        return gated_activations.implementations(model)
    return ACTIVATIONS.get(model.activation, XIELU), {}
