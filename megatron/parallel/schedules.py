"""Pipeline schedules as pure functions from sizes to a list of steps. Knows no tensor and no process."""
from __future__ import annotations

from typing import NamedTuple


class Step(NamedTuple):
    """One thing a stage does: `forward` or `backward` of one micro-batch."""
    kind: str
    micro_batch: int


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> list[Step]:
    """1F1B (Narayanan et al. 2021): a stage keeps the activations of at most `stages - stage` micro-batches alive.

    With one stage that is forward and backward of each micro-batch in turn: gradient accumulation.
    """
    warm_up = min(stages - stage - 1, micro_batches)
    steps = [Step("forward", i) for i in range(warm_up)]
    for i in range(micro_batches - warm_up):
        steps += [Step("forward", warm_up + i), Step("backward", i)]
    return steps + [Step("backward", i) for i in range(micro_batches - warm_up, micro_batches)]
