"""Which device a rank gets, and torch's switches, with a CUDA that is only pretended."""

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron import cuda as of_cuda
from megatron import device
from tests.forkrun import run_ranks
from tests.problems import assert_problem, raises
from tests.runs import SMALL, plot, with_flags

CPU = torch.device("cpu")


@pytest.fixture
def cuda(monkeypatch) -> list:
    """A machine with two CUDA devices; what was set or waited for."""
    calls: list = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda d: calls.append(("set", d)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda d: calls.append(("wait", d)))
    return calls


@pytest.fixture
def no_cuda(monkeypatch, tmp_path) -> Path:
    """A machine without any accelerator; the folder of its device files."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: None
    )
    monkeypatch.setattr(device, "DEVICE_FILES", tmp_path)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


@pytest.fixture
def xpu(monkeypatch, no_cuda) -> list:
    """A machine with four Intel GPUs, and what was set or waited for."""
    calls: list = []
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("xpu")
    )
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 4)
    monkeypatch.setattr(torch.xpu, "set_device", lambda d: calls.append(("set", d)))
    monkeypatch.setattr(torch.xpu, "synchronize", lambda d: calls.append(("wait", d)))
    return calls


def test_a_machine_without_cuda(no_cuda):
    assert device.choose_device("auto", 3) == device.choose_device("cpu", 0) == CPU
    with pytest.raises(ValueError, match="--device cuda: .*--device cpu"):
        device.choose_device("cuda", 0)


def test_a_machine_with_two(cuda):
    assert (
        device.choose_device("auto", 1)
        == device.choose_device("cuda", 1)
        == torch.device("cuda", 1)
    )
    assert cuda == [("set", torch.device("cuda", 1))] * 2
    assert device.choose_device("cpu", 5) == CPU
    for local_rank in (2, None):
        with pytest.raises(ValueError, match="2 CUDA devices"):
            device.choose_device("auto", local_rank)
    assert device.choose_device("cpu", None) == CPU


@pytest.mark.parametrize("local_rank", [0, 1, 7, None])
def test_one_visible_device_is_the_one(cuda, monkeypatch, local_rank):
    """srun --gpus-per-task=1 shows every rank its own device as number 0."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert device.choose_device("auto", local_rank) == torch.device("cuda", 0)


def test_backend_without_cuda(no_cuda):
    assert [device.default_backend(wish) for wish in ("cpu", "cuda", "auto")] == [
        "gloo",
        "nccl",
        "gloo",
    ]


def test_backend_with_cuda(cuda):
    assert [device.default_backend(wish) for wish in ("cpu", "cuda", "auto")] == [
        "gloo",
        "nccl",
        "nccl",
    ]
    assert cuda == []  # CUDA was not started


@pytest.mark.parametrize(
    ("flag", "kind", "backend"),
    [
        (None, "cuda", "nccl"),
        (None, "cpu", "gloo"),
        ("gloo", "cuda", "gloo"),
        ("nccl", "cuda", "nccl"),
        ("ccl", "xpu", "xccl"),
        ("xccl", "xpu", "xccl"),
    ],
)
def test_the_backend_of_a_run(flag, kind, backend):
    assert device.chosen_backend(flag, torch.device(kind)) == backend


@pytest.mark.parametrize(("flag", "kind"), [("nccl", "cpu"), ("ccl", "cuda"), ("nccl", "xpu")])
def test_a_backend_of_other_devices_is_refused(flag, kind):
    with raises(ValueError, "nccl-on-cpu", "--distributed-backend"):
        device.chosen_backend(flag, torch.device(kind))


def test_intel_gpus(xpu):
    """Aurora: torch's accelerator is taken, its own collectives, and it is said that nobody has
    tried."""
    assert (
        device.choose_device("auto", 3) == device.choose_device("xpu", 3) == torch.device("xpu", 3)
    )
    assert device.default_backend("auto") == device.default_backend("xpu") == "xccl"
    device.synchronize(torch.device("xpu", 3))
    assert xpu == [("set", torch.device("xpu", 3))] * 2 + [("wait", torch.device("xpu", 3))]
    assert (
        len(device.device_notes("auto")) == len(device.device_notes("xpu")) == 1
        and device.device_notes("cpu") == []
    )
    assert not device.has_fp8(torch.device("xpu", 0))
    with pytest.raises(ValueError, match="--tf32"):
        device.allow_tf32(torch.device("xpu", 0))


def too_old() -> None:
    raise RuntimeError(
        "The NVIDIA driver on your system is too old (found version 11040).\nPlease update it."
    )


OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build (root@host)"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Sat Aug 19 01:15:15 UTC 2023"


@pytest.mark.parametrize(
    "built, driver, named, not_named",
    [  # what torch is built for, its driver's version file, what the error must name and must not
        (None, CLOSED.format("580.65.06"), ("CPU build", "nvidia0"), (">=",)),
        ("13.0", CLOSED.format("535.104.05"), ("535.104.05", "13.0", ">= 580", "TORCH_INDEX"), ()),
        ("13.2", OPEN.format("570.10"), ("570.10", "13.2", ">= 580", "TORCH_INDEX"), ()),
        ("12.6", CLOSED.format("470.5.1"), ("470.5.1", ">= 525"), ("TORCH_INDEX",)),
        ("13.0", OPEN.format("580.65.06"), ("found version 11040", "nvidia0"), (">=",)),
        ("13.0", None, ("found version 11040", "nvidia0"), (">=",)),
    ],
)
def test_nvidia_gpus_that_torch_cannot_use(no_cuda, monkeypatch, built, driver, named, not_named):
    """Never the CPU in silence, which eight ranks would share: auto is an error as cuda is."""
    (no_cuda / "nvidia0").touch()
    monkeypatch.setattr(of_cuda, "NVIDIA_DRIVER", no_cuda / "version")
    if driver:
        of_cuda.NVIDIA_DRIVER.write_text(driver)
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(torch.cuda, "init", too_old)
    for requested, code in (("auto", "gpu-not-usable"), ("cuda", "device-not-available")):
        with pytest.raises(ValueError) as error:
            device.choose_device(requested, 3)
        assert_problem(str(error.value), code, "--device cpu", *named)
        assert not any(text in str(error.value) for text in not_named)
    assert device.choose_device("cpu", 3) == CPU and device.device_notes("cpu") == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the user has hidden it
    assert device.choose_device("auto", 3) == CPU and device.device_notes("auto") == []


@pytest.mark.parametrize(
    "capability, version, path, named",
    [
        ((9, 0), 91900, "/usr/local/cuda/lib64", None),
        ((9, 0), 91500, None, None),
        ((10, 0), 90100, None, None),
        ((9, 0), 91002, "/usr/local/cuda/lib64", ("9.10", "LD_LIBRARY_PATH=/usr/local/cuda/lib64")),
        ((9, 0), 91400, None, ("9.14", "nvidia-cudnn")),
        ((9, 0), None, "/usr/local/cuda/lib64", None),  # torch has none
        ((9, 0), RuntimeError("cuDNN version incompatibility: 9.1\nmore"), None, ("9.1",)),
    ],
)
def test_an_old_cudnn_on_hopper_is_said(cuda, monkeypatch, capability, version, path, named):
    def loaded():
        if isinstance(version, RuntimeError):
            raise version
        return version

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.backends.cudnn, "version", loaded)
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    if path:
        monkeypatch.setenv("LD_LIBRARY_PATH", path)
    notes = device.device_notes("auto")
    assert len(notes) == bool(named)
    for text in notes:
        assert all(name in text for name in named or ()) and "\n" not in text
    assert device.device_notes("cpu") == []


def test_other_accelerators_that_torch_cannot_use(no_cuda, monkeypatch):
    """The files of WSL and AMD do not show what torch could use: a warning, and the CPU."""
    assert device.device_notes("auto") == []
    (no_cuda / "kfd").touch()
    monkeypatch.setattr(torch.version, "cuda", None)
    [text] = device.device_notes("auto")
    assert "CPU build" in text and "kfd" in text and device.choose_device("auto", 0) == CPU


def test_apple_gpus_have_no_float64(no_cuda, monkeypatch):
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("mps")
    )
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert device.choose_device("auto", 0) == CPU and "float64" in device.device_notes("auto")[0]


def test_max_connections(monkeypatch):
    """Set when nobody has, and then it is worth a line; what the user set stays."""
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    assert not device.set_max_connections(False)
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ
    assert device.set_max_connections(True) and os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    assert not device.set_max_connections(True)
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"


def test_memory_that_cannot_be_pinned_leaves_no_error_behind(monkeypatch):
    """CUDA keeps the error of cudaHostRegister for the next launch: it is taken here."""
    latched = []

    class Runtime:
        def cudaHostRegister(self, address, size, flags):
            latched.append("cudaErrorMemoryAllocation")
            return 2

    def launch(*shape, device):
        if latched:
            raise RuntimeError(f"CUDA error: {latched.pop()}")

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    memory = torch.zeros(8)
    monkeypatch.setattr(torch, "ones", launch)
    assert not of_cuda.pin(memory, torch.device("cuda", 0))
    assert latched == []


@pytest.mark.parametrize(
    "deterministic, benchmark, cudnn",
    [(True, False, False), (False, True, False), (False, False, True), (False, False, False)],
)
def test_determinism(monkeypatch, deterministic, benchmark, cudnn):
    said = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", said.append)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", not benchmark)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", not (cudnn or deterministic))
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    device.set_determinism(False, False, False)
    device.set_determinism(True, False, False)
    assert os.environ["NCCL_ALGO"] == "Tree"  # the user's choice
    monkeypatch.delenv("NCCL_ALGO")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    said.clear()
    torch.utils.deterministic.fill_uninitialized_memory = True
    device.set_determinism(deterministic, benchmark, cudnn)
    assert os.environ.get("NCCL_ALGO") == ("Ring,Tree" if deterministic else None)
    assert said == [True] * deterministic
    assert torch.utils.deterministic.fill_uninitialized_memory is not deterministic
    assert torch.backends.cudnn.benchmark is benchmark
    assert torch.backends.cudnn.deterministic is (cudnn or deterministic)
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == (":4096:8" if deterministic else None)


def bf16_sums(rank: int, world: int, flags: list[str]) -> bool:
    """Train, and say whether bf16 GEMMs may then sum in bf16."""
    words = [*with_flags(SMALL, "--eval-iters", "0"), "--mock-data", "--train-iters", "4"]
    with contextlib.redirect_stdout(io.StringIO()):
        plot().main([*words, *flags])
    return torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction


def test_bf16_sums_of_a_run():
    assert run_ranks(1, bf16_sums, []) == [True]
    assert run_ranks(1, bf16_sums, ["--disable-bf16-reduced-precision-matmul"]) == [False]


FAULTS = """
import resource, sys, torch
from megatron import device
torch.set_num_threads(1)
done = device.keep_freed_memory(torch.device("cpu")) if sys.argv[1] == "keep" else None
faults = []
for turn in range(14):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.zeros(1 << 24)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(done, min(faults[11:]))    # the heap moves up for some turns (2 to 10 were seen) until it settles
"""


@pytest.mark.parametrize(
    "environ, keep, done, faults",
    [
        ({}, "keep", "True", range(1000)),
        pytest.param(
            {"MALLOC_TOP_PAD_": "0"},
            *("keep", "False", range(10000, 20000)),
            marks=pytest.mark.campaign,
        ),
    ],
)
def test_the_next_step_finds_the_memory_of_the_last_one(environ, keep, done, faults):
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))
    }
    command = [sys.executable, "-c", FAULTS, keep]
    found = subprocess.run(command, env=clean | environ, text=True, capture_output=True, check=True)
    assert found.stdout.split()[0] == done and int(found.stdout.split()[1]) in faults
    assert not device.keep_freed_memory(torch.device("cuda"))
