"""The table of kernels as lines that a person reads. Knows no kernel."""

from __future__ import annotations

import torch

from megatron import launcher
from megatron.config.tree import Config
from megatron.device import choose_device, device_type
from megatron.kernels import select
from megatron.kernels.select import KernelRow, kernel_table


def check_wishes(config: Config) -> None:
    """Raise ValueError, before CUDA starts, where a kernel asked for by name cannot run here."""
    device = torch.device(device_type(config.training.device))
    select.check_wishes(device, getattr(torch, config.precision.params_dtype), config)


def kernel_lines(config: Config) -> list[str]:
    """Which kernels a run uses on this machine. Raises ValueError if --device names one that is not
    here."""
    device = choose_device(config.training.device, launcher.info().local_rank)
    rows = kernel_table(device, getattr(torch, config.precision.params_dtype), config)
    return [f"kernels on this {device.type}", *(f"  {text}" for text in describe(rows))]


def describe(rows: list[KernelRow]) -> list[str]:
    """A line for each operation, and one for all that is off, by reasons."""
    lines = [f"{row.operation}: {row.implementation} ({row.reason})" for row in rows if row.on]
    off: dict[str, list[str]] = {}
    for row in rows:
        if not row.on:
            off.setdefault(row.reason, []).append(f"{row.operation} by {row.implementation}")
    return [
        *lines,
        "off: " + "; ".join(f"{', '.join(names)} ({reason})" for reason, names in off.items()),
    ]
