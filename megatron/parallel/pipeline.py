"""The one runner of any schedule. Knows steps and two functions; no model, no loss, no data."""
from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from megatron.parallel.schedules import Step


def run_schedule(steps: Iterable[Step], forward: Callable[[int], torch.Tensor],
                 backward: Callable[[torch.Tensor], None]) -> None:
    """Do the steps in order: `forward(micro_batch)` gives the tensor that `backward` takes when its turn comes."""
    alive: dict[int, torch.Tensor] = {}
    for step in steps:
        if step.kind == "forward":
            alive[step.micro_batch] = forward(step.micro_batch)
        else:
            backward(alive.pop(step.micro_batch))
    assert not alive, f"micro-batches {sorted(alive)} had no backward step"
