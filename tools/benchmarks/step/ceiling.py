"""How fast the GEMMs and the attention of a step are by themselves: what no step of this
kind can be ahead of.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F
from sizes import Size

Clock = Callable[[], float]
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


def linears(size: Size) -> list[tuple[str, int, int, int]]:
    """(name, how many in the model, inputs, outputs) of every kind of matrix."""
    h = size.hidden
    return [
        ("qkv", size.layers, h, 3 * h),
        ("proj", size.layers, h, h),
        ("fc1", size.layers, h, size.ffn_size * (2 if size.gated else 1)),
        ("fc2", size.layers, size.ffn_size, h),
        ("head", 1, h, size.vocab),
    ]


def _products(
    rows: int, inputs: int, outputs: int, dtype: torch.dtype, device: torch.device
) -> list[list[Callable]]:
    """Forward, input gradient and weight gradient of a linear layer; of each the ways to write
    it."""
    x, weight, grad = (
        torch.randn(shape, dtype=dtype, device=device)
        for shape in ((rows, inputs), (outputs, inputs), (rows, outputs))
    )
    out, grad_x, grad_w = (torch.empty_like(t) for t in (grad, x, weight))
    grad_w_t = grad_w.t().contiguous()
    return [
        [lambda: torch.mm(x, weight.t(), out=out)],
        [lambda: torch.mm(grad, weight, out=grad_x)],
        [lambda: torch.mm(grad.t(), x, out=grad_w), lambda: torch.mm(x.t(), grad, out=grad_w_t)],
    ]


def _attention(size: Size, dtype: torch.dtype, device: torch.device) -> Callable[[], None]:
    """torch's fused causal attention, forward and backward, in its favourite layout [b, n, s,
    d]."""
    shape = size.micro_batch, size.heads, size.seq, size.hidden // size.heads
    q, k, v = (torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for _ in range(3))
    grad = torch.randn(shape, dtype=dtype, device=device)

    def run() -> None:
        torch.autograd.grad(
            F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), grad
        )

    return run


def timed(run: Callable[[], object], clock: Clock) -> float:
    """Seconds of one call."""
    start = clock()
    run()
    return clock() - start


def faster_dtype(dtype: torch.dtype, device: torch.device, clock: Clock) -> torch.dtype:
    """`dtype`, or fp32 where GEMMs are faster in it (a CPU that emulates bf16)."""

    def best(kind: torch.dtype) -> float:
        a = torch.randn((512, 512), dtype=kind, device=device)
        return min(timed(lambda: a @ a, clock) for _ in range(4))

    return min((dtype, torch.float32), key=best)


class Ceiling:
    """The best and the typical time of each piece of a step, over as many rounds as `measure` is
    called."""

    def __init__(self, size: Size, dtype: torch.dtype, device: torch.device, clock: Clock):
        self.dtype = faster_dtype(dtype, device, clock)
        self._clock = clock
        self._size = size
        self._device = device
        self._seconds: dict[str, list[float]] = {}
        self.flops = 0.0
        rows = size.seq * size.micro_batch
        for _, count, inputs, outputs in linears(size):
            self.flops += size.micro_batches * count * 6.0 * rows * inputs * outputs

    def measure(self) -> None:
        """Time every piece once more (operands live only meanwhile)."""
        rows = self._size.seq * self._size.micro_batch
        for name, _, inputs, outputs in linears(self._size):
            for index, ways in enumerate(
                _products(rows, inputs, outputs, self.dtype, self._device)
            ):
                for run in ways:
                    run()
                    self._note(
                        f"{name}/{index}", min(timed(run, self._clock), timed(run, self._clock))
                    )
        run = _attention(self._size, self.dtype, self._device)
        run()
        self._note("attention", timed(run, self._clock))

    def _note(self, piece: str, seconds: float) -> None:
        self._seconds.setdefault(piece, []).append(seconds)

    def seconds(self) -> tuple[float, float]:
        """Seconds of all GEMMs and of all attention calls of one step, each piece at its
        best."""
        best = {piece: min(values) for piece, values in self._seconds.items()}
        layers = self._size.layers
        batches = self._size.micro_batches
        gemm = sum(
            count * best[f"{name}/{index}"]
            for name, count, _, _ in linears(self._size)
            for index in range(3)
        )
        return batches * gemm, batches * layers * best["attention"]


def matmul_rate(device: torch.device, dtype: torch.dtype, clock: Clock, times: int = 5) -> float:
    """TFLOP/s of a large square GEMM of random numbers (zeros would flatter it): the median of
    `times`."""
    n = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn((n, n), dtype=dtype, device=device) for _ in range(2))
    out = a @ b
    return (
        2e-12
        * n**3
        / statistics.median(timed(lambda: torch.mm(a, b, out=out), clock) for _ in range(times))
    )
