"""What a device and its libraries do by themselves: TFLOP/s of GEMMs, attention and FP8, TB/s of a
copy. Step 1 of first_light.sh.

    python probe.py DEVICE FILE.json

Each figure is written as soon as it is there; what cannot run is a text in its place.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rates import make_clock, matmul_rate
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron import device as devices

BACKENDS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "": contextlib.nullcontext,  # torch's choice
    " cudnn": lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION),
    " flash": lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION),
}
PACKAGES = ("numpy", "triton", "transformers", "liger-kernel", "nvidia-cudnn-cu13")
QUERY = "driver_version,clocks.sm,clocks.max.sm,power.draw,power.limit,memory.used"


class Probe:
    """The figures of one device; on a CPU as many as it computes in a moment."""

    def __init__(self, device: torch.device, file: Path):
        self.device = device
        self.small = device.type == "cpu"
        self.figures: dict[str, Any] = {}
        self.failed = False
        self._file = file
        self._clock = make_clock(device)

    def note(self, name: str, measure: Callable[[], Any], needed: bool = True) -> None:
        """The figure `name`, or why there is none. `needed`: training cannot do without it."""
        try:
            self.figures[name] = measure()
        except Exception as error:  # the next figure may still be had
            self.figures[name] = f"{type(error).__name__}: {error}"[:200]
            self.failed |= needed
        self._file.write_text(json.dumps(self.figures), encoding="utf-8")
        print(f"{name}: {self.figures[name]}", flush=True)

    def rate(self, work: float, run: Callable[[], object]) -> float:
        """`work` (1e12 operations or bytes) a second: the mean of some calls after two."""
        times = 2 if self.small else 20
        run()
        run()
        start = self._clock()
        for _ in range(times):
            run()
        return work * times / (self._clock() - start)

    def random(self, *shape: int) -> Tensor:
        """Random numbers in bf16: zeros would flatter a GEMM."""
        return torch.randn(shape, device=self.device).to(torch.bfloat16)

    def copy(self) -> float:
        """Of reading and writing 1 GiB."""
        source = torch.empty(1 << (20 if self.small else 30), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return self.rate(2e-12 * source.numel(), lambda: target.copy_(source))

    def weight_gradients(self) -> None:
        """As a product, and added to fp32 by the GEMM."""
        m, n, k = (32, 32, 64) if self.small else (3072, 768, 16384)
        grad, x = self.random(k, m), self.random(k, n)
        total = torch.zeros(m, n, device=self.device)
        add = torch.ops.aten.addmm.dtype_out
        calls: dict[str, Callable[[], object]] = {
            "weight gradient": lambda: grad.t() @ x,
            "weight gradient added in fp32": lambda: add(
                total, grad.t(), x, torch.float32, out=total
            ),
        }
        for name, call in calls.items():
            self.note(name, partial(self.rate, 2e-12 * m * n * k, call), needed=False)

    def attention(self, width: int, heads: int, seq: int) -> None:
        """The causal half counted, by each backend, on views of one tensor [s, b, n, 3, d] as the
        model has them."""
        batch = 8
        if self.small:
            batch, heads, seq = 1, 2, 32
        qkv = self.random(seq, batch, heads, 3, width).requires_grad_()
        q, k, v = (t.permute(1, 2, 0, 3) for t in qkv.unbind(3))
        grad = self.random(batch, heads, seq, width)
        work = 2e-12 * batch * heads * seq * seq * width

        def forward() -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        def both() -> object:
            return torch.autograd.grad(forward(), qkv, grad)

        for backend, around in BACKENDS.items():
            name = f"attention d {width}{backend}"
            with around():
                for part, call, factor in (("forward", forward, 1), ("both", both, 3.5)):
                    measure = partial(self.rate, factor * work, call)
                    self.note(f"{name} {part}", measure, needed=not backend)
        self.note(f"attention d {width} kernel", lambda: type(forward().grad_fn).__name__)

    def fp8(self, fast: bool) -> float:
        """GEMMs of e4m3, added up in either way."""
        n = 64 if self.small else 4096
        a, b = (self.random(n, n).to(torch.float8_e4m3fn) for _ in range(2))
        scale = torch.ones((), device=self.device)
        options: dict[str, Any] = dict(
            scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16, use_fast_accum=fast
        )
        return self.rate(2e-12 * n**3, lambda: torch._scaled_mm(a, b.t(), **options))


def machine(device: torch.device) -> dict[str, Any]:
    """Names and versions."""
    installed = {found.metadata["Name"]: found.version for found in metadata.distributions()}
    return {
        "card": devices.name(device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "python": platform.python_version(),
        **{name: installed[name] for name in PACKAGES if name in installed},
    }


def driver() -> str:
    """Driver, clocks and power, as nvidia-smi has them."""
    words = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
    words.append(f"--id={os.environ.get('CUDA_VISIBLE_DEVICES', '0')}")
    return subprocess.check_output(words, text=True, timeout=10).strip()


def main(argv: list[str]) -> int:
    """Measure everything; 1 if something fails that training needs."""
    probe = Probe(devices.choose_device(argv[0], 0), Path(argv[1]))
    probe.note("machine", lambda: machine(probe.device))
    if not probe.small:
        probe.note("driver", driver, needed=False)
    probe.note("GEMM", lambda: matmul_rate(probe.device, torch.bfloat16))
    probe.note("copy", probe.copy)
    probe.weight_gradients()
    probe.attention(64, 16, 1024)
    probe.attention(128, 16, 2048)
    probe.note("FP8 precise", lambda: probe.fp8(fast=False), needed=False)
    probe.note("FP8 fast", lambda: probe.fp8(fast=True), needed=False)
    return int(probe.failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
