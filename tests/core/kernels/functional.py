"""All kernels under one name, as the best implementation computes them here."""

import torch
from torch import Tensor

from megatron.kernels.activations import ACTIVATIONS, squared_relu
from megatron.kernels.attention import attention
from megatron.kernels.cross_entropy import cross_entropy
from megatron.kernels.dropout import DROPOUT
from megatron.kernels.gated_activations import GATED, swiglu
from megatron.kernels.implementation import choose
from megatron.kernels.layer_norm import LAYER_NORMS
from megatron.kernels.linear import TpComm, linear, linear_weight_grad
from megatron.kernels.qkv import split_qkv
from megatron.kernels.rms_norm import RMS_NORMS
from megatron.kernels.rotary import ROTARY, rotary_tables
from megatron.kernels.rows import spec_of

__all__ = [
    "TpComm",
    "apply_rotary",
    "attention",
    "bias_gelu",
    "cross_entropy",
    "dropout",
    "geglu",
    "gelu",
    "layer_norm",
    "linear",
    "linear_weight_grad",
    "rms_norm",
    "rotary_tables",
    "split_qkv",
    "squared_relu",
    "swiglu",
]


def gelu(x: Tensor, approximate: bool) -> Tensor:
    """GELU (Hendrycks and Gimpel 2016): the tanh form if `approximate`, else the exact one with
    erf. Any shape."""
    name = "gelu (tanh)" if approximate else "gelu (erf)"
    return choose(ACTIVATIONS[name], spec_of(x)).implementation.forward(x)


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """tanh GELU of x + bias: x [..., ffn], bias [ffn] -> [..., ffn]."""
    return gelu(x + bias, approximate=True)


def geglu(gate_up: Tensor) -> Tensor:
    """GEGLU (Shazeer 2020): tanh gelu(gate) * up; gate_up [..., 2, ffn] (gate first) -> [...,
    ffn]."""
    return choose(GATED["geglu"], spec_of(gate_up)).implementation.forward(gate_up)


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


def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    fused: bool = True,
    batch_first: bool = False,
) -> Tensor:
    """Rotate the first 2 * cos.shape[-1] dimensions of each head, pass the others through.

    x [s, b, n, d]; cos and sin [s, dim / 2] or [s, b, dim / 2] with dim <= d. Pairs are (i, i + dim
    / 2), or (2 i, 2 i + 1) if `interleaved`. Computed in the wider of the dtypes of x and cos,
    returned in x's. `fused` False: operation by operation on every device. `batch_first`: on CUDA
    the result is in memory sample by sample, as attention inside documents takes it.
    """
    other = x.dim() != 4 or cos.dtype not in (x.dtype, torch.float32)
    asked = spec_of(x, no_rope_fusion=not fused, interleaved=interleaved, other_shape=other)
    return choose(ROTARY, asked).implementation.forward(x, cos, sin, interleaved, batch_first)


def dropout(x: Tensor, p: float, seed: int | Tensor, residual: Tensor | None = None) -> Tensor:
    """Zero each element with probability p and scale the others by 1 / (1 - p) (Srivastava et al.
    2014).

    x: any shape; `seed`: an integer, also as an int64 tensor without dimensions. The
    mask is a pure function of (seed, shape) on a kind of device; it is drawn again in backward and
    never stored. `residual`: of the shape of x, to which the result is added.
    """
    assert 0.0 <= p < 1.0, f"dropout probability must be in [0, 1), got {p}"
    if p == 0.0:
        return x if residual is None else residual + x
    return choose(DROPOUT, spec_of(x)).implementation.forward(x, p, seed, residual)
