"""Activations that are computed again in backward, with the same dropout."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.utils.checkpoint import checkpoint

Result = TypeVar("Result")


def recompute_input(
    layer: Callable[[torch.Tensor], torch.Tensor],
    function: Callable[..., torch.Tensor],
    *args: object,
) -> torch.Tensor:
    """`layer(function(*args))`. Of the function only `args` are kept, and not the result, which
    `layer` would save for backward: there it is computed again."""
    y = recompute(function, *args)
    memory = (y.data_ptr(), y.shape)

    def pack(saved: torch.Tensor) -> torch.Tensor | None:
        return None if (saved.data_ptr(), saved.shape) == memory else saved

    def unpack(saved: torch.Tensor | None) -> torch.Tensor:
        if saved is not None:
            return saved
        with torch.no_grad():
            return function(*args)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return layer(y)


class _Made:
    """What a function makes of `args`, once more when it is asked for, with the graph of that."""

    def __init__(
        self,
        function: Callable[..., Sequence[torch.Tensor]],
        args: Sequence[torch.Tensor],
    ):
        self.function = function
        self.args = [arg.detach().requires_grad_(arg.requires_grad) for arg in args]
        self._results: Sequence[torch.Tensor] | None = None

    def results(self) -> Sequence[torch.Tensor]:
        if self._results is None:
            with torch.enable_grad():
                self._results = self.function(*self.args)
        return self._results

    def take_results(self) -> Sequence[torch.Tensor]:
        results, self._results = self.results(), None
        return results


class _MadeAgain(torch.autograd.Function):
    """The results of a function, whose backward goes through what it makes once more."""

    @staticmethod
    def forward(ctx: Any, made: _Made, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.made = made
        return tuple(made.function(*args))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        made = zip(ctx.made.take_results(), grads, strict=True)
        # behind frozen weights a result may be without a graph
        pairs = [(result, grad) for result, grad in made if result.requires_grad]
        results, grads = zip(*pairs, strict=True)
        torch.autograd.backward(results, grads)
        return None, *(arg.grad for arg in ctx.made.args)


def recompute_inputs(
    layer: Callable[..., torch.Tensor],
    function: Callable[..., Sequence[torch.Tensor]],
    *args: torch.Tensor,
) -> torch.Tensor:
    """`layer(*function(*args))`. Of the function only `args` are kept, and not the results, which
    `layer` would save for backward: there the first that is asked for makes all of them again,
    once."""
    if torch.is_grad_enabled() and not any(arg.requires_grad for arg in args):
        return layer(*function(*args))  # else weights in the function would get no gradient
    made = _Made(function, args)
    results = _MadeAgain.apply(made, *args)
    # by their memory: a layer saves views of them, too
    numbers = {result.untyped_storage().data_ptr(): i for i, result in enumerate(results)}

    def pack(saved: torch.Tensor) -> Any:
        number = numbers.get(saved.untyped_storage().data_ptr())
        if number is None:
            return saved
        return number, saved.shape, saved.stride(), saved.storage_offset()

    def unpack(saved: Any) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        number, *view = saved
        return made.results()[number].detach().as_strided(*view)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return layer(*results)


def recompute(function: Callable[..., Result], *args: object) -> Result:
    """`function(*args)`, whose activations are not kept but computed again in backward. Masks
    repeat by themselves."""
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
