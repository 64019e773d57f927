"""All kernels under one name: functions on local tensors."""

from megatron.kernels.activations import bias_gelu, geglu, gelu, squared_relu, swiglu
from megatron.kernels.attention import attention
from megatron.kernels.cross_entropy import cross_entropy
from megatron.kernels.dropout import dropout
from megatron.kernels.linear import TpComm, linear, linear_weight_grad
from megatron.kernels.norms import layer_norm, rms_norm
from megatron.kernels.qkv import split_qkv
from megatron.kernels.rotary import apply_rotary, rotary_tables

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
