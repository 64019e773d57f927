"""Stateless dropout seeds, and activation recomputation that repeats the same dropout.

A mask is a pure function of where it is used, so recompute, skipped ranges, rewinds and resumes in
another layout have nothing to save and nothing to restore.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch.utils.checkpoint import checkpoint

Result = TypeVar("Result")


def dropout_seed(
    seed: int, iteration: int, micro_batch: int, layer: int, site: str, shard: int | tuple[int, ...]
) -> int:
    """A stable 63-bit hash of one use of dropout: the same on every machine and Python.

    `layer` is the global layer number (-1: the embedding); `site` names the place in it; `shard`
    says which part of the global tensor this is, so that ranks with other rows or heads draw other
    masks.
    """
    key = f"{seed}/{iteration}/{micro_batch}/{layer}/{site}/{shard}"
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") >> 1


class DropoutSeeds:
    """The dropout streams of one micro-batch on one rank; `shard` is the rank among those that see
    other tokens."""

    def __init__(self, seed: int, iteration: int, micro_batch: int, shard: int = 0):
        self._use = (seed, iteration, micro_batch)
        self._shard = shard

    def seed(self, layer: int, site: str, tp_part: int = 0) -> int:
        """The seed of one site; `tp_part`: the tensor-parallel rank where the tensor is split over
        those ranks."""
        return dropout_seed(*self._use, layer, site, (self._shard, tp_part))

    def tensor(self, layer: int, site: str, tp_part: int = 0) -> torch.Tensor:
        """The same without dimensions on the CPU: a compiled graph would hold an integer."""
        return torch.tensor(self.seed(layer, site, tp_part))


Place = tuple[int, str, int]  # layer, site, tp_part


class StaticSeeds(DropoutSeeds):
    """Those at `places` of one micro-batch after another in the same memory of a device, `values`,
    which a CUDA graph reads."""

    def __init__(self, places: Iterable[Place], device: torch.device):
        self._rows = {place: row for row, place in enumerate(places)}
        self.values = torch.zeros(len(self._rows), dtype=torch.int64, device=device)

    def on_host(self, seeds: DropoutSeeds) -> torch.Tensor:
        """Those of a micro-batch, to be copied into `values`."""
        return torch.tensor([seeds.seed(*place) for place in self._rows], dtype=torch.int64)

    def seed(self, layer: int, site: str, tp_part: int = 0) -> int:
        """Raises NotStatic: a graph would draw the same mask each time."""
        from megatron.kernels.cuda_graph import NotStatic

        raise NotStatic(f"the seed of {site} in layer {layer} is a number of Python's")

    def tensor(self, layer: int, site: str, tp_part: int = 0) -> torch.Tensor:
        """As of any, on the device."""
        return self.values[self._rows[layer, site, tp_part]]


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
