"""Regions of kernels that a CUDA graph holds: the host starts one with one call instead of one for
each kernel. What a graph cannot hold is found before one is recorded."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from itertools import zip_longest
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron import cuda
from megatron.kernels.cuda.availability import fused_ops

aten = torch.ops.aten
HOST_DECIDES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class NotStatic(Exception):
    """What a CUDA graph cannot hold, in words."""


class Watch(TorchDispatchMode):
    """Sees the operations of a region on `device`. Raises NotStatic at one that needs the host;
    `compare` finds what is not the same, on the same memory, another time."""

    def __init__(self, device: torch.device):
        super().__init__()
        self.calls: list[list[object]] = []
        self._device = device
        self._made: set[int] = set()  # storages that are the region's own
        # they free their memory; but no address is used twice
        self._storages: list[StorageWeakRef] = []

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
        self._storages += [StorageWeakRef(each.untyped_storage()) for each in before + after]
        return result

    def _needs_host(self, func: Any, inputs: list[Any]) -> str | None:
        tensors = _tensors(inputs)
        if func.overloadpacket is aten.lift_fresh:
            return "makes a tensor of the host's numbers"
        # attention makes a seed on the CPU, though it draws nothing
        used = {each.device.type for each in tensors if _address(each) not in self._made}
        used |= {each.type for each in inputs if isinstance(each, torch.device)}
        if used - {self._device.type}:
            return "copies between host and device"
        if func.overloadpacket in (aten.index, aten.index_put, aten.index_put_):
            masks = any(each.dtype == torch.bool for each in tensors[1:])
            return "counts the elements of a mask" if masks else None
        return "reads values on the host" if HOST_DECIDES & set(func.tags) else None

    def _seen(self, value: object) -> object:
        """What of an operation's input must be the same each time."""
        if isinstance(value, torch.ScriptObject):  # a process group; none equals another
            return type(value)
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


class Graphs:
    """Regions on a device by key, each a graph from its third run on.

    Before, a region runs operation by operation under `Watch`, twice. It reads and writes memory
    that stays where it is; its results lie where its last run has left them. All graphs share the
    memory between inputs and results: they run one after another.
    """

    def __init__(self, device: torch.device):
        fused_ops(device, torch.float32)  # tries a kernel once, and reads its result
        self._device = device
        self._watched: dict[Hashable, Watch] = {}
        self._recorded: dict[Hashable, tuple[Any, Any]] = {}

    def run(self, key: Hashable, region: Callable[[], Any]) -> Any:
        """The result of `region()`, which the next run of this key overwrites. Raises NotStatic,
        and then computes nothing that counts."""
        if key in self._recorded:
            graph, result = self._recorded[key]
            graph.replay()
            return result
        with Watch(self._device) as now:
            result = region()
        before = self._watched.pop(key, None)
        if before is None:
            self._watched[key] = now
            return result
        before.compare(now)
        others = [graph for graph, _ in self._recorded.values()]
        try:
            self._recorded[key] = cuda.record(region, *others[:1])
        except RuntimeError as error:
            raise NotStatic(str(error).partition("\n")[0]) from error
        return result
