"""Pipeline schedules played through without a tensor: nobody waits for ever, few activations live."""
from __future__ import annotations

import pytest

from megatron.parallel.schedules import Step, one_forward_one_backward

STAGES, MICRO_BATCHES = range(1, 9), range(1, 20)
FORWARD, BACKWARD = 1.0, 2.0                 # seconds a stage takes for one step


def play(stages: int, micro_batches: int) -> tuple[float, list[int]]:
    """(time of the last step's end, most activations alive on each stage).

    A forward needs that of the stage before, a backward that of the stage after and its own forward. Each stage does
    its list in order; if no stage can go on, AssertionError.
    """
    lists = [one_forward_one_backward(stage, stages, micro_batches) for stage in range(stages)]
    done: dict[tuple[str, int, int], float] = {}
    clock, at, alive, most = [0.0] * stages, [0] * stages, [0] * stages, [0] * stages
    while any(at[s] < len(lists[s]) for s in range(stages)):
        moved = False
        for s in range(stages):
            while at[s] < len(lists[s]):
                kind, m = lists[s][at[s]]
                needs = [("forward", s - 1, m)] if kind == "forward" else [("forward", s, m), ("backward", s + 1, m)]
                needs = [need for need in needs if 0 <= need[1] < stages]
                if not all(need in done for need in needs):
                    break
                start = max([clock[s], *(done[need] for need in needs)])
                clock[s] = done[kind, s, m] = start + (FORWARD if kind == "forward" else BACKWARD)
                alive[s] += 1 if kind == "forward" else -1
                most[s] = max(most[s], alive[s])
                at[s] += 1
                moved = True
        assert moved, f"{stages} stages, {micro_batches} micro-batches: all wait at {at}"
    assert alive == [0] * stages
    return max(clock), most


@pytest.mark.parametrize("stages", STAGES)
def test_1f1b(stages):
    """No deadlock; at most stages - stage activations; the time of a pipeline that is filled and drained once."""
    for micro_batches in MICRO_BATCHES:
        seconds, most = play(stages, micro_batches)
        assert most == [min(stages - stage, micro_batches) for stage in range(stages)]
        assert seconds == (micro_batches + stages - 1) * (FORWARD + BACKWARD)


@pytest.mark.parametrize("stages", STAGES)
def test_every_step_once_and_in_order(stages):
    for micro_batches in MICRO_BATCHES:
        for stage in range(stages):
            steps = one_forward_one_backward(stage, stages, micro_batches)
            for kind in ("forward", "backward"):
                assert [s.micro_batch for s in steps if s.kind == kind] == list(range(micro_batches))
            assert len(steps) == 2 * micro_batches


def test_one_stage_is_gradient_accumulation():
    assert one_forward_one_backward(0, 1, 2) == [
        Step("forward", 0), Step("backward", 0), Step("forward", 1), Step("backward", 1)]


def test_warm_up_of_the_first_of_three_stages():
    kinds = [step.kind[0] for step in one_forward_one_backward(0, 3, 4)]
    assert "".join(kinds) == "fffbfbbb"
