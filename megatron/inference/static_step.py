"""A decoding step of fixed shapes, which a CUDA graph holds: the host starts it with one call
instead of one for each kernel. What a graph cannot hold is found before one is recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron import device as devices
from megatron.kernels.cuda.availability import fused_ops
from megatron.model.blocks.cache import CachedTokens

SHORTEST = 256  # positions that attention looks at; above it twice as many, and so on
aten = torch.ops.aten
HOST_DECIDES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class NotStatic(Exception):
    """What a CUDA graph cannot hold, in words."""


def bucket(size: int, smallest: int, largest: int) -> int:
    """The first of `smallest`, 2 `smallest`, 4 `smallest`, ..., `largest` that is at least
    `size`."""
    return min(largest, smallest << ((size - 1) // smallest).bit_length())


class Watch(TorchDispatchMode):
    """Sees the operations of a region on `device`. Raises NotStatic at one that needs the host;
    `compare` finds what is not the same, on the same memory, another time."""

    def __init__(self, device: torch.device):
        super().__init__()
        self.calls: list[list[object]] = []
        self._device = device
        self._made: set[int] = set()  # storages that are the region's own
        self._kept: list[torch.Tensor] = []  # so that no address is used twice

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        inputs = tree_leaves((args, kwargs))
        if why_not := self._needs_host(func, inputs):
            raise NotStatic(f"{func} {why_not}")
        self.calls.append([func, *map(self._seen, inputs)])
        result = func(*args, **(kwargs or {}))
        before = _tensors(inputs)
        after = _tensors(tree_leaves(result))
        self._made |= set(map(_address, after)) - set(map(_address, before))
        self._kept += before + after
        return result

    def _needs_host(self, func: Any, inputs: list[Any]) -> str | None:
        tensors = _tensors(inputs)
        if func.overloadpacket is aten.lift_fresh:
            return "makes a tensor of the host's numbers"
        used = {each.device.type for each in tensors}
        used |= {each.type for each in inputs if isinstance(each, torch.device)}
        if used - {self._device.type}:
            return "copies between host and device"
        if func.overloadpacket in (aten.index, aten.index_put, aten.index_put_):
            masks = any(each.dtype == torch.bool for each in tensors[1:])
            return "counts the elements of a mask" if masks else None
        return "reads values on the host" if HOST_DECIDES & set(func.tags) else None

    def _seen(self, value: object) -> object:
        """What of an operation's input must be the same each time."""
        if not isinstance(value, torch.Tensor):
            return value
        place = _address(value)
        memory = None if place in self._made else (place, value.storage_offset())
        return memory, value.shape, value.stride(), value.dtype

    def compare(self, later: Watch) -> None:
        """Raise NotStatic where `later`, of the same region, saw something else."""
        for before, now in zip_longest(self.calls, later.calls, fillvalue=["nothing"]):
            if before != now:
                raise NotStatic(f"{now[0]} has other inputs each time")


def _tensors(values: list[Any]) -> list[torch.Tensor]:
    return [each for each in values if isinstance(each, torch.Tensor)]


def _address(tensor: torch.Tensor) -> int:
    """The storage of a tensor, also of one of the meta device, which has no memory."""
    return tensor.untyped_storage()._cdata


class StaticStep:
    """One token of each of the first rows of a cache of `rows` x `length`.

    compute (tokens [b, 1], where they are in the cache) -> logits [b, vocab]. Numbers of rows and
    of positions that attention looks at are rounded up to few (`bucket`). With each pair of them
    the step runs operation by operation twice, under `Watch`, and is recorded then; all graphs
    share memory. The weights must stay where they are.
    """

    def __init__(
        self,
        compute: Callable[[torch.Tensor, CachedTokens], torch.Tensor],
        rows: int,
        length: int,
        device: torch.device,
    ):
        fused_ops(device, torch.float32)  # tries a kernel once, and reads its result
        self._compute = compute
        self._rows = rows
        self._length = length
        self._inputs = torch.zeros(2, rows, dtype=torch.int64, device=device)
        self._watched: dict[tuple[int, int], Watch] = {}
        self._graphs: dict[tuple[int, int], tuple[Any, torch.Tensor]] = {}

    def __call__(self, tokens: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """Logits [b, vocab] after a token of each of the first b rows at these positions; the next
        call overwrites them. Raises NotStatic, and computes nothing any more that counts."""
        unused = [0] * (self._rows - len(tokens))
        self._inputs.copy_(torch.tensor([[*tokens, *unused], [*positions, *unused]]))
        rows = bucket(len(tokens), 1, self._rows)
        end = bucket(max(positions) + 1, SHORTEST, self._length)
        if (rows, end) in self._graphs:
            graph, logits = self._graphs[rows, end]
            graph.replay()
        else:
            logits = self._watch(rows, end)
        return logits[: len(tokens)]

    @torch.inference_mode(False)  # in it operations come to Watch undivided
    @torch.no_grad()
    def region(self, rows: int, end: int) -> torch.Tensor:
        """What is recorded: the step of so many rows that looks at so many positions."""
        tokens, positions = self._inputs[:, :rows].unsqueeze(-1)
        return self._compute(tokens, CachedTokens(0, self._length, None, positions, end))

    def _watch(self, rows: int, end: int) -> torch.Tensor:
        """The step operation by operation; it is recorded if that was the second time."""
        with Watch(self._inputs.device) as now:
            logits = self.region(rows, end)
        before = self._watched.pop((rows, end), None)
        if before is None:
            self._watched[rows, end] = now
            return logits
        before.compare(now)
        others = [graph for graph, _ in self._graphs.values()]
        try:
            recorded = devices.record(partial(self.region, rows, end), *others[:1])
        except RuntimeError as error:
            raise NotStatic(str(error).partition("\n")[0]) from error
        self._graphs[rows, end] = recorded
        return logits
