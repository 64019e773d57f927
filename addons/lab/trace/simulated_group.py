"""Process groups of any number of ranks in one process, whose collectives move nothing, and what a
collective under torch's dispatcher says of itself. For --dry-run --trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist  # noqa: TID251
from torch.testing._internal.distributed.fake_pg import FakeStore

# Operations of torch.ops.c10d by what they are called everywhere else.
OPERATIONS = {
    "allreduce_": "all-reduce",
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "alltoall_base_": "all-to-all",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "send": "send",
    "recv_": "receive",
    "barrier": "barrier",
}


class Message(NamedTuple):
    """One call: `ranks` of the group, or (this rank, the other) of a send or receive; `nbytes` of
    the whole tensor: what is summed, brought together, scattered or carried; `group`: torch's name
    of the process group."""

    operation: str
    ranks: tuple[int, ...]
    nbytes: int
    dtype: str
    group: str


@contextmanager
def simulated_ranks(world_size: int, rank: int) -> Iterator[None]:
    """In this context this process is `rank` of `world_size`: collectives return at once, and give
    tensors on the meta device no values."""
    assert not dist.is_initialized(), "this process has a process group already"
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def on_wait(call: Callable[[Any], object]) -> Iterator[None]:
    """In this context `call` gets the handle of a simulated collective when it is waited for."""
    kind: Any = getattr(torch._C._distributed_c10d, "FakeWork", dist.Work)
    original_wait = kind.wait

    def wait(handle: Any, *timeout: Any) -> Any:
        call(handle)
        return original_wait(handle, *timeout)

    kind.wait = wait
    try:
        yield
    finally:
        kind.wait = original_wait


def started(operation: Any, args: Sequence[Any], out: Any) -> tuple[Any, torch.Tensor | None]:
    """(Handle of an operation of torch.ops.c10d that has not been waited for yet, or None; what it
    writes, None of a send)."""
    names = [argument.name for argument in operation._schema.arguments]
    if "async_op" in names and names.index("async_op") < len(args):
        if not args[names.index("async_op")]:
            return None, None
    name = operation.overloadpacket.__name__
    if name == "barrier":
        return None, None
    handle = out[-1] if isinstance(out, (tuple, list)) else out
    written = None if name == "send" else next(_tensors(args))
    return dist.Work.unbox(handle), written


def serve_meta(group: Any) -> None:
    """Let `group` send several messages at once on the meta device (batch_isend_irecv)."""
    if group is not None:
        backend = group._get_backend(torch.device("cpu"))
        group._register_backend(torch.device("meta"), dist.ProcessGroup.BackendType.CUSTOM, backend)


def message_of(operation: str, args: Sequence[Any], rank: int) -> Message:
    """What an operation of torch.ops.c10d with these arguments moves on `rank`."""
    group = next(process_group for arg in args if (process_group := _group(arg)) is not None)
    ranks = tuple(dist.get_process_group_ranks(group))
    tensor = max(_tensors(args), key=lambda tensor: tensor.nbytes, default=torch.empty(0))
    name = OPERATIONS.get(operation, operation)
    if name in ("send", "receive"):
        ranks = (rank, ranks[args[2]])
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Message(name, ranks, tensor.nbytes, dtype, group.group_name)


def _group(arg: Any) -> dist.ProcessGroup | None:
    if not isinstance(arg, torch.ScriptObject):
        return None
    try:
        return dist.ProcessGroup.unbox(arg)
    except RuntimeError:  # a reduce operation
        return None


def _tensors(args: Sequence[Any]) -> Iterator[torch.Tensor]:
    for arg in args:
        if isinstance(arg, torch.Tensor):
            yield arg
        elif isinstance(arg, (list, tuple)):
            yield from _tensors(arg)
