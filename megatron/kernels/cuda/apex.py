"""Norms and the accumulating weight gradient of NVIDIA's apex. The only importer of apex.

PyPI's package of that name is another project's and must not be installed; apex is built from its
repository, https://github.com/NVIDIA/apex, with --cpp_ext --cuda_ext.
"""

import torch
from torch import Tensor

from megatron.kernels.libraries import load_problem

INSTALL = "build it from github.com/NVIDIA/apex (PyPI's apex is not it)"


def unavailable_reason(dtype: torch.dtype) -> str | None:
    """Why apex's norms cannot run on a CUDA device; None if they can."""
    if dtype == torch.float64:
        return "apex's norms are not for fp64"
    return load_problem("fused_layer_norm_cuda", "NVIDIA's apex", INSTALL) or load_problem(
        "apex", "NVIDIA's apex", INSTALL
    )


def gradient_unavailable_reason(dtype: torch.dtype, main_dtype: torch.dtype) -> str | None:
    """Why apex's accumulating weight gradient cannot run on a CUDA device; None if it can."""
    if dtype not in (torch.float16, torch.bfloat16) or main_dtype != torch.float32:
        return "apex's kernel needs bf16 or fp16 weights and fp32 gradients"
    return load_problem(
        "fused_weight_gradient_mlp_cuda", "fused_weight_gradient_mlp_cuda of apex", INSTALL
    )


def accumulate_weight_grad(x: Tensor, grad_out: Tensor, main_grad: Tensor) -> None:
    """main_grad [out, in] (fp32) += grad_out^T x, in one GEMM: x [rows, in], grad_out [rows,
    out], of 16 bits."""
    import fused_weight_gradient_mlp_cuda

    # The kernel reads rows without gaps and checks no strides.
    fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32(
        x.contiguous(), grad_out.contiguous(), main_grad
    )


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm over the last dimension: x [..., h], weight and bias [h] -> [..., h]."""
    from apex.normalization.fused_layer_norm import fused_layer_norm_affine

    return fused_layer_norm_affine(x, weight, bias, weight.shape, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension: x [..., h], weight [h] -> [..., h]."""
    from apex.normalization.fused_layer_norm import fused_rms_norm_affine

    return fused_rms_norm_affine(x, weight, weight.shape, eps)
