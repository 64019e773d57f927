"""What a device does by itself: its clock, the rate of a large GEMM, its peak by name."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from megatron import device as devices

# Dense bf16 peaks in TFLOP/s by a word of the device's name, the more special name first.
PEAKS = {
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "H200": 989.0,
    "H800": 989.0,
    "GH200": 989.0,
    "B200": 2250.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
}


def peak_of(name: str) -> float | None:
    """Dense bf16 peak of the device of that name, TFLOP/s, or None where it is not known."""
    return next((peak for word, peak in PEAKS.items() if word in name), None)


def make_clock(device: torch.device) -> Callable[[], float]:
    """Seconds, once the device is done."""

    def clock() -> float:
        devices.synchronize(device)
        return time.perf_counter()

    return clock


def matmul_rate(device: torch.device, dtype: torch.dtype, times: int = 5) -> float:
    """TFLOP/s of a large square GEMM of random numbers (zeros would flatter it): the median of
    `times`."""
    n = 8192 if device.type == "cuda" else 256  # a CPU may emulate the dtype
    a, b = (torch.randn((n, n), dtype=dtype, device=device) for _ in range(2))
    out = a @ b
    clock = make_clock(device)
    seconds = []
    for _ in range(times):
        start = clock()
        torch.mm(a, b, out=out)
        seconds.append(clock() - start)
    return 2e-12 * n**3 / statistics.median(seconds)
