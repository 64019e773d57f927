"""A stand-in on the CPU for CUDA graphs: what is recorded are operations with their very tensors,
and a replay computes nothing else."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from megatron import cuda
from megatron.kernels import rows
from megatron.kernels.cpu import native


class Graph(TorchDispatchMode):
    """The operations of a region. `replays`: how often it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple, dict, list]] = []
        self.written: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.replays = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {
            **dict(zip((a.name for a in func._schema.arguments), args, strict=False)),
            **(kwargs or {}),
        }
        for argument in func._schema.arguments:
            if argument.alias_info and argument.alias_info.is_write and argument.name in given:
                tensor = given[argument.name]
                self.written.append((tensor, tensor.clone()))
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.calls.append((func, args, kwargs or {}, tree_leaves(result)))
        return result

    def undo(self) -> None:
        """What was written is as before: on CUDA nothing has run."""
        for tensor, before in reversed(self.written):
            tensor.detach().copy_(before)
        self.written.clear()

    def replay(self) -> None:
        """All of them once more, each into the memory of its first result; autograd sees nothing."""
        self.replays += 1
        with torch._C._AutoDispatchBelowAutograd():
            self._run()

    def _run(self) -> None:
        for func, args, kwargs, results in self.calls:
            changed = {id(each) for each in tree_leaves((args, kwargs))}
            for to, value in zip(results, tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(to, torch.Tensor) and id(to) not in changed:
                    to.copy_(value)


original = torch.Tensor.tolist


def tolist(tensor: torch.Tensor) -> list:
    """Seen by modes, as on CUDA, where it copies."""
    if _get_current_dispatch_mode() is not None:
        tensor.sum().item()
    return original(tensor)


@pytest.fixture
def graphs(monkeypatch) -> list[Graph]:
    """Those that were recorded, since CPUs have them."""
    recorded: list[Graph] = []

    def record(region: Callable[[], Any], other: Graph | None = None) -> tuple[Graph, Any]:
        assert other is None or other in recorded
        with Graph() as graph:
            result = region()
        graph.undo()
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor):
                each.fill_(float("nan"))
        recorded.append(graph)
        return graph, result

    # what CUDA has without Triton
    monkeypatch.setattr(rows, "pays_off", lambda device: False)
    monkeypatch.setattr(native, "unavailable_reason", lambda device, dtype: "not here")
    monkeypatch.setattr(torch.Tensor, "tolist", tolist)
    monkeypatch.setattr(cuda, "has_graphs", lambda device: True)
    monkeypatch.setattr(cuda, "record", record)
    return recorded
