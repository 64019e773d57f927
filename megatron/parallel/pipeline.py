"""Runs the pipeline schedule of one stage: forward and backward of its micro-batches, and the
point-to-point transfers between neighbouring stages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.config.plan.schedules import SENDS_UNDER_WAY, Action, Schedule, schedule
from megatron.parallel.context import Axis, ParallelContext
from megatron.parallel.exchange import start_receive, start_send
from megatron.parallel.single_stage import Backward, Forward

Key = tuple[int, int]  # (micro-batch, chunk)


class P2PLinks:
    """Transfers between a stage and its neighbours: hidden states of one shape in one group,
    gradients in another.

    So neither waits behind the other where a backend has one queue for a pair of ranks (NCCL).
    Without `overlap` each transfer is waited for where it starts. `last_shape`: that of the last
    chunk's input on the last stage.
    """

    def __init__(
        self,
        activations: Axis,
        gradients: Axis,
        shape: tuple[int, ...],
        last_shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        overlap: bool = True,
        chunks: int = 1,
    ):
        self._activations = activations
        self._gradients = gradients
        self._overlap = overlap
        self._shape = shape
        self._last = chunks * activations.size - 1  # of the virtual stages
        self._last_shape = last_shape
        self._dtype = dtype
        self._device = device
        self._sends: deque[Callable[[], torch.Tensor]] = deque()

    def send(self, action: Action, x: torch.Tensor) -> None:
        """Start an asynchronous send; the tensor is kept until it is sent, at most
        SENDS_UNDER_WAY of them."""
        assert action.peer is not None, action
        shape = self._shape_of(action)
        assert x.shape == shape and x.dtype == self._dtype, f"{action}: {x.shape} {x.dtype}"
        self._sends.append(start_send(x, self._axis(action), action.peer))
        while len(self._sends) > (SENDS_UNDER_WAY if self._overlap else 0):
            self._sends.popleft()()

    def receive(self, action: Action) -> Callable[[], torch.Tensor]:
        """Start an asynchronous receive; the function waits for the tensor and returns it."""
        assert action.peer is not None, action
        x = torch.empty(self._shape_of(action), dtype=self._dtype, device=self._device)
        wait = start_receive(x, self._axis(action), action.peer)
        if self._overlap:
            return wait
        wait()
        return lambda: x

    def finish(self) -> None:
        """Wait for all sends."""
        while self._sends:
            self._sends.popleft()()

    def _shape_of(self, action: Action) -> tuple[int, ...]:
        of_output = action.kind in ("send_activation", "receive_gradient")
        virtual = action.chunk * self._activations.size + self._activations.rank
        return self._last_shape if virtual + of_output == self._last else self._shape

    def _axis(self, action: Action) -> Axis:
        return self._activations if action.kind.endswith("activation") else self._gradients


class StageRunner:
    """Executes the actions of one stage; the method for a kind of action has its name.

    Between a forward and its backward the graph, the input and a loss are kept; an output that was
    sent is not. Under no_grad there is no backward, and only outputs that are still to be sent and
    losses are kept.
    """

    def __init__(self, forward: Forward, backward: Backward | None, links: P2PLinks | None):
        self._forward = forward
        self._backward = backward
        self._links = links
        self.inputs: dict[Key, Callable[[], torch.Tensor]] = {}
        self.alive: dict[Key, tuple[torch.Tensor | None, torch.Tensor | GradientEdge]] = {}
        self.output_gradients: dict[Key, Callable[[], torch.Tensor]] = {}
        self.input_gradients: dict[Key, torch.Tensor] = {}

    @property
    def links(self) -> P2PLinks:
        assert self._links is not None, "a schedule with transfers needs links"
        return self._links

    def forward(self, action: Action) -> None:
        """Wait for the input, if it comes from elsewhere, and compute."""
        key = action[1:3]
        hidden = None
        if key in self.inputs:
            hidden = self.inputs.pop(key)().requires_grad_(torch.is_grad_enabled())
        output = self._forward(*key, hidden)
        self.alive[key] = hidden if torch.is_grad_enabled() else None, output

    def backward(self, action: Action) -> None:
        """Wait for the gradient, if it comes from elsewhere, and compute."""
        assert self._backward is not None, action
        key = action[1:3]
        gradient = None
        if key in self.output_gradients:
            gradient = self.output_gradients.pop(key)()
        if key not in self.alive:  # the output was sent, and nothing that made it is trained
            return
        hidden, output = self.alive.pop(key)
        self._backward(output, gradient)
        if hidden is not None:
            assert hidden.grad is not None, f"{action}: the input has no gradient"
            self.input_gradients[key] = hidden.grad

    def send_activation(self, action: Action) -> None:
        """Send an output; where backward comes, only its edge of the graph stays."""
        key = action[1:3]
        hidden, output = self.alive.pop(key)
        assert isinstance(output, torch.Tensor), f"{action}: sent before"
        self.links.send(action, output.detach())
        if output.requires_grad:
            self.alive[key] = hidden, get_gradient_edge(output)

    def receive_activation(self, action: Action) -> None:
        """Start to receive an input."""
        self.inputs[action[1:3]] = self.links.receive(action)

    def send_gradient(self, action: Action) -> None:
        """Send the gradient of an input."""
        self.links.send(action, self.input_gradients.pop(action[1:3]))

    def receive_gradient(self, action: Action) -> None:
        """Start to receive the gradient of an output."""
        self.output_gradients[action[1:3]] = self.links.receive(action)


def run_schedule(
    actions: Iterable[Action],
    forward: Forward,
    backward: Backward | None = None,
    links: P2PLinks | None = None,
) -> None:
    """Execute the actions of one stage in order. Only the input of a computation is waited for and,
    at the end, sends."""
    runner = StageRunner(forward, backward, links)
    for action in actions:
        getattr(runner, action.kind)(action)
    if links is not None:
        links.finish()
    unused = {
        "forward": runner.inputs,
        "backward": (*runner.output_gradients, *(runner.alive if backward else ())),
        "send": runner.input_gradients,
    }
    assert not any(unused.values()), {
        f"had no {kind}": list(keys) for kind, keys in unused.items() if keys
    }


@lru_cache(maxsize=8)
def stage_schedule(
    stage: int,
    stages: int,
    micro_batches: int,
    chunks: int,
    forward_only: bool,
    overlap: bool,
    group: int | None = None,
) -> Schedule:
    """The schedule of one stage, cached: every iteration uses the same ones."""
    orders = schedule(
        stages, micro_batches, chunks, forward_only=forward_only, overlap=overlap, group=group
    )
    return orders[stage]


class Pipeline:
    """This rank's stage: `chunks` parts of the model, and links to the stages before and after.

    shape, dtype: the hidden states that pass between stages, [s, b, h] ([s/tp, b, h] with sequence
    parallelism). group: micro-batches that pass a chunk in turn, by default as many as stages.
    forward_shape: that of a run without backward, if it differs. lengths: so many times as long is
    the input of the last chunk on the last stage, with backward.
    """

    def __init__(
        self,
        ctx: ParallelContext,
        chunks: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        overlap: bool = True,
        group: int | None = None,
        forward_shape: tuple[int, ...] | None = None,
        lengths: int = 1,
    ):
        self._pp = ctx.pp
        self.chunks = chunks
        self._group = group
        self._overlap = overlap
        self.actions_done = 0  # since the start: how the rank monitor sees progress
        last_shape = (lengths * shape[0], *shape[1:])
        self._links, self._forward_links = (
            P2PLinks(ctx.pp, ctx.pp_gradients, *shapes, dtype, device, overlap, chunks)
            if ctx.pp.size > 1
            else None
            for shapes in ((shape, last_shape), (forward_shape or shape,) * 2)
        )

    def is_last(self, chunk: int) -> bool:
        """Whether this chunk of this stage computes the loss."""
        return self._pp.rank == self._pp.size - 1 and chunk == self.chunks - 1

    def play(self, micro_batches: int, forward: Forward, backward: Backward | None = None) -> None:
        """Forward and backward of that many micro-batches; without `backward` (and under no_grad)
        forward alone."""
        actions = stage_schedule(
            self._pp.rank,
            self._pp.size,
            micro_batches,
            self.chunks,
            backward is None,
            self._overlap,
            self._group,
        )
        links = self._links if backward else self._forward_links
        run_schedule(self._counted(actions), forward, backward, links)

    def _counted(self, actions: Schedule) -> Iterator[Action]:
        for action in actions:
            yield action
            self.actions_done += 1
