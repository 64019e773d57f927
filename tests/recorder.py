"""Notes what each rank of a run sends: every call of torch.distributed in each training step. Knows
no formula.

`watch` goes around the functions of torch.distributed that megatron/parallel calls (a call of
any other that moves tensors is an error) and around the training step; calls outside a step, of
start-up and evaluation, are not noted.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron.parallel import collectives


class Call(NamedTuple):
    """`ranks`: of the group, or (this rank, the other) of a send or receive. `nbytes`: of the whole
    tensor: what is summed, brought together, scattered or carried."""

    operation: str
    ranks: tuple[int, ...]
    nbytes: int
    dtype: str


def _whole(args: tuple, kwargs: dict) -> torch.Tensor:
    """The largest of the tensors a collective is given: of (output, input) the whole one."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    return max(tensors, key=lambda tensor: tensor.nbytes)


def _ranks(kwargs: dict) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(kwargs.get("group") or dist.group.WORLD))


class Recorder:
    """The calls of each training step of this process."""

    # gloo scatters sums as an exchange of parts: the same bytes travel.
    GROUP = {
        "all_reduce": "all-reduce",
        "all_gather_into_tensor": "all-gather",
        "all_gather_single": "all-gather",
        "reduce_scatter_tensor": "reduce-scatter",
        "reduce_scatter_single": "reduce-scatter",
        "all_to_all_single": "reduce-scatter",
        "broadcast": "broadcast",
        "reduce": "reduce",
    }
    FORBIDDEN = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter", "send", "recv")

    def __init__(self) -> None:
        self.steps: list[list[Call]] = []
        self._inside = False

    def note(self, operation: str, ranks: tuple[int, ...], tensor: torch.Tensor) -> None:
        """One call, if a step is going on."""
        if self._inside:
            self.steps[-1].append(
                Call(operation, ranks, tensor.nbytes, str(tensor.dtype).removeprefix("torch."))
            )

    def step(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, whose calls are one step."""

        def inside(*args: Any, **kwargs: Any) -> Any:
            self.steps.append([])
            self._inside = True
            try:
                return function(*args, **kwargs)
            finally:
                self._inside = False

        return inside

    def install(self) -> None:
        """Wrap the functions of torch.distributed, and the names that parallel/collectives.py
        has for some."""
        originals = {
            name: getattr(dist, name)
            for name in (*self.GROUP, "isend", "irecv", "batch_isend_irecv")
            if hasattr(dist, name)
        }
        wrapped = {
            name: self._group(name, function) if name in self.GROUP else self._peer(name, function)
            for name, function in originals.items()
        }
        for name, function in originals.items():
            setattr(dist, name, wrapped[name])
            for mine, value in vars(collectives).copy().items():
                if value is function:
                    setattr(collectives, mine, wrapped[name])
        operation = dist.P2POp
        unwrapped = {wrapped[name]: originals[name] for name in ("isend", "irecv")}
        dist.P2POp = lambda op, *args, **kwargs: operation(unwrapped[op], *args, **kwargs)
        for name in self.FORBIDDEN:
            setattr(dist, name, self._refuse(name, getattr(dist, name)))

    def _group(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            assert len([a for a in args if isinstance(a, dist.ProcessGroup)]) == 0, (
                f"{name}: pass the group by name"
            )
            self.note(self.GROUP[name], _ranks(kwargs), _whole(args, kwargs))
            return function(*args, **kwargs)

        return call

    def _peer(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        kinds = {"isend": "send", "irecv": "receive"}

        def batch(operations: list) -> Any:
            for operation in operations:
                self.note(
                    kinds[operation.op.__name__],
                    (dist.get_rank(), operation.peer),
                    operation.tensor,
                )
            return function(operations)

        def call(tensor: torch.Tensor, peer: int, **kwargs: Any) -> Any:
            self.note(kinds[name], (dist.get_rank(), peer), tensor)
            return function(tensor, peer, **kwargs)

        return batch if name == "batch_isend_irecv" else call

    def _refuse(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            assert not self._inside, f"torch.distributed.{name} in a training step is not recorded"
            return function(*args, **kwargs)

        return call


def watch() -> None:
    """A hook of tests.runs.train: every rank writes its steps beside its log when the run ends."""
    from megatron.training import loop

    recorder = Recorder()
    recorder.install()
    loop.train_step = recorder.step(loop.train_step)
    finished = loop.train

    def train_all(run: Any, *args: Any, **kwargs: Any) -> Any:
        found = finished(run, *args, **kwargs)
        file = Path(run.config.logging.metrics_file).with_name(f"calls.{os.environ['RANK']}")
        file.write_text(json.dumps(recorder.steps))
        return found

    loop.train = train_all


def watch_balanced() -> None:
    """As `watch`; every expert gets as many tokens, or almost: those of both halves, which are on
    different ranks with expert parallelism, get one more in turn. The plan and a trace count with
    such numbers."""
    from megatron.model.blocks.moe import module as moe

    own = moe.select_experts

    def select(logits: torch.Tensor, model: Any, *more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        weights, experts = own(logits, model, *more)
        in_turn = torch.arange(model.num_experts).view(2, -1).t().flatten()
        chosen = in_turn[torch.arange(experts.numel()) % model.num_experts]
        experts.data.view(-1).copy_(chosen)
        return weights, experts

    moe.select_experts = select
    watch()


def read(folder: Path, rank: int) -> list[list[Call]]:
    """The steps of a rank of a run that was watched."""
    steps = json.loads((folder / f"calls.{rank}").read_text())
    return [
        [Call(operation, tuple(ranks), nbytes, dtype) for operation, ranks, nbytes, dtype in step]
        for step in steps
    ]


def totals(calls: Iterable[Call]) -> Counter:
    """{(operation, ranks, dtype, bytes of one call): number of calls}."""
    return Counter((call.operation, call.ranks, call.dtype, call.nbytes) for call in calls)
