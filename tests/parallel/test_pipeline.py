"""The runner of schedules: what it calls, in which order, and that it keeps no activation longer than its list says."""
from __future__ import annotations

import gc
import weakref

import pytest
import torch

from megatron.parallel.pipeline import run_schedule
from megatron.parallel.schedules import Step, one_forward_one_backward


@pytest.mark.parametrize("stage, stages", [(0, 1), (0, 4), (2, 4)])
def test_steps_run_in_order_and_backward_gets_its_own_forward(stage, stages):
    said = []

    def forward(micro_batch: int) -> torch.Tensor:
        said.append(Step("forward", micro_batch))
        return torch.tensor(micro_batch)

    def backward(output: torch.Tensor) -> None:
        said.append(Step("backward", output.item()))

    steps = one_forward_one_backward(stage, stages, 5)
    run_schedule(iter(steps), forward, backward)
    assert said == steps


def test_an_output_is_let_go_after_its_backward():
    outputs: list[weakref.ref] = []
    alive = []

    def forward(micro_batch: int) -> torch.Tensor:
        output = torch.zeros(3)
        outputs.append(weakref.ref(output))
        return output

    def backward(output: torch.Tensor) -> None:
        gc.collect()
        alive.append(sum(reference() is not None for reference in outputs))

    run_schedule(one_forward_one_backward(0, 1, 4), forward, backward)
    assert alive == [1, 1, 1, 1]


def test_a_forgotten_backward_is_noticed():
    with pytest.raises(AssertionError, match=r"\[1\] had no backward"):
        run_schedule([Step("forward", 0), Step("forward", 1), Step("backward", 0)], torch.tensor, lambda output: None)
