"""The exponential moving average of the main weights: kept beside each of them, updated after each
update, and put in the model's weights for a validation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from megatron import device as devices
from megatron.training.hook import Hook
from megatron.training.result import IterationResult
from megatron.training.run import Run

NAME = "ema"
CHUNK = 2**24  # elements that are on the device at a time, of an average in host memory


@torch.no_grad()
def start(run: Run, on_host: bool) -> None:
    """Let the optimizer keep a copy of each main weight, from which the average starts."""
    make = devices.pinned_copy if on_host else torch.clone
    run.optimizer.kept[NAME] = [make(main.detach()) for _, main in run.optimizer.weights]


@torch.no_grad()
def update(run: Run, decay: float) -> None:
    """decay x average + (1 - decay) x weights, without a wait for the device."""
    averages = run.optimizer.kept[NAME]
    weights = [main.detach() for _, main in run.optimizer.weights]
    together = averages and averages[0].device == weights[0].device  # a rank may own none
    move = move_towards if together else move_on_device
    move(averages, weights, 1.0 - decay)


def move_towards(averages: list[torch.Tensor], weights: list[torch.Tensor], part: float) -> None:
    """Move each average by this part of its distance from the weight."""
    torch._foreach_lerp_(averages, weights, part)


def move_on_device(averages: list[torch.Tensor], weights: list[torch.Tensor], part: float) -> None:
    """As `move_towards`, of averages in pinned host memory. The device of the weights computes it,
    so the bits are the same; all of it is queued there behind the update."""
    for average, weight in zip(averages, weights, strict=True):
        pairs = zip(average.view(-1).split(CHUNK), weight.view(-1).split(CHUNK), strict=True)
        for held, of_weight in pairs:
            there = held.to(weight.device, non_blocking=True)
            torch._foreach_lerp_([there], [of_weight], part)
            held.copy_(there, non_blocking=True)


@contextmanager
def in_the_model(run: Run, others: Sequence[torch.Tensor]) -> Iterator[bool]:
    """The model has these instead of its main weights while this is open; then its weights again,
    bit for bit."""
    _exchange(run, others, back=False)
    try:
        yield True
    finally:
        _exchange(run, others, back=True)


@torch.no_grad()
def _exchange(run: Run, others: Sequence[torch.Tensor], back: bool) -> None:
    """Put the others, or `back` the main weights, in the parameters. A parameter that is its main
    weight changes places with the other, so that nothing needs a copy of all."""
    run.buffers.gathering.wait()
    for (param, main), other in zip(run.optimizer.weights, others, strict=True):
        if param.data_ptr() != main.data_ptr():
            param.copy_(main if back else other)
            continue
        held = param.clone()
        param.copy_(other)
        other.copy_(held)
    run.buffers.gathering.start()
    run.buffers.gathering.wait()


class WeightAverage(Hook):
    """Updates the average after each update of the weights."""

    before = ("RollbackBuffer",)  # whose snapshots have it

    def __init__(self, run: Run, decay: float):
        self._run = run
        self._decay = decay

    def after_step(self, result: IterationResult) -> None:
        if result.skipped is None:
            update(self._run, self._decay)

    def before_save(self) -> None:
        """Host memory is read without the device's stream."""
        devices.synchronize(self._run.runtime.device)
