"""What is made of findings: ranges to skip, attempts, budgets, and what a checkpoint keeps of
that."""

import json
import math

import pytest

from megatron.checkpoint.filesystem import CheckpointError
from megatron.features.spikes.actions import EXIT_CODE, SpikeActions
from megatron.features.spikes.policy import Rollback, SpikePolicy
from megatron.training.launch.process import Refusal
from tests.features.spikes.injected import noisy
from tests.problems import raises


def fed(
    policy: SpikeActions, numbers: list[tuple[float, float]], first: int = 1
) -> list[Rollback | None]:
    """What `due` says after each iteration."""
    found = []
    for n, (loss, norm) in enumerate(numbers, first):
        policy.check(n, loss, norm)
        found.append(policy.due(10_000, n))
    return found


def test_what_is_skipped_begins_before_the_first_mark_and_ends_after_the_last():
    numbers = noisy(300)
    for n, more in {230: 0.045, 250: 1.0, 251: 0.8}.items():
        numbers[n - 1] = numbers[n - 1][0] + more, numbers[n - 1][1]
    policy = SpikeActions("rewind")
    due = fed(policy, numbers)
    marked = [n for n, one in enumerate(due, 1) if one]
    assert marked == [252] and due[251] == Rollback(1, 229, 252, 250)


def test_the_last_iteration_and_a_nan_are_not_waited_for():
    policy = SpikeActions("rewind")
    numbers = noisy(200)
    fed(policy, numbers[:150])
    policy.check(151, 5.0, 1.0)
    assert policy.due(200, 151) is None and policy.spike_open
    assert policy.due(151, 151) == Rollback(1, 150, 151, 151)
    policy.check(152, math.nan, 1.0)
    assert policy.due(200, 152) == Rollback(1, 150, 153, 151)


def test_an_event_elsewhere_is_a_first_attempt_again():
    policy = SpikeActions("rewind")
    numbers = noisy(910)
    for n in (300, 302, 701, 902):
        numbers[n - 1] = 5.0, 1.0
    attempts = []
    for n, (loss, norm) in enumerate(numbers, 1):
        policy.check(n, loss, norm)
        asked = policy.due(10_000, n)
        if asked:
            policy.rewinds.append(asked)
            attempts.append(asked)
    assert [(one.attempt, one.start, one.end) for one in attempts] == [
        (1, 299, 301),
        (2, 200, 500),
        (1, 700, 702),
        (2, 601, 903),
    ]
    with pytest.raises(Refusal) as caught:
        fed(policy, [(5.0, 1.0), (3.0, 1.0)], 1103)
    assert caught.value.code == EXIT_CODE and "skipped 700 to 702 and then 601 to 903" in str(
        caught.value
    )


def test_a_level_shift_is_no_reason_to_go_back_and_costs_one_of_the_budget():
    numbers = noisy(400)
    numbers[200:] = [(loss * 1.2, norm) for loss, norm in numbers[200:]]
    policy = SpikeActions("rewind")
    assert fed(policy, numbers) == [None] * 400
    assert policy.state_dict()["spent"] == [201]


def test_its_state_goes_through_json_and_on_and_an_empty_one_is_a_fresh_start():
    numbers = noisy(400)
    for n in (150, 151, 160, 161, 300, 320, 321):
        numbers[n - 1] = 3.6, 1.0
    whole = SpikeActions("rewind")
    states = []
    for n, (loss, norm) in enumerate(numbers, 1):
        states.append(json.dumps(whole.state_dict()))
        whole.check(n, loss, norm)
        asked = whole.due(10_000, n)
        whole.rewinds += [asked] if asked and asked.attempt == 1 else []
    for cut in (1, 100, 150, 151, 156, 320, 399):
        policy = SpikeActions("rewind")
        policy.check(1, math.nan, math.nan)  # which a load forgets
        policy.load_state_dict(json.loads(states[cut]))
        for n, (loss, norm) in enumerate(numbers[cut:], cut + 1):
            policy.check(n, loss, norm)
            asked = policy.due(10_000, n)
            policy.rewinds += [asked] if asked and asked.attempt == 1 else []
        assert policy.state_dict() == whole.state_dict(), cut
    policy.load_state_dict({})
    assert policy.state_dict() == SpikePolicy().state_dict()
    off = SpikePolicy("off")
    off.load_state_dict(whole.state_dict())
    assert off.state_dict() == {}


def test_a_state_that_was_given_does_not_change():
    """A save that is under way writes it later."""
    policy = SpikeActions("rewind")
    numbers = noisy(300)
    numbers[200] = 3.6, 1.0
    fed(policy, numbers[:201])
    state = policy.state_dict()
    before = json.dumps(state)
    fed(policy, numbers[201:] + [(math.nan, 1.0)], 202)
    assert json.dumps(state) == before != json.dumps(policy.state_dict())


@pytest.mark.parametrize("state", [{"detector": {}}, {"marks": []}, "text", 3, [1]])
def test_a_state_of_another_form_is_one_error(state):
    with raises(CheckpointError, "checkpoint-damaged"):
        SpikePolicy("log").load_state_dict(state)
