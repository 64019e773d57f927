"""The only file that says cuda: which device, which backend, memory, synchronisation, determinism. Knows no model."""
from __future__ import annotations

import ctypes
import os
import sys

import torch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3     # of glibc's malloc.h


def device_type(wish: str) -> str:
    """`cpu` or `cuda`: what the wish (auto, cpu, cuda) comes to here. Does not start CUDA."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if wish == "auto" else wish


def choose_device(wish: str, local_rank: int | None) -> torch.device:
    """The device of this rank: `auto` takes CUDA when there is any. Raises ValueError where the wish cannot be met.

    Where the launcher shows each rank one device (srun --gpus-per-task=1), that is the one. `local_rank`: None where
    the launcher gives none.
    """
    if wish == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no CUDA device here; use --device cpu, or install a CUDA build")
    if device_type(wish) == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count > 1 and local_rank is None:
        raise ValueError(f"{count} CUDA devices are visible, and the launcher gives no local rank: set LOCAL_RANK, or "
                         f"show each rank one device (CUDA_VISIBLE_DEVICES)")
    if count > 1 and local_rank >= count:
        raise ValueError(f"local rank {local_rank}: {count} CUDA devices are visible; start at most that many processes "
                         f"per node")
    device = torch.device("cuda", local_rank if count > 1 else 0)
    torch.cuda.set_device(device)
    return device


def default_backend(wish: str) -> str:
    """nccl on CUDA, gloo elsewhere; `wish` as for `device_type`."""
    return "nccl" if device_type(wish) == "cuda" else "gloo"


def set_max_connections() -> bool:
    """Kernels and collectives must start in order for overlap: one hardware queue, unless the user chose otherwise.

    To be called before CUDA starts; whether the environment was changed.
    """
    if "CUDA_DEVICE_MAX_CONNECTIONS" in os.environ:
        return False
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    return True


def keep_freed_memory(device: torch.device) -> bool:
    """Have glibc keep what a step on a CPU frees, blocks of 1 GB and more apart, for the next one.

    Else it goes back to the system, and the next step faults it in page by page. Whether it was done: not where the
    environment speaks of malloc itself, nor with another C library.
    """
    if device.type != "cpu" or sys.platform != "linux" or any(
            name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return bool(mallopt and mallopt(M_MMAP_THRESHOLD, 1 << 30) and mallopt(M_TRIM_THRESHOLD, 2**31 - 1))


def set_determinism(deterministic: bool, cudnn_benchmark: bool, cudnn_deterministic: bool) -> None:
    """Torch's switches for kernel choice. `deterministic` makes torch raise where no deterministic kernel exists."""
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = cudnn_benchmark
    torch.backends.cudnn.deterministic = cudnn_deterministic or deterministic


def allow_tf32(device: torch.device) -> None:
    """fp32 matrix products with TF32 inputs (10 bits of mantissa). Raises ValueError on a CPU, which has none."""
    if device.type != "cuda":
        raise ValueError("--tf32: there is no CUDA device here, and a CPU has no TF32; leave it out")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True


def multiplies_fp8(device: torch.device) -> bool:
    """Has this CUDA device matrix products of 8-bit numbers (Ada, Hopper and later)?"""
    return torch.cuda.get_device_capability(device) >= (8, 9)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all it was given; nothing to wait for on CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def pin(memory: torch.Tensor, device: torch.device) -> bool:
    """Lock CPU memory, so that CUDA copies to it by itself and at full speed; False where it cannot. Nothing on CPU."""
    if device.type != "cuda" or not memory.numel():
        return True
    return int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel() * memory.itemsize, 0)) == 0


def unpin(memory: torch.Tensor, device: torch.device) -> None:
    """Undo `pin`, before the memory is given back."""
    if device.type == "cuda" and memory.numel():
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def memory_report(device: torch.device) -> dict[str, float]:
    """Bytes allocated and reserved on the device, and the number of allocations; empty on CPU."""
    if device.type != "cuda":
        return {}
    return {"allocated": torch.cuda.memory_allocated(device), "max allocated": torch.cuda.max_memory_allocated(device),
            "reserved": torch.cuda.memory_reserved(device), "max reserved": torch.cuda.max_memory_reserved(device),
            "allocations": torch.cuda.memory_stats(device)["allocation.all.current"]}


def name(device: torch.device) -> str:
    """What the maker calls the device; `cpu` on CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def release_memory(device: torch.device) -> None:
    """Give unused memory of the device back and start its peak anew; nothing to do on CPU."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
