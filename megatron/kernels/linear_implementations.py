"""The implementations of linear layers: Transformer Engine's modules, FP8 GEMMs, and GEMMs in the
parameter dtype."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron.device import has_fp8
from megatron.kernels import libraries, linear
from megatron.kernels.implementation import Implementation
from megatron.kernels.weight_grads import LOW_PRECISION


@dataclass(frozen=True)
class LinearSpec:
    """y = x W^T + b of a layer: all that the choice of its implementation depends on.

    fp8: "e4m3" or "hybrid", the formats of its GEMMs, None in the parameter dtype. engine: by
    Transformer Engine, which is available where it was requested. compiled: in a graph of
    torch.compile.
    """

    device: torch.device
    dtype: torch.dtype
    fp8: str | None = None
    engine: bool = False
    compiled: bool = False

    @property
    def features(self) -> dict[str, str]:
        """What not every implementation has."""
        words = {"fp8": "FP8 GEMMs", "engine": "Transformer Engine's modules"}
        return {name: words[name] for name in words if getattr(self, name)}

    @property
    def emulated(self) -> bool:
        """Are GEMMs of the parameter dtype emulated on this device?"""
        low = self.dtype in LOW_PRECISION
        return low and not linear.low_precision_is_native(self.device.type, self.dtype)


class Gemms(Protocol):
    """The GEMMs of a layer with their gradients, as `kernels.linear.linear` and
    `kernels.grouped_linear.grouped_linear`."""

    linear: Callable[..., Tensor]
    grouped_linear: Callable[..., Tensor]


class ParameterGemms:
    """Those in the parameter dtype."""

    linear = staticmethod(linear.linear)


class Layer(Protocol):
    """A linear layer. `compute` is it by some GEMMs, with the communication around them; `engine`
    Transformer Engine's module, which has its own; `scaling` its FP8 GEMMs, `gemms` those in the
    parameter dtype."""

    engine: Any
    scaling: Any
    gemms: Any

    def compute(self, gemms: Gemms, *args: Any) -> Tensor:
        """The layer on its inputs."""


Forward = Callable[..., Tensor]  # a Layer and its inputs -> its output


def _by_engine(layer: Layer, *inputs: Any) -> Tensor:
    return layer.engine(*inputs)


def _in_fp8(layer: Layer, *inputs: Any) -> Tensor:
    return layer.compute(layer.scaling, *inputs)


def _in_parameter_dtype(layer: Layer, *inputs: Any) -> Tensor:
    return layer.compute(layer.gemms, *inputs)


def _fp8_why(spec: LinearSpec) -> str:
    """What FP8 on a device with FP8 GEMMs gains: eager, its maxima and casts are kernels of their
    own, which read every operand twice."""
    support = f"native FP8 support on this {spec.device.type}"
    if spec.compiled:
        return support
    return (
        f"{support}, not measured; in narrow layers casts may make it SLOWER than without "
        "--fp8-format: add --torch-compile and --fp8-recipe tensorwise, or use "
        "--transformer-impl transformer_engine"
    )


def _without_fp8(spec: LinearSpec) -> str | None:
    return None if spec.fp8 else "no --fp8-format"


# In the order of preference. In titles: the parameter dtype, --fp8-format.
IMPLEMENTATIONS: tuple[Implementation[LinearSpec, Forward], ...] = (
    Implementation(
        "transformer_engine",
        "Transformer Engine",
        _by_engine,
        frozenset({"fp8", "engine"}),
        lambda spec: (
            None
            if spec.engine
            else libraries.transformer_engine_unavailable_reason(spec.device, spec.dtype)
        ),
        slower=lambda spec: None if spec.engine else "not selected",
        why=lambda spec: "requested" + (f", FP8 GEMMs ({spec.fp8})" if spec.fp8 else ""),
    ),
    Implementation(
        "fp8",
        "FP8 GEMM ({fp8})",
        _in_fp8,
        frozenset({"fp8"}),
        lambda spec: None if has_fp8(spec.device) else f"no FP8 support on this {spec.device.type}",
        slower=_without_fp8,
        why=_fp8_why,
    ),
    Implementation(
        "fp8_casts",
        "FP8 casts ({fp8}), fp32 GEMM",
        _in_fp8,
        frozenset({"fp8"}),
        lambda spec: None if spec.device.type == "cpu" else "for tests on a CPU",
        slower=_without_fp8,
        why=lambda spec: (
            f"EMULATED: a {spec.device.type} has no FP8 GEMM; same casts and scales, "
            "but slower than without --fp8-format"
        ),
    ),
    Implementation(
        "gemm",
        "{dtype} GEMM",
        _in_parameter_dtype,
        slower=lambda spec: (
            "emulated here; fp32 is several times faster" if spec.emulated else None
        ),
        why=lambda spec: "parameter dtype",
    ),
    Implementation(
        "fp32_gemm",
        "fp32 GEMM, rounded once",
        _in_parameter_dtype,
        slower=lambda spec: None if spec.emulated else "not needed",
        why=lambda spec: f"no native support of the parameter dtype on this {spec.device.type}",
    ),
)
