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
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import benchmark

from megatron import device as devices

BACKENDS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "": contextlib.nullcontext,  # torch's choice
    " cudnn": lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION),
    " flash": lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION),
}
PACKAGES = ("numpy", "triton", "transformers", "liger-kernel", "nvidia-cudnn-cu13")
QUERY = "driver_version,clocks.sm,clocks.max.sm,power.draw,power.limit,memory.used"
# name, what measures it, whether training cannot do without it
Figure = tuple[str, Callable[[], Any], bool]


def rate(work: float, call: Callable[[], object], times: int = 20) -> float:
    """`work` (1e12 operations or bytes) a second: the mean of some calls after two."""
    timer = benchmark.Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return work / timer.timeit(times).mean


def random(device: torch.device, *shape: int) -> Tensor:
    """Random numbers in bf16: zeros would flatter a GEMM."""
    return torch.randn(shape, device=device).to(torch.bfloat16)


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


def gemms(device: torch.device, small: bool) -> Iterator[Figure]:
    """A large one, a copy of 1 GiB, and a weight gradient: as a product, and added to fp32 by the
    GEMM."""
    n = 256 if small else 8192  # a CPU may emulate bf16
    a, b = random(device, n, n), random(device, n, n)
    out = a @ b
    yield "GEMM", partial(rate, 2e-12 * n**3, partial(torch.mm, a, b, out=out), 5), True
    source = torch.empty(1 << (20 if small else 30), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    yield "copy", partial(rate, 2e-12 * source.numel(), partial(target.copy_, source)), True
    m, n, k = (32, 32, 64) if small else (3072, 768, 16384)
    grad, x = random(device, k, m), random(device, k, n)
    total = torch.zeros(m, n, device=device)
    add = partial(torch.ops.aten.addmm.dtype_out, total, grad.t(), x, torch.float32, out=total)
    work = 2e-12 * m * n * k
    yield "weight gradient", partial(rate, work, partial(torch.mm, grad.t(), x)), False
    yield "weight gradient added in fp32", partial(rate, work, add), False


def attention(
    device: torch.device, width: int, batch: int, heads: int, seq: int
) -> Iterator[Figure]:
    """The causal half counted, by each backend, on views of one tensor [s, b, n, 3, d] as the model
    has them."""
    qkv = random(device, seq, batch, heads, 3, width).requires_grad_()
    q, k, v = (t.permute(1, 2, 0, 3) for t in qkv.unbind(3))
    grad = random(device, batch, heads, seq, width)
    work = 2e-12 * batch * heads * seq * seq * width
    forward = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)

    def both() -> object:
        return torch.autograd.grad(forward(), qkv, grad)

    for backend, around in BACKENDS.items():
        name = f"attention d {width}{backend}"
        with around():
            yield f"{name} forward", partial(rate, work, forward), not backend
            yield f"{name} both", partial(rate, 3.5 * work, both), not backend
    yield f"attention d {width} kernel", lambda: type(forward().grad_fn).__name__, True


def fp8(device: torch.device, n: int, fast: bool) -> float:
    """GEMMs of e4m3, added up in either way."""
    a, b = (random(device, n, n).to(torch.float8_e4m3fn) for _ in range(2))
    scale = torch.ones((), device=device)
    options: dict[str, Any] = {"scale_a": scale, "scale_b": scale, "out_dtype": torch.bfloat16}
    call = partial(torch._scaled_mm, a, b.t(), use_fast_accum=fast, **options)
    return rate(2e-12 * n**3, call)


def figures(device: torch.device) -> Iterator[Figure]:
    """All of them; on a CPU in small."""
    small = device.type == "cpu"
    yield "machine", partial(machine, device), True
    if not small:
        yield "driver", driver, False
    yield from gemms(device, small)
    for width, seq in ((64, 1024), (128, 2048)):
        yield from attention(device, width, *((1, 2, 32) if small else (8, 16, seq)))
    for name, fast in (("FP8 precise", False), ("FP8 fast", True)):
        yield name, partial(fp8, device, 64 if small else 4096, fast), False


def main(argv: list[str]) -> int:
    """Measure everything; 1 if something fails that training needs."""
    values: dict[str, Any] = {}
    code = 0
    for name, measure, needed in figures(devices.choose_device(argv[0], 0)):
        try:
            values[name] = measure()
        except Exception as error:  # the next figure may still be had
            values[name] = f"{type(error).__name__}: {error}"[:200]
            code |= needed
        Path(argv[1]).write_text(json.dumps(values), encoding="utf-8")
        print(f"{name}: {values[name]}", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
