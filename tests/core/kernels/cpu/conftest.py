"""The C++ as built for each level of instructions."""

import pytest
import torch

from megatron.kernels.cpu import native

LEVELS = list(native.LEVELS)


@pytest.fixture(params=LEVELS)
def level(request, monkeypatch) -> str:
    """One level that this processor has; the C++ of that level answers."""
    here = torch.backends.cpu.get_cpu_capability()
    found = native.load(here)
    if isinstance(found, str):
        pytest.skip(found)
    if LEVELS.index(request.param) < LEVELS.index(here):
        pytest.skip(f"needs a CPU with {request.param}")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: request.param)
    monkeypatch.setattr(native, "capability", lambda: request.param)
    return request.param
