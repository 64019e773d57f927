"""Sums of weight gradients: a product of matrices added to what is there, by the list of its
implementations."""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from megatron.kernels import libraries
from megatron.kernels.cpu import native
from megatron.kernels.implementation import Implementation, choose

LOW_PRECISION = (torch.bfloat16, torch.float16)


def add_weight_grad(rows_out: Tensor, rows_in: Tensor, total: Tensor) -> None:
    """total [out, in] += rows_out^T rows_in; rows_out [m, out] and rows_in [m, in] of one dtype, in
    which this device computes GEMMs."""
    _adder(rows_in.device, rows_in.dtype, total.dtype)(rows_out, rows_in, total)


@cache
def _adder(
    device: torch.device, dtype: torch.dtype, main: torch.dtype
) -> Callable[[Tensor, Tensor, Tensor], object]:
    """Chosen once for all layers."""
    return choose(WEIGHT_GRADS, GradSpec(device, dtype, main)).implementation.forward


@cache
def gemm_adds_in_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch's GEMM of 16-bit matrices adds to a matrix of fp32 here: on CUDA, from the
    version on whose addmm takes one. Tried on small matrices."""
    if device.type != "cuda" or dtype not in LOW_PRECISION:
        return False
    return _tried_in_fp32(device, dtype)


def _tried_in_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    small = 2.0**-12  # lost when it is added to 16 in 16 bits
    total = torch.full((16, 16), small, device=device)
    ones = torch.ones(16, 16, dtype=dtype, device=device)
    try:
        _add_product_(total, ones, ones)
    except (RuntimeError, AttributeError):
        return False
    return bool((total == 16 + small).all())


def _add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total [m, n] (fp32) += a [m, k] b [k, n], of 16 bits."""
    torch.ops.aten.addmm.dtype_out(total, a, b, torch.float32, out=total)


def takes_sums(total: Tensor | None) -> TypeGuard[Tensor]:
    """Whether the C++ can add to this buffer."""
    return total is not None and total.dtype == torch.float32 and total.is_contiguous()


def add(grad: Tensor, total: Tensor) -> None:
    """total += grad. On a CPU torch makes an fp32 copy of a bf16 gradient first."""
    if grad.is_contiguous() and takes_sums(total) and native.runs(grad):
        native.add(grad, total)
    else:
        total.add_(grad)


class GradSpec(NamedTuple):
    """total [out, in] += rows_out^T rows_in [m, in]: a GEMM in `dtype`, a total of `main` dtype."""

    device: torch.device
    dtype: torch.dtype
    main: torch.dtype

    @property
    def features(self) -> dict[str, str]:
        """None."""
        return {}


def _no_apex(spec: GradSpec) -> str | None:
    if why_not := libraries.cuda_only(spec.device):
        return why_not
    from megatron.kernels.cuda import apex

    return apex.gradient_unavailable_reason(spec.dtype, spec.main)


def _by_apex(rows_out: Tensor, rows_in: Tensor, total: Tensor) -> None:
    from megatron.kernels.cuda import apex

    apex.accumulate_weight_grad(rows_in, rows_out, total)


# In the order of preference.
WEIGHT_GRADS: tuple[Implementation[GradSpec, Callable[[Tensor, Tensor, Tensor], object]], ...] = (
    Implementation(
        "apex",
        "apex",
        _by_apex,
        unavailable=_no_apex,
        why=lambda spec: "fused into the GEMM",
    ),
    Implementation(
        "accumulated",
        "accumulated in backward",
        lambda rows_out, rows_in, total: total.addmm_(rows_out.t(), rows_in),
        unavailable=lambda spec: (
            None if spec.dtype == spec.main else f"the sum is {spec.main}, the GEMM {spec.dtype}"
        ),
        why=lambda spec: "no temporary copy",
    ),
    Implementation(
        "accumulated_fp32",
        "accumulated in fp32 by the GEMM",
        lambda rows_out, rows_in, total: _add_product_(total, rows_out.t(), rows_in),
        unavailable=lambda spec: (
            None
            if spec.main == torch.float32 and gemm_adds_in_fp32(spec.device, spec.dtype)
            else "needs CUDA, GEMMs of 16 bits and a torch whose GEMM adds in fp32"
        ),
        why=lambda spec: "no temporary copy",
    ),
    Implementation(
        "added",
        "product, then added",
        lambda rows_out, rows_in, total: add(torch.mm(rows_out.t(), rows_in), total),
        slower=lambda spec: "rounds to the parameter dtype",
        why=lambda spec: "the only one here",
    ),
)
