"""torch's AdamW or SGD over the main weights, with its state allocated at construction."""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch

from megatron.config.optimizer import OptimizerConfig

MOMENTS = ("exp_avg", "exp_avg_sq")
MOMENTUM = "momentum_buffer"
NEURONS = "neuron_exp_avg_sq"
STATE_KEYS = {"adam": MOMENTS, "sgd": (MOMENTUM,), "muon": (MOMENTUM, NEURONS, *MOMENTS)}


# torch's classes without what makes their methods fit for torch.compile, whose first use imports
# the compiler: more than a second of every start, and updates are never compiled here.


class AdamW(torch.optim.AdamW):
    """torch's, never compiled. grad_scale: what the fused kernel divides gradients by."""

    grad_scale: torch.Tensor | None
    add_param_group = inspect.unwrap(torch.optim.AdamW.add_param_group)
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


class SGD(torch.optim.SGD):
    """torch's, never compiled."""

    add_param_group = inspect.unwrap(torch.optim.SGD.add_param_group)
    step = torch.no_grad()(inspect.unwrap(torch.optim.SGD.step))


Built = TypeVar("Built", AdamW, SGD)


def _fused_or_foreach(build: Callable[..., Built]) -> Built:
    """The fused kernels where this torch has them for the device and type of the weights, else the
    foreach ones."""
    try:
        return build(fused=True)
    except RuntimeError:
        return build(foreach=True)


def grad_scale(factor: float, device: torch.device) -> torch.Tensor | None:
    """What torch's fused kernel divides gradients by, for gradients x `factor`; without a host
    sync."""
    if factor == 1.0:
        return None
    return torch.full((), 1.0 / factor if factor else math.inf, device=device)


def build_adam(
    groups: list[dict[str, Any]],
    config: OptimizerConfig,
    kind: type[AdamW] | None = None,
) -> AdamW:
    """AdamW (decoupled weight decay, bias correction), of class `kind`, over `groups`, whose
    `params` are main weights.

    exp_avg and exp_avg_sq (in the dtypes of `config`) are zeros and the step count is 0 before the
    first step, so a checkpoint taken then is an ordinary one. Learning rate and weight decay are 0
    until a scheduler sets them per group.
    """
    betas = (config.adam_beta1, config.adam_beta2)
    eps = config.adam_eps
    assert all(0.0 <= beta < 1.0 for beta in betas) and eps >= 0.0, (betas, eps)
    dtypes = {key: getattr(torch, name) for key, name in config.moment_dtypes.items()}
    optimizer = _fused_or_foreach(
        partial(kind or AdamW, groups, lr=0.0, betas=betas, eps=eps, weight_decay=0.0)
    )
    for group in optimizer.param_groups:
        for param in group["params"]:
            optimizer.state[param] = {
                "step": torch.zeros(
                    (), dtype=torch.float32, device=param.device if group["fused"] else "cpu"
                ),
                **{key: torch.zeros_like(param, dtype=dtypes.get(key)) for key in MOMENTS},
            }
    return optimizer


def build_sgd(groups: list[dict[str, Any]], config: OptimizerConfig) -> SGD:
    """SGD over `groups` with weight decay added to the gradient; the momentum buffer (if any)
    starts as zeros."""
    momentum = config.sgd_momentum
    assert 0.0 <= momentum < 1.0, momentum
    optimizer = _fused_or_foreach(partial(SGD, groups, lr=0.0, momentum=momentum, weight_decay=0.0))
    if momentum:
        for group in optimizer.param_groups:
            for param in group["params"]:
                optimizer.state[param] = {"momentum_buffer": torch.zeros_like(param)}
    return optimizer


def set_step_count(states: Iterable[Mapping[str, torch.Tensor]], step: int) -> None:
    """Make every parameter's step count `step` (Adam's bias correction reads it); SGD and Muon have
    none."""
    counts = [state["step"] for state in states if "step" in state]
    if counts:
        torch._foreach_zero_(counts)
        torch._foreach_add_(counts, float(step))


def moment_of(name: str) -> str | None:
    """The moment that the tensor `name` of a checkpoint is; None if it is none."""
    return next((key for key in MOMENTS if name.startswith(f"optimizer.{key}.")), None)
