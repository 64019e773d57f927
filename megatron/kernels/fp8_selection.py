"""Kernel selection of --fp8-format: which FP8 GEMM of linear layers runs on a device."""

from __future__ import annotations

import torch

from megatron.config.tree import Config
from megatron.device import has_fp8
from megatron.kernels.kernels import KernelRow, pair


def rows(device: torch.device, config: Config) -> list[KernelRow]:
    """The implementations on `device`, one of them selected. Raises ValueError if the device has no
    FP8 support."""
    operation = "linear in transformer layers"
    kind = config.precision.fp8
    if device.type != "cpu" and not has_fp8(device):
        raise ValueError(
            f"--fp8-format {kind}: this device has no FP8 support (needs compute capability "
            "8.9 or newer); omit it [fp8-not-supported]"
        )
    if config.kernels.transformer_impl == "transformer_engine":
        return pair(
            operation,
            (f"Transformer Engine FP8 GEMM ({kind})", f"FP8 GEMM ({kind})"),
            True,
            (
                f"--fp8-recipe {config.precision.fp8_recipe}",
                "--transformer-impl transformer_engine",
            ),
        )
    native = device.type != "cpu"
    return pair(
        operation,
        (f"FP8 GEMM ({kind})", f"FP8 casts ({kind}), fp32 GEMM"),
        native,
        (
            _fp8_speed(device, config)
            if native
            else f"EMULATED: a {device.type} has no FP8 GEMM; same casts and scales, but "
            "slower than without --fp8-format",
            "not needed" if native else f"no FP8 support on this {device.type}",
        ),
    )


def _fp8_speed(device: torch.device, config: Config) -> str:
    """What own FP8 on a device with FP8 GEMMs gains: eager, its maxima and casts are kernels of
    their own, which read every operand twice."""
    support = f"native FP8 support on this {device.type}"
    if config.training.torch_compile:
        return support
    return (
        f"{support}, not measured; in narrow layers casts may make it SLOWER than without "
        "--fp8-format: add --torch-compile and --fp8-recipe tensorwise, or use "
        "--transformer-impl transformer_engine"
    )
