"""The stand-ins of libraries that need CUDA, as a fixture."""

import sys

import pytest
import torch

from megatron.kernels.cpu import fp32_attention, native
from megatron.kernels.libraries import load_problem
from tests.core.kernels import fake_libraries as fakes


@pytest.fixture
def libraries(monkeypatch):
    """All stand-ins importable; the list of calls, empty."""
    for module in (*fakes.flash_attn(), *fakes.apex(), *fakes.transformer_engine()):
        monkeypatch.setitem(sys.modules, module.__name__, module)
        parent, _, child = module.__name__.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    fakes.CALLS.clear()
    load_problem.cache_clear()
    yield fakes.CALLS
    load_problem.cache_clear()


@pytest.fixture
def cpp() -> None:
    """The test needs the C++ over rows."""
    if reason := native.unavailable_reason(torch.device("cpu"), torch.float32):
        pytest.skip(reason)


@pytest.fixture
def no_vector_attention(monkeypatch):
    """As where the C++ for attention in fp32 was not built."""
    monkeypatch.setattr(fp32_attention, "load", lambda capability: "not built")
