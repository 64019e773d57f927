"""Devices: CUDA, XPU or CPU, with their backend, memory, synchronization and determinism. What
only some runs ask CUDA for is cuda.py's; no other file names torch.cuda or torch.xpu."""

import ctypes
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

BACKENDS = {"cuda": "nccl", "xpu": "xccl"}  # of torch.distributed, by kind of device
DEVICE_FILES = Path("/dev")
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3  # of glibc's malloc.h


def device_type(requested: str) -> str:
    """The device type (`cpu`, `cuda` or `xpu`) of --device `requested` (`auto` or one of these).
    Does not start the device.

    Not `mps`: a step's sums are float64, which Apple's GPUs do not have.
    """
    if requested != "auto":
        return requested
    if torch.cuda.is_available():
        return "cuda"
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None and accelerator.type in BACKENDS else "cpu"


def device_notes(requested: str) -> list[str]:
    """Warnings about the device of --device `requested`, which `choose_device` has chosen: an
    accelerator that is not used, and why; a device type on which this suite is untested; an old
    cuDNN."""
    kind = device_type(requested)
    if kind == "cuda":
        from megatron.cuda import cudnn_notes

        return cudnn_notes()
    if kind == "xpu":
        return [
            "--device xpu (Intel GPUs) is untested with this suite; compare the "
            "first losses with a CPU's"
        ]
    reason = unusable_accelerator() if requested == "auto" and kind == "cpu" else None
    return [f"training on the CPU: {reason} (--device cpu omits this warning)"] if reason else []


def unusable_accelerator() -> str | None:
    """Why torch cannot use an accelerator that this machine has; None if it has none that shows."""
    if torch.backends.mps.is_available():
        return "Apple's GPU (mps) has no float64, which a step's sums need"
    traces = (*_nvidia_files(), *DEVICE_FILES.glob("dxg"), *DEVICE_FILES.glob("kfd"))
    trace = str(traces[0]) if traces else shutil.which("nvidia-smi") or shutil.which("xpu-smi")
    if trace is None or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return None
    if torch.version.cuda is None and torch.version.hip is None and not torch.xpu._is_compiled():
        return (
            f"this torch ({torch.__version__}) is a CPU build, though {trace} exists: install "
            "a CUDA (or XPU) build (make clean, then make install without TORCH_INDEX)"
        )
    from megatron.cuda import driver_remedy

    try:
        torch.cuda.init()
        reason = "torch finds no device"
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0].partition(". ")[0].rstrip(".")
    return f"torch cannot use the GPU of this machine ({trace}): {reason}{driver_remedy()}"


def _nvidia_files() -> list[Path]:
    """The device files of NVIDIA GPUs. A container without GPUs has none, even where its host's
    driver shows under /proc."""
    return sorted(DEVICE_FILES.glob("nvidia[0-9]*"))


def choose_device(requested: str, local_rank: int | None) -> torch.device:
    """The device of this rank: `auto` uses an accelerator if there is one. Raises ValueError if the
    requested device is not available, and for `auto` if the machine has NVIDIA GPUs that torch
    cannot use: training on the CPU is then no one's intention, and eight ranks would share it.

    Where the launcher shows each rank one device (srun --gpus-per-task=1), that is the one.
    `local_rank`: None where the launcher gives none.
    """
    kind = device_type(requested)
    if kind == "cpu":
        reason = unusable_accelerator() if requested == "auto" and _nvidia_files() else None
        if reason:
            raise ValueError(
                f"--device auto: {reason}; or train on the CPU with --device cpu [gpu-not-usable]"
            )
        return torch.device("cpu")
    backend = getattr(torch, kind)
    name = kind.upper()
    if not backend.is_available():
        reason = unusable_accelerator()
        raise ValueError(
            f"--device {requested}: no {name} device found; use --device cpu, or "
            f"{f'first: {reason}' if reason else f'install a {name} build'} [device-not-available]"
        )
    count = backend.device_count()
    number = local_rank if count > 1 else 0
    if number is None:
        raise ValueError(
            f"{count} {name} devices are visible, and the launcher gives no local rank: set "
            "LOCAL_RANK, or show each rank one device (say with CUDA_VISIBLE_DEVICES) "
            "[local-rank-missing]"
        )
    if count > 1 and number >= count:
        raise ValueError(
            f"local rank {number}: {count} {name} devices are visible; start at most that "
            "many processes per node [too-few-devices]"
        )
    device = torch.device(kind, number)
    backend.set_device(device)
    return device


def default_backend(requested: str) -> str:
    """nccl on CUDA, xccl on Intel GPUs, gloo elsewhere; `requested` as for `device_type`."""
    return BACKENDS.get(device_type(requested), "gloo")


def chosen_backend(flag: str | None, device: torch.device) -> str:
    """What torch.distributed is to use between such devices: --distributed-backend, if it is given.
    Raises ValueError for one of another maker's devices."""
    own = BACKENDS.get(device.type, "gloo")
    backend = "xccl" if flag == "ccl" else flag or own  # ccl: the name before torch had it
    if backend not in ("gloo", own):
        raise ValueError(
            f"--distributed-backend {flag}: does not work between devices of kind {device.type}; "
            "omit it [nccl-on-cpu]"
        )
    return backend


def set_max_connections(ordered: bool) -> bool:
    """One hardware queue, unless the user chose otherwise, where kernels and collectives must start
    in the order of their calls (`ordered`): a tensor- or context-parallel collective that overlaps
    a GEMM must start before it. Elsewhere one queue would hold back data-parallel communication.

    To be called before anything asks CUDA for its devices; whether the environment was changed.
    """
    if not ordered or "CUDA_DEVICE_MAX_CONNECTIONS" in os.environ:
        return False
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    return True


def keep_freed_memory(device: torch.device) -> bool:
    """Have glibc keep what a step on a CPU frees, blocks of 1 GB and more apart, for the next one.

    Else it goes back to the system, and the next step faults it in page by page. Whether it was
    done: not where the environment speaks of malloc itself, nor with another C library.
    """
    if (
        device.type != "cpu"
        or sys.platform != "linux"
        or any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return bool(
        mallopt and mallopt(M_MMAP_THRESHOLD, 1 << 30) and mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    )


def set_determinism(deterministic: bool, cudnn_benchmark: bool, cudnn_deterministic: bool) -> None:
    """Torch's switches for kernel choice. `deterministic` makes torch raise where no deterministic
    kernel exists."""
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("NCCL_ALGO", "Ring,Tree")  # sums in switches have no fixed order
        torch.use_deterministic_algorithms(True)
        # a pass over each new tensor; torch gives this module its attribute at run time
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = cudnn_benchmark
    torch.backends.cudnn.deterministic = cudnn_deterministic or deterministic


def allow_tf32(device: torch.device) -> None:
    """fp32 GEMMs with TF32 inputs (10 bits of mantissa). Raises ValueError on a device
    without."""
    if device.type != "cuda":
        raise ValueError(
            f"--tf32: needs a CUDA device, but the device is {device.type}; omit it "
            "[cuda-device-needed]"
        )
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True


def sum_bf16_in_fp32() -> None:
    """On CUDA, bf16 GEMMs that are split sum their parts in fp32."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def kernels_of(device: torch.device) -> str:
    """The device type whose kernels compute on `device`: the meta device stands for CUDA."""
    return "cuda" if device.type == "meta" else device.type


def has_fp8(device: torch.device) -> bool:
    """Whether this device has FP8 GEMMs (CUDA, compute capability 8.9 or newer; the meta device
    stands for such a one)."""
    if device.type == "meta":
        return True
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def synchronize(device: torch.device) -> None:
    """Wait for all work on the device; nothing on CPU."""
    if device.type != "cpu":
        getattr(torch, device.type).synchronize(device)


def stream_clock(
    device: torch.device,
) -> tuple[Callable[[], Any], Callable[[Any, Any], float]] | None:
    """For `megatron.timers.Timers`: moments of a CUDA device's stream as events, and the seconds
    between two of them; None elsewhere."""
    if device.type != "cuda":
        return None

    def mark() -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(start: Any, end: Any) -> float:
        end.synchronize()
        return start.elapsed_time(end) / 1000

    return mark, seconds


def pinned_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a device's tensor in the CPU's pinned memory, which torch keeps for the next one of
    that size."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)


def free_memory(device: torch.device) -> tuple[int, int]:
    """Bytes of the device that are free, and that it has."""
    return getattr(torch, device.type).mem_get_info(device)


def memory_report(device: torch.device) -> dict[str, float]:
    """Bytes allocated and reserved on the device, and the number of allocations; empty on CPU."""
    if device.type == "cpu":
        return {}
    memory = getattr(torch, device.type)
    return {
        "allocated": memory.memory_allocated(device),
        "max allocated": memory.max_memory_allocated(device),
        "reserved": memory.memory_reserved(device),
        "max reserved": memory.max_memory_reserved(device),
        "allocations": memory.memory_stats(device).get("allocation.all.current", 0),
    }


def cpu_info(key: str) -> str:
    """What Linux says of the processor: its `vendor_id` (GenuineIntel, AuthenticAMD) or `model
    name`; empty where it does not."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")


def name(device: torch.device) -> str:
    """The product name of the device; `cpu` on CPU."""
    return "cpu" if device.type == "cpu" else getattr(torch, device.type).get_device_name(device)


def libraries(device: torch.device) -> dict[str, str]:
    """The product name of a device, and the versions of what computes and communicates on it; of an
    NVIDIA GPU its uuid, too."""
    if device.type != "cuda":
        kind = cpu_info("model name") if device.type == "cpu" else ""
        return {"device": f"{name(device)} {kind}".strip(), "torch": torch.__version__}
    return {
        "device": name(device),
        "torch": torch.__version__,
        "CUDA": str(torch.version.cuda),
        "cuDNN": str(torch.backends.cudnn.version()),
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
        "uuid": str(torch.cuda.get_device_properties(device).uuid),
    }
