"""torch's AdamW or SGD over the main weights, with its state allocated at construction."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.optim.adamw import adamw

from megatron.config.optimizer import OptimizerConfig
from megatron.optimizer import moments

STATE_KEYS = {"adam": moments.KEYS, "sgd": ("momentum_buffer",)}
# Elements of which the precision-aware update has copies in the main weights' dtype at a time.
PIECE = 2**22


def _eager(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """torch's class without what makes its methods fit for torch.compile, whose first use imports
    the compiler: more than a second of every start, and updates are never compiled here."""
    return type(
        kind.__name__,
        (kind,),
        {
            "add_param_group": inspect.unwrap(kind.add_param_group),
            "step": torch.no_grad()(inspect.unwrap(kind.step)),
        },
    )


_AdamW = _eager(torch.optim.AdamW)
_SGD = _eager(torch.optim.SGD)


class PrecisionAwareAdamW(_AdamW):
    """AdamW whose gradients and moments may have fewer bits than the main weights: they are
    converted a piece at a time, and the update is computed by the same kernels."""

    @torch.no_grad()
    def update(self, grads: Sequence[torch.Tensor], factor: float) -> None:
        """One step with `grads` x `factor`; `grads` in the order of the groups' params. They are
        left alone."""
        remaining = iter(grads)
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            params = group["params"]
            steps = [self.state[param]["step"] for param in params]
            for piece in _pieces(params, [next(remaining) for _ in params]):
                weights = [param.view(-1)[span] for param, _, span in piece]
                wide = [
                    grad.view(-1)[span].to(weight.dtype, copy=True)
                    for (_, grad, span), weight in zip(piece, weights, strict=True)
                ]
                torch._foreach_mul_(wide, factor)
                stored = {
                    key: [self.state[param][key].view(-1)[span] for param, _, span in piece]
                    for key in moments.KEYS
                }
                computed = {
                    key: [
                        moments.widen(key, part, weight.dtype)
                        for part, weight in zip(parts, weights, strict=True)
                    ]
                    for key, parts in stored.items()
                }
                adamw(
                    weights,
                    wide,
                    computed["exp_avg"],
                    computed["exp_avg_sq"],
                    [],
                    # a parameter of several pieces advances once: the kernels count on copies
                    [self.state[param]["step"].clone() for param, *_ in piece],
                    foreach=group["foreach"],
                    fused=group["fused"],
                    amsgrad=False,
                    beta1=beta1,
                    beta2=beta2,
                    lr=group["lr"],
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    maximize=False,
                )
                for key, parts in stored.items():
                    for values, part in zip(computed[key], parts, strict=True):
                        moments.store(key, values, part)
            if steps:
                torch._foreach_add_(steps, 1.0)


def _pieces(
    params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]
) -> Iterator[list[tuple[torch.Tensor, torch.Tensor, slice]]]:
    """(parameter, its gradient, range of its elements) of all, at most PIECE elements together."""
    piece: list[tuple[torch.Tensor, torch.Tensor, slice]] = []
    room = PIECE
    for param, grad in zip(params, grads, strict=True):
        for start in range(0, param.numel(), PIECE):
            stop = min(start + PIECE, param.numel())
            if stop - start > room:
                yield piece
                piece = []
                room = PIECE
            piece.append((param, grad, slice(start, stop)))
            room -= stop - start
    if piece:
        yield piece


def _fused_or_foreach(build: Callable[..., torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """The fused kernels where this torch has them for the device and type of the weights, else the
    foreach ones."""
    try:
        return build(fused=True)
    except RuntimeError:
        return build(foreach=True)


def build_adam(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW (decoupled weight decay, bias correction) over `groups`, whose `params` are main
    weights.

    exp_avg and exp_avg_sq (in the dtypes of `config`) are zeros and the step count is 0 before the
    first step, so a checkpoint taken then is an ordinary one. Learning rate and weight decay are 0
    until a scheduler sets them per group.
    """
    betas = (config.adam_beta1, config.adam_beta2)
    eps = config.adam_eps
    assert all(0.0 <= beta < 1.0 for beta in betas) and eps >= 0.0, (betas, eps)
    kind = PrecisionAwareAdamW if config.use_precision_aware_optimizer else _AdamW
    dtypes = {key: getattr(torch, name) for key, name in config.moment_dtypes.items()}
    optimizer = _fused_or_foreach(
        lambda **how: kind(groups, lr=0.0, betas=betas, eps=eps, weight_decay=0.0, **how)
    )
    for group in optimizer.param_groups:
        for param in group["params"]:
            optimizer.state[param] = {
                "step": torch.zeros(
                    (), dtype=torch.float32, device=param.device if group["fused"] else "cpu"
                ),
                **{key: torch.zeros_like(param, dtype=dtypes.get(key)) for key in moments.KEYS},
            }
    return optimizer


def build_sgd(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.SGD:
    """SGD over `groups` with weight decay added to the gradient; the momentum buffer (if any)
    starts as zeros."""
    momentum = config.sgd_momentum
    assert 0.0 <= momentum < 1.0, momentum
    optimizer = _fused_or_foreach(
        lambda **how: _SGD(groups, lr=0.0, momentum=momentum, weight_decay=0.0, **how)
    )
    if momentum:
        for group in optimizer.param_groups:
            for param in group["params"]:
                optimizer.state[param] = {"momentum_buffer": torch.zeros_like(param)}
    return optimizer


def set_step_count(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Make every parameter's step count `step` (Adam's bias correction reads it); SGD has none."""
    counts = [state["step"] for state in optimizer.state.values() if "step" in state]
    if counts:
        torch._foreach_zero_(counts)
        torch._foreach_add_(counts, float(step))
