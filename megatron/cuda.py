"""What only some runs ask CUDA for: the kernels that a device has, graphs, a profiler's range,
pinned memory, generators of kernels, and what is wrong with cuDNN or the driver."""

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch

from megatron.small_files import read_text

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
_OLDEST_DRIVER = {"12": 525, "13": 580}  # of NVIDIA, by the CUDA that torch is built for
_HOPPER = 9  # its compute capability
_FAST_CUDNN = 91500  # 9.15, as torch numbers it


@cache
def has_flash(device: torch.device) -> bool:
    """Whether torch's flash attention runs on this device (CUDA, compute capability 8.0 or newer;
    the meta device stands for such a one)."""
    if device.type == "meta":
        return True
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def has_grouped_gemm(device: torch.device) -> bool:
    """Whether torch multiplies groups of rows in one kernel on this device, without reading their
    sizes (CUDA, compute capability 9 or 10; the meta device stands for such a one)."""
    if device.type == "meta":
        return True
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)


@contextlib.contextmanager
def kernel_seed(device: torch.device, seed: int | torch.Tensor) -> Iterator[None]:
    """In this context kernels that draw from the device's own generator start from `seed`; it is
    what it was afterwards. The state is on the host: nothing waits."""
    if device.type == "meta":
        yield
        return
    cuda = device.type == "cuda"
    generator = torch.cuda.default_generators[device.index] if cuda else torch.default_generator
    before = generator.get_state()
    generator.manual_seed(int(seed))
    try:
        yield
    finally:
        generator.set_state(before)


def has_graphs(device: torch.device) -> bool:
    """Whether kernels can be recorded there (`record`)."""
    return device.type == "cuda"


def record(region: Callable[[], Any], other: Any = None) -> tuple[Any, Any]:
    """A CUDA graph of the kernels of `region`, none of which runs now, and the region's result,
    which each `replay()` of the graph overwrites. It shares memory with an `other` graph that never
    runs at the same time."""
    graph = torch.cuda.CUDAGraph()
    pool = None if other is None else other.pool()
    # other threads may go on calling CUDA
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        result = region()
    return graph, result


def start_capture(device: torch.device) -> None:
    """Open the range of an outside profiler (nsys -c cudaProfilerApi); nothing on other devices."""
    if device.type == "cuda":
        torch.cuda.profiler.start()


def stop_capture(device: torch.device) -> None:
    """Close the range of an outside profiler."""
    if device.type == "cuda":
        torch.cuda.profiler.stop()


def pin(memory: torch.Tensor, device: torch.device) -> bool:
    """Lock CPU memory, so that CUDA copies to it by itself and at full speed; False where it
    cannot. Nothing on CPU."""
    if device.type != "cuda" or not memory.numel():
        return True
    size = memory.numel() * memory.itemsize
    if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0)) == 0:
        return True
    # CUDA keeps the error and reports it at the next kernel launch: that of this one
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device=device)
    return False


def unpin(memory: torch.Tensor, device: torch.device) -> None:
    """Undo `pin`, before the memory is given back."""
    if device.type == "cuda" and memory.numel():
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def cudnn_notes() -> list[str]:
    """A warning if the cuDNN that is loaded is one whose attention is slow on a Hopper GPU."""
    if torch.cuda.get_device_capability()[0] != _HOPPER:
        return []
    try:
        version = torch.backends.cudnn.version()
    except RuntimeError as error:  # older than what torch was built with
        return [str(error).strip().splitlines()[0]]
    if version is None or version >= _FAST_CUDNN:
        return []
    major, minor = version // 10000, version // 100 % 100
    path = os.environ.get("LD_LIBRARY_PATH")
    shadows = f"LD_LIBRARY_PATH={path} hides the one that torch came with, take CUDA out of it"
    return [
        f"cuDNN {major}.{minor} is loaded: before 9.15 attention on a Hopper GPU takes twice as "
        f"long; {shadows if path else 'install a newer nvidia-cudnn'}"
    ]


def driver_remedy() -> str:
    """What to install where NVIDIA's driver is older than torch's CUDA needs, empty elsewhere."""
    cuda = torch.version.cuda
    try:
        text = read_text(NVIDIA_DRIVER)
    except OSError:
        return ""
    version = re.search(r"Module\D.*?(\d+(?:\.\d+)+)", text)
    needed = _OLDEST_DRIVER.get((cuda or "").partition(".")[0])
    if not version or not needed or int(version[1].partition(".")[0]) >= needed:
        return ""
    older = (
        ", or torch for CUDA 12 (make clean, then make install TORCH_INDEX=URL, an index with "
        "CUDA 12 builds such as pytorch.org's cu126)"
    )
    return (
        f"; the driver is {version[1]}, and torch {torch.__version__} is built for CUDA {cuda}: "
        f"install a driver >= {needed}{older * (needed > _OLDEST_DRIVER['12'])}"
    )
