"""Pipeline schedules played through without a tensor: nobody waits for ever, few activations live,
the bubble is right."""

from collections import Counter
from time import perf_counter

import pytest

from megatron.config.plan.schedules import (
    DEEP,
    SENDS_UNDER_WAY,
    Action,
    activations_alive,
    bubble_fraction,
    compute_order,
    messages_waiting,
    schedule,
    timetable,
    warm_up_forwards,
)
from tests import problems
from tests.core.parallel.simulated_links import RULES, Deadlock, NotMade, is_transfer, play

CHUNKS = range(1, 5)
COSTS = ((1, 1), (1, 2))  # seconds of a forward and of a backward of one chunk


def micro_batch_numbers(stages: int, chunks: int, every: bool) -> list[int]:
    """Numbers of micro-batches to try, up to 64; interleaving takes multiples of the stages
    only."""
    if chunks > 1:
        groups = range(1, 64 // stages + 1)
        return [stages * n for n in (groups if every else (1, 2)) if n in groups and stages > 1]
    return (
        list(range(1, 65))
        if every
        else sorted({1, 2, stages - 1, stages, stages + 1, 2 * stages + 1} - {0})
    )


def grid(stages: int, every: bool = False) -> list[tuple[int, int]]:
    """(micro-batches, chunks) that a pipeline of so many stages may run."""
    return [(m, chunks) for chunks in CHUNKS for m in micro_batch_numbers(stages, chunks, every)]


def bubble(
    seconds: float, micro_batches: int, chunks: int, forward: float, backward: float
) -> float:
    """Idle share of the ideal time."""
    return seconds / (micro_batches * chunks * (forward + backward)) - 1


def formulas(
    stage: int, stages: int, micro_batches: int, chunks: int, group: int | None
) -> tuple[int, float]:
    """(activations alive, bubble) of Narayanan et al. 2021, as Megatron counts them."""
    after = stages - stage - 1
    warm_up = after if chunks == 1 else 2 * after + (chunks - 1) * (group or stages)
    alive = min(warm_up + 1, micro_batches * chunks)
    return alive, (stages - 1) / (chunks * micro_batches)


def check_formulas(stages: int, micro_batches: int, chunks: int, group: int | None = None) -> None:
    """What is measured of a schedule is what the formulas say."""
    sizes = (stages, micro_batches, chunks, group)
    for stage in range(stages):
        alive, bubble = formulas(stage, *sizes)
        assert activations_alive(stage, *sizes) == alive, (stage, sizes)
        assert bubble_fraction(*sizes) == bubble, sizes


def most_waiting(steps: list[Action]) -> int:
    """The most received tensors that no computation has taken, while one computes; of the whole
    list."""
    most = waiting = 0
    taken = {("forward", "activation"), ("backward", "gradient")}
    received = {
        (kind, *step[1:3])
        for step in steps
        for kind, tensor in taken
        if step.kind == f"receive_{tensor}"
    }
    for step in steps:
        if is_transfer(step):
            waiting += step.kind.startswith("receive")
        else:
            waiting -= tuple(step[:3]) in received
            most = max(most, waiting)
    return most


def check_messages(
    stages: int, micro_batches: int, chunks: int, group: int | None = None, middle: int = 0
) -> None:
    """The messages of the whole list are those measured of fewer micro-batches; `middle`: how many
    more are measured of the stage in the middle, at most."""
    for overlap in (True, False):
        lists = schedule(stages, micro_batches, chunks, group=group, overlap=overlap)
        for stage, steps in enumerate(lists):
            waiting = max(1, most_waiting(steps)) + SENDS_UNDER_WAY * overlap if stages > 1 else 0
            measured = messages_waiting(stage, stages, micro_batches, chunks, group, overlap)
            more = middle if abs(2 * stage - stages) < 2 else 0
            assert waiting <= measured <= waiting + more, (stage, stages, micro_batches, chunks)


def groups_of(stages: int, micro_batches: int) -> list[int]:
    """Sizes of the groups in which an interleaved schedule may take so many micro-batches."""
    return [
        group
        for group in range(stages, micro_batches + 1)
        if not 0 < micro_batches % group < stages
    ]


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 5, 8])
def test_what_is_measured_of_few_micro_batches_is_true_of_all(stages):
    for micro_batches, chunks in grid(stages, every=stages < 5):
        check_formulas(stages, micro_batches, chunks)
        if micro_batches <= 6 * stages:
            check_messages(stages, micro_batches, chunks)


@pytest.mark.parametrize("stages", [2, 3, pytest.param(4, marks=pytest.mark.campaign)])
def test_what_is_measured_of_groups(stages):
    for chunks in (2, 3):
        for micro_batches in (*range(stages, 4 * stages + 2), 7 * stages + 1):
            for group in groups_of(stages, micro_batches):
                check_formulas(stages, micro_batches, chunks, group)
                check_messages(stages, micro_batches, chunks, group)


@pytest.mark.campaign
@pytest.mark.parametrize("stages", [DEEP + 1, DEEP + 17])
def test_what_is_measured_of_a_shallower_pipeline(stages):
    """What more stages add, against the whole list."""
    for sizes in ((40, 1, None), (5, 1, None), (2 * stages, 2, None)):
        check_formulas(stages, *sizes)
        check_messages(stages, *sizes)
    check_formulas(stages, stages, 3)
    check_messages(stages, stages, 3, middle=1)


def test_messages_by_the_old_formula_of_deep_pipelines():
    """Two in the middle; the gradients of the last stage's other chunks run ahead by a third of the
    stages."""
    for stages in (12, 13, 14, 24):
        for chunks in (2, 3):
            sizes = (stages, 2 * stages, chunks)
            waiting = [messages_waiting(s, *sizes) - SENDS_UNDER_WAY for s in range(stages)]
            assert waiting == [2] * (stages - 1) + [stages // 3]
    assert {messages_waiting(s, 12, 40) - SENDS_UNDER_WAY for s in range(12)} == {1}


def test_a_deep_pipeline_is_measured_at_once():
    """512 stages: no list of a million actions is made."""
    start = perf_counter()
    assert [activations_alive(stage, 512, 8192) for stage in (0, 511)] == [512, 1]
    assert [activations_alive(stage, 512, 8192, 4) for stage in (0, 511)] == [2559, 1537]
    assert bubble_fraction(512, 8192) == 511 / 8192
    assert bubble_fraction(512, 8192, 4) == 511 / 32768
    assert messages_waiting(3, 512, 8192) == 1 + SENDS_UNDER_WAY
    assert messages_waiting(511, 512, 8192, 4) == 170 + SENDS_UNDER_WAY
    assert perf_counter() - start < 20


def check_lists(stages: int, micro_batches: int, chunks: int) -> None:
    """Each (micro-batch, chunk) forward and backward once on each stage, the backward later; every
    tensor moved once."""
    want = {(m, chunk) for m in range(micro_batches) for chunk in range(chunks)}
    sent: Counter = Counter()
    for stage, steps in enumerate(schedule(stages, micro_batches, chunks)):
        computed = [step for step in steps if not is_transfer(step)]
        assert computed == compute_order(stage, stages, micro_batches, chunks)
        places = {step: i for i, step in enumerate(computed)}
        assert len(places) == len(computed) == 2 * len(want)
        assert all(
            places[Action("forward", *pair)] < places[Action("backward", *pair)] for pair in want
        )
        moved = Counter(step.kind for step in steps if is_transfer(step))
        assert all(
            step.peer
            == (stage + 1 if step.kind in ("send_activation", "receive_gradient") else stage - 1)
            % stages
            for step in steps
            if is_transfer(step)
        )
        inputs = len(want) - micro_batches * (stage == 0)
        outputs = len(want) - micro_batches * (stage == stages - 1)
        assert moved["receive_activation"] == moved["send_gradient"] == inputs
        assert moved["send_activation"] == moved["receive_gradient"] == outputs
        sent += moved
    assert (
        sent["send_activation"]
        == sent["receive_activation"]
        == micro_batches * (stages * chunks - 1)
    )


def check_playing(stages: int, micro_batches: int, chunks: int) -> None:
    """No deadlock under any rule; activations within the formula; the bubble of the formula where
    nothing blocks."""
    alive = [activations_alive(stage, stages, micro_batches, chunks) for stage in range(stages)]
    if chunks == 1:
        assert alive == [min(stages - stage, micro_batches) for stage in range(stages)]
    for overlap in (True, False):
        lists = schedule(stages, micro_batches, chunks, overlap=overlap)
        for rule in RULES:
            for forward, backward in COSTS:
                played = play(lists, chunks, rule, forward, backward)
                assert played.alive == alive
                assert max(played.waiting_inputs) <= (2 if chunks == 1 else 6)
                found = bubble(played.seconds, micro_batches, chunks, forward, backward)
                formula = bubble_fraction(stages, micro_batches, chunks)
                if overlap and (rule != "blocking" or chunks == 1):
                    assert found == pytest.approx(formula, rel=1e-9, abs=1e-12), (
                        rule,
                        forward,
                        backward,
                    )
                if not overlap:
                    assert formula - 1e-9 <= found <= 1.2 * formula, (rule, forward, backward)


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 7, 8, 16])
def test_every_micro_batch_passes_every_chunk_once(stages):
    for micro_batches, chunks in grid(stages):
        check_lists(stages, micro_batches, chunks)


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 5, 6, 8])
def test_no_deadlock_activations_and_bubble(stages):
    for micro_batches, chunks in grid(stages):
        if stages * micro_batches * chunks <= 500:
            check_playing(stages, micro_batches, chunks)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_groups_of_micro_batches(stages):
    """Larger groups than stages, the last one smaller: no deadlock, activations and bubble of the
    formulas."""
    for chunks in (2, 3):
        for micro_batches in range(stages, 3 * stages + 1):
            for group in groups_of(stages, micro_batches):
                check_group(stages, micro_batches, chunks, group)


def check_group(stages: int, micro_batches: int, chunks: int, group: int) -> None:
    """Play a schedule of groups of `group`."""
    alive = [activations_alive(s, stages, micro_batches, chunks, group) for s in range(stages)]
    for overlap in (True, False):
        lists = schedule(stages, micro_batches, chunks, overlap=overlap, group=group)
        order = [step for step in lists[0] if step.kind == "forward"]
        assert [step.micro_batch for step in order[:group]] == list(range(group))
        assert [step.chunk for step in order[: group + 1]] == [0] * group + [1]
        for rule in RULES:
            played = play(lists, chunks, rule, 1, 2)
            assert played.alive == alive
            if overlap and rule != "blocking":
                assert bubble(played.seconds, micro_batches, chunks, 1, 2) == pytest.approx(
                    bubble_fraction(stages, micro_batches, chunks, group)
                )


@pytest.mark.parametrize("stages, chunks", [(2, 2), (4, 2), (3, 3)])
def test_interleaving_hides_what_a_transfer_takes(stages, chunks):
    """Seconds lost to transfers of 2 % of a forward stay those of filling and draining, whatever
    the micro-batches."""
    lost = {}
    for overlap, rule in ((True, "pairs"), (False, "blocking")):
        for groups in (2, 8):
            lists = schedule(stages, groups * stages, chunks, overlap=overlap)
            fast, slow = (
                play(lists, chunks, rule, latency=latency).seconds for latency in (0, 0.02)
            )
            lost[overlap, groups] = slow - fast
    assert lost[True, 2] == pytest.approx(lost[True, 8], abs=1e-9)
    assert lost[False, 8] > 3 * lost[False, 2] > 3 * lost[True, 2]


@pytest.mark.parametrize(
    "stages, micro_batches, chunks",
    [(1, 3, 1), (2, 3, 1), (4, 8, 1), (2, 4, 2), (4, 8, 3), (7, 7, 2)],
)
def test_forward_only(stages, micro_batches, chunks):
    """Evaluation: no gradient moves, the pipeline is filled once."""
    lists = schedule(stages, micro_batches, chunks, forward_only=True)
    assert {step.kind for steps in lists for step in steps} <= {
        "forward",
        "send_activation",
        "receive_activation",
    }
    for rule in RULES:
        played = play(lists, chunks, rule)
        assert played.alive == [micro_batches * chunks] * stages
        assert played.seconds == micro_batches * chunks + stages - 1


def test_one_stage_is_gradient_accumulation():
    both = [
        Action("forward", 0),
        Action("backward", 0),
        Action("forward", 1),
        Action("backward", 1),
    ]
    assert compute_order(0, 1, 2) == both
    assert schedule(1, 2) == [both]


def test_interleaved_by_hand():
    """Figure 4 of Narayanan et al. 2021 in small: 2 stages, 2 chunks, 4 micro-batches, the last
    stage."""
    said = " ".join(
        f"{step.kind[0]}{step.micro_batch}{'ab'[step.chunk]}" for step in compute_order(1, 2, 4, 2)
    )
    assert said == "f0a f1a f0b b0b f1b b1b f2a b0a f3a b1a f2b b2b f3b b3b b2a b3a"
    assert [warm_up_forwards(stage, 4, 8, 2) for stage in range(4)] == [10, 8, 6, 4]
    assert [warm_up_forwards(stage, 4, 4, 2) for stage in range(4)] == [8, 8, 6, 4]


def test_transfers_by_hand():
    first, last = schedule(2, 2)
    assert first == [
        Action("forward", 0),
        Action("send_activation", 0, 0, 1),
        Action("forward", 1),
        Action("send_activation", 1, 0, 1),
        Action("receive_gradient", 0, 0, 1),
        Action("backward", 0),
        Action("receive_gradient", 1, 0, 1),
        Action("backward", 1),
    ]
    assert last == [
        Action("receive_activation", 0, 0, 0),
        Action("forward", 0),
        Action("receive_activation", 1, 0, 0),
        Action("backward", 0),
        Action("send_gradient", 0, 0, 0),
        Action("forward", 1),
        Action("backward", 1),
        Action("send_gradient", 1, 0, 0),
    ]


def test_a_chunk_hands_over_to_the_next_chunk_around_the_ring():
    first, last = schedule(2, 2, 2)
    assert (
        Action("send_activation", 0, 0, 0) in last
        and Action("receive_activation", 0, 1, 1) in first
    )
    assert Action("send_gradient", 0, 1, 1) in first and Action("receive_gradient", 0, 0, 0) in last


def test_timetable():
    orders = [compute_order(stage, 2, 2) for stage in range(2)]
    times = timetable([[(step,) for step in order] for order in orders], 1)
    assert times == [[(0, 1), (1, 2), (4, 6), (7, 9)], [(1, 2), (2, 4), (4, 5), (5, 7)]]


@pytest.mark.parametrize("forward_only", [False, True])
def test_micro_batches_that_do_not_fit(forward_only):
    with problems.raises(
        ValueError, "micro-batches-not-divisible-by-stages", "--pipeline-model-parallel-size", 6, 8
    ):
        schedule(4, 6, 2, forward_only=forward_only)


def test_virtual_stages_need_stages():
    with pytest.raises(ValueError, match="^2 virtual stages"):
        schedule(1, 4, 2)


FAULTS = {
    # the rank, where the step stands in its list, where it is put, what the player says
    "receives in another order": (1, 2, 0, AssertionError),
    "two that send to each other": (1, 7, 10, Deadlock),
    "a gradient that is not received": (0, 14, None, Deadlock),
    "an activation that is not sent": (0, 11, None, Deadlock),
    "a tensor sent before it is made": (0, 1, 0, NotMade),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_player_notices(fault):
    rank, at, to, error = FAULTS[fault]
    for rule in RULES if to is None else RULES[:1]:
        lists = [list(steps) for steps in schedule(2, 4)]
        step = lists[rank].pop(at)
        if to is not None:
            lists[rank].insert(to, step)
        with pytest.raises(error):
            play(lists, rule=rule)


def test_the_player_notices_a_late_backward():
    lists = schedule(1, 2)
    late = [
        Action("forward", 0),
        Action("forward", 1),
        Action("backward", 0),
        Action("backward", 1),
    ]
    assert play(lists).alive == [1] and play([late]).alive == [2]
