"""Which device a rank gets, and torch's switches, with a CUDA that is only pretended."""
from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from megatron import device

CPU = torch.device("cpu")


@pytest.fixture
def cuda(monkeypatch) -> list:
    """A machine with two CUDA devices; what was set or waited for."""
    calls: list = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda d: calls.append(("set", d)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda d: calls.append(("wait", d)))
    names = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    for number, name in enumerate(names):
        monkeypatch.setattr(torch.cuda, name, lambda d, number=number: number + 1)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda d: {"allocation.all.current": 7})
    return calls


@pytest.fixture
def no_cuda(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_a_machine_without_cuda(no_cuda):
    assert device.choose_device("auto", 3) == device.choose_device("cpu", 0) == CPU
    with pytest.raises(ValueError, match="--device cuda: torch sees no CUDA device here; use --device cpu"):
        device.choose_device("cuda", 0)


def test_a_machine_with_two(cuda):
    assert device.choose_device("auto", 1) == device.choose_device("cuda", 1) == torch.device("cuda", 1)
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
    assert [device.default_backend(wish) for wish in ("cpu", "cuda", "auto")] == ["gloo", "nccl", "gloo"]


def test_backend_with_cuda(cuda):
    assert [device.default_backend(wish) for wish in ("cpu", "cuda", "auto")] == ["gloo", "nccl", "nccl"]
    assert cuda == []                       # CUDA was not started


def test_max_connections(monkeypatch):
    """Set when nobody has, and then it is worth a line; what the user set stays."""
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    assert device.set_max_connections() and os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    assert not device.set_max_connections() and os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"


def test_waiting_and_memory(cuda):
    gpu = torch.device("cuda", 1)
    device.synchronize(gpu)
    device.synchronize(CPU)
    assert cuda == [("wait", gpu)]
    assert device.memory_report(CPU) == {}
    assert device.memory_report(gpu) == {"allocated": 1, "max allocated": 2, "reserved": 3, "max reserved": 4,
                                         "allocations": 7}


@pytest.mark.parametrize("deterministic, benchmark, cudnn", [(True, False, False), (False, True, False),
                                                             (False, False, True), (False, False, False)])
def test_determinism(monkeypatch, deterministic, benchmark, cudnn):
    said = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", said.append)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", not benchmark)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", not (cudnn or deterministic))
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    device.set_determinism(deterministic, benchmark, cudnn)
    assert said == [True] * deterministic
    assert torch.backends.cudnn.benchmark is benchmark
    assert torch.backends.cudnn.deterministic is (cudnn or deterministic)
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == (":4096:8" if deterministic else None)


FAULTS = """
import resource, sys, torch
from megatron import device
torch.set_num_threads(1)
done = device.keep_freed_memory(torch.device("cpu")) if sys.argv[1] == "keep" else None
faults = []
for turn in range(10):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.zeros(1 << 24)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(done, min(faults[5:]))    # the heap settles in a few turns, and then still moves up now and then
"""


@pytest.mark.parametrize("environ, keep, done, faults", [
    ({}, "keep", "True", range(1000)), ({}, "", "None", range(10000, 20000)),
    ({"MALLOC_TOP_PAD_": "0"}, "keep", "False", range(10000, 20000))])
def test_the_next_step_finds_the_memory_of_the_last_one(environ, keep, done, faults):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    command = [sys.executable, "-c", FAULTS, keep]
    found = subprocess.run(command, env=clean | environ, text=True, capture_output=True, check=True)
    assert found.stdout.split()[0] == done and int(found.stdout.split()[1]) in faults
    assert not device.keep_freed_memory(torch.device("cuda"))
