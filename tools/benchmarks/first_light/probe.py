"""What a device and its libraries do: rates of a GEMM, copies, attention and FP8.
Step 1 of first_light.sh.

    python probe.py DEVICE FILE.json

Each figure is written as soon as it is there; what cannot run is a line of text in its place.
"""

from __future__ import annotations

import contextlib
import json
import platform
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rates import make_clock, matmul_rate, peak_of
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron import device as devices
from megatron.kernels.cuda.availability import unavailable_reason
from megatron.kernels.weight_grads import gemm_adds_in_fp32

BACKENDS = {
    "default": None,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
}
# What fails here stops training; the rest is for information.
NEEDED = {"machine", "Triton", "copy TB/s", "attention d 64", "attention d 128"}
QUERY = "driver_version,clocks.sm,clocks.max.sm,power.draw,power.limit,memory.used"


class Probe:
    """The figures of one device; `small`: as many as a CPU computes in a moment."""

    def __init__(self, device: torch.device, file: Path):
        self.device = device
        self.file = file
        self.small = device.type == "cpu"
        self.dtype = torch.bfloat16
        self.figures: dict[str, Any] = {}
        self.failed: set[str] = set()
        self._clock = make_clock(device)

    def note(self, name: str, measure: Callable[[], Any]) -> None:
        """The figure `name`, or why there is none."""
        try:
            value = measure()
        except Exception as error:  # the next figure may still be had
            value = {"error": f"{type(error).__name__}: {error}"[:300]}
            self.failed.add(name)
        self.figures[name] = value
        self.file.write_text(json.dumps(self.figures), encoding="utf-8")
        print(f"{name}: {value}", flush=True)

    def seconds(self, run: Callable[[], object], times: int = 20) -> float:
        """Of one call, the mean of `times` after two."""
        times = 2 if self.small else times
        run()
        run()
        start = self._clock()
        for _ in range(times):
            run()
        return (self._clock() - start) / times

    def random(self, *shape: int) -> Tensor:
        """Random numbers in bf16: zeros would flatter a GEMM."""
        return torch.randn(shape, device=self.device).to(self.dtype)

    def machine(self) -> dict[str, Any]:
        """Names and versions."""
        name = devices.name(self.device)
        facts = {
            "device_name": name,
            "peak_tflops": peak_of(name) if self.device.type == "cuda" else None,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "threads": torch.get_num_threads(),
            "matmul_tflops": {"bf16": matmul_rate(self.device, self.dtype)},
        }
        for name in ("numpy", "triton", "transformers", "nvidia-cudnn-cu13"):
            with contextlib.suppress(metadata.PackageNotFoundError):
                facts[name] = metadata.version(name)
        facts["cuda"] = torch.version.cuda
        return facts

    def driver(self) -> str:
        """Driver, clocks and power, as nvidia-smi has them."""
        words = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
        return subprocess.run(
            words, capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()

    def copy(self) -> float:
        """TB/s, of reading and writing 1 GiB."""
        source = torch.empty(1 << (20 if self.small else 30), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2e-12 * source.numel() / self.seconds(lambda: target.copy_(source))

    def weight_gradient(self) -> dict[str, float | bool]:
        """TFLOP/s of a weight gradient as a product, and added to fp32 by the GEMM."""
        m, n, k = (32, 32, 64) if self.small else (3072, 768, 16384)
        grad, x = self.random(k, m), self.random(k, n)
        total = torch.zeros(m, n, device=self.device)
        work = 2e-12 * m * n * k
        rates = {"product": work / self.seconds(lambda: grad.t() @ x)}
        rates["adds in fp32"] = gemm_adds_in_fp32(self.device, self.dtype)
        if rates["adds in fp32"]:
            add = torch.ops.aten.addmm.dtype_out
            call = self.seconds(lambda: add(total, grad.t(), x, torch.float32, out=total))
            rates["adding product"] = work / call
        return rates

    def attention(self, width: int, heads: int, seq: int) -> dict[str, Any]:
        """TFLOP/s (causal half counted) forward, and forward with backward, of each backend on
        views of one tensor [s, b, n, 3, d], as the model has them; the kernel that ran."""
        batch = 8
        if self.small:
            batch, heads, seq = 1, 2, 32
        qkv = self.random(seq, batch, heads, 3, width).requires_grad_()
        q, k, v = (t.permute(1, 2, 0, 3) for t in qkv.unbind(3))
        grad = self.random(batch, heads, seq, width)
        work = 2e-12 * batch * heads * seq * seq * width
        rates: dict[str, Any] = {}
        for name, backend in BACKENDS.items():
            around = contextlib.nullcontext() if backend is None else sdpa_kernel(backend)
            try:
                with around:
                    rates[name] = self._attention_rates(q, k, v, qkv, grad, work)
            except RuntimeError as error:
                if backend is None:
                    raise
                rates[name] = str(error).splitlines()[0][:120]
        return rates

    def _attention_rates(self, q, k, v, qkv, grad, work: float) -> dict[str, Any]:
        def forward() -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        out = forward()
        both = self.seconds(lambda: torch.autograd.grad(forward(), qkv, grad))
        return {
            "forward": work / self.seconds(forward),
            "both": 3.5 * work / both,
            "kernel": type(out.grad_fn).__name__,
            "strides": list(out.stride()),
        }

    def fp8(self) -> dict[str, float]:
        """TFLOP/s of FP8 GEMMs of two forms of adding up."""
        n = 64 if self.small else 4096
        a, b = (self.random(n, n).to(torch.float8_e4m3fn) for _ in range(2))
        scale = torch.ones((), device=self.device)

        def rate(fast: bool) -> float:
            def run() -> Tensor:
                return torch._scaled_mm(
                    a,
                    b.t(),
                    scale_a=scale,
                    scale_b=scale,
                    out_dtype=self.dtype,
                    use_fast_accum=fast,
                )

            return 2e-12 * n**3 / self.seconds(run)

        return {"precise": rate(False), "fast accumulation": rate(True)}

    def triton(self) -> str:
        """Whether the suite's Triton kernels launch."""
        why_not = unavailable_reason(self.device, self.dtype)
        if why_not is not None and not self.small:
            raise RuntimeError(why_not)
        return why_not or "launches"


def main(argv: list[str]) -> int:
    """Measure everything; 1 if something fails that training needs."""
    probe = Probe(devices.choose_device(argv[0], 0), Path(argv[1]))
    probe.note("machine", probe.machine)
    if not probe.small:
        probe.note("driver", probe.driver)
    probe.note("Triton", probe.triton)
    probe.note("copy TB/s", probe.copy)
    probe.note("weight gradient TFLOP/s", probe.weight_gradient)
    probe.note("attention d 64", lambda: probe.attention(64, 16, 1024))
    probe.note("attention d 128", lambda: probe.attention(128, 16, 2048))
    probe.note("FP8 TFLOP/s", probe.fp8)
    return 1 if probe.failed & NEEDED else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
