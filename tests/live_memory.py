"""What the operations of torch return, live and largest, for tests of memory; knows no product
code."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Every piece of memory that an operation gives back while this is on: `live()` bytes now, the
    most there were in `peak`, and in `shapes` those of all tensors seen. What an operation uses
    inside and frees again is not seen."""

    def __init__(self):
        super().__init__()
        self.peak = 0
        self.shapes = set()
        self._known = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {
            x.untyped_storage()._cdata
            for x in tree_leaves((args, kwargs))
            if isinstance(x, torch.Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.shapes.add(tuple(x.shape))
                storage = x.untyped_storage()
                if storage._cdata not in before:
                    self._known[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.live())
        return out

    def live(self) -> int:
        """Bytes that still live of what was made."""
        self._known = {key: known for key, known in self._known.items() if not known[0].expired()}
        return sum(size for _, size in self._known.values())
