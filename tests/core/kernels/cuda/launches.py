"""The operations of a call on the meta device that are launches on CUDA."""

from torch.utils._python_dispatch import TorchDispatchMode


class Launches(TorchDispatchMode):
    """Names of the operations that make or change memory."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if not func.is_view and "empty" not in name and name != "detach":
            self.names.append(name)
        return func(*args, **(kwargs or {}))
