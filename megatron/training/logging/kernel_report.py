"""The kernel report: the table of selected and unavailable kernels as log lines."""

from __future__ import annotations

import torch

from megatron import launcher
from megatron.config.tree import Config
from megatron.device import choose_device, device_type
from megatron.kernels import select
from megatron.kernels.select import KernelRow, kernel_table


def check_requested(config: Config) -> None:
    """Raise ValueError, before CUDA starts, if a kernel requested by name is unavailable."""
    device = torch.device(device_type(config.training.device))
    select.check_requested(device, getattr(torch, config.precision.params_dtype), config)


def kernel_lines(config: Config) -> list[str]:
    """Which kernels a run uses on this machine. Raises ValueError if the device of --device is not
    available."""
    device = choose_device(config.training.device, launcher.info().local_rank)
    rows = kernel_table(device, getattr(torch, config.precision.params_dtype), config)
    return [f"kernels on this {device.type}", *(f"  {text}" for text in describe(rows))]


def describe(rows: list[KernelRow]) -> list[str]:
    """One line per operation, then the kernels that are not used, one line per reason."""
    lines = [f"{row.operation}: {row.implementation} ({row.reason})" for row in rows if row.on]
    off: dict[str, list[str]] = {}
    for row in rows:
        if not row.on:
            off.setdefault(row.reason, []).append(f"{row.operation} by {row.implementation}")
    return [
        *lines,
        "not used:",
        *(f"  {', '.join(names)} ({reason})" for reason, names in off.items()),
    ]
