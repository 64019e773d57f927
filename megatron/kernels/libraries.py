"""Whether an optional library of kernels can be imported."""

from functools import cache
from importlib import import_module
from importlib.util import find_spec

import torch

from megatron.config.kernels import INSTALL_TRANSFORMER_ENGINE


@cache
def load_problem(module: str, name: str, install: str) -> str | None:
    """Why `module` of the library `name` cannot be imported; None once it is.

    It is imported, not only searched for: an extension built for another torch exists and fails
    when it is first imported, which would be in the middle of a step.
    """
    if find_spec(module) is None:
        return f"{name} is not installed; {install}"
    try:
        import_module(module)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        return f"{name} is installed but does not load ({reason}); reinstall it: {install}"
    return None


def cuda_only(device: torch.device) -> str | None:
    """Why kernels for CUDA do not run here; None if they may."""
    return None if device.type == "cuda" else f"needs a CUDA device, but this is {device.type}"


def transformer_engine_unavailable_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why Transformer Engine cannot run here; None if it can."""
    if why_not := cuda_only(device):
        return f"Transformer Engine {why_not}"
    if dtype == torch.float64:
        return "Transformer Engine has no fp64"
    return (
        None
        if find_spec("transformer_engine")
        else f"Transformer Engine is not installed; {INSTALL_TRANSFORMER_ENGINE}"
    )
