"""What a training run takes from its surroundings: signals, the clock, sums over the ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from megatron.parallel.collectives import all_reduce_
from megatron.training.launch.signals import SignalWatch


@dataclass(frozen=True)
class Services:
    """What the loop and the step call; a test gives its own.

    `signals.received` is the signal that asks the run to stop, `clock()` the time in seconds,
    `all_reduce(tensor, axis, op="sum")` works in place and returns the tensor.
    """

    signals: SignalWatch = field(default_factory=SignalWatch)
    clock: Callable[[], float] = time.time
    all_reduce: Callable[..., torch.Tensor] = all_reduce_
