"""Batch sizes, micro-batches and S(n) against golden numbers and against walking iteration by
iteration."""

import random
import time

import pytest

from megatron.config.plan.batch_ramps import parse_step_schedule
from megatron.config.plan.batch_size import build_batch_size_schedule
from tests.problems import assert_problem, raises

GOLDEN_RAMP = {
    "micro_batch_size": 4,
    "data_parallel_size": 2,
    "global_batch_size": 64,
    "rampup_batch_size": [16, 8, 300],
}


def build(**values):
    return build_batch_size_schedule(**{"micro_batch_size": 1, **values})


def walk(schedule, iterations):
    """S(n - 1) for n = 1 .. iterations, by adding up one batch after the other."""
    consumed = 0
    found = []
    for _ in range(iterations):
        found.append(consumed)
        consumed += schedule.global_batch_size(consumed)
    return found


def test_constant_sizes_of_the_seed():
    schedule = build(micro_batch_size=4, global_batch_size=8)
    assert schedule.is_constant
    assert (schedule.global_batch_size(0), schedule.num_microbatches(10**9)) == (8, 2)
    assert schedule.lines() == ["setting number of micro-batches to constant 2"]
    assert [schedule.samples_before(n) for n in (1, 2, 1001)] == [0, 8, 8000]
    assert (schedule.train_iters_from_samples(8007), schedule.iterations_within(8000)) == (
        1000,
        1000,
    )
    assert schedule.problems() == []


def test_without_a_size_every_rank_takes_one_micro_batch():
    schedule = build(micro_batch_size=3, data_parallel_size=4)
    assert schedule.lines() == [
        "setting global batch size to 12",
        "setting number of micro-batches to constant 1",
    ]


def test_rampup_golden_numbers():
    schedule = build(**GOLDEN_RAMP)
    got = {
        c: (schedule.global_batch_size(c), schedule.num_microbatches(c))
        for c in (0, 50, 100, 150, 300)
    }
    assert got == {0: (16, 2), 50: (24, 3), 100: (32, 4), 150: (40, 5), 300: (64, 8)}
    assert schedule.global_batch_size(49) == 16 and schedule.global_batch_size(299) == 56
    assert schedule.lines()[0] == (
        "will use batch size rampup starting from global batch size 16 to global batch size 64 "
        "with batch size increments 8 over 300 samples."
    )
    assert len(schedule.lines()) == 1 + len(schedule.phases)


def test_rampup_thresholds_are_those_of_the_floating_point_rule():
    """START + INC int(c / (SAMPLES / increments)) at every c, also where SAMPLES / p is a hair off
    a whole number."""
    for samples in range(1, 45):
        for increments in range(1, 45):
            schedule = build(global_batch_size=1 + increments, rampup_batch_size=[1, 1, samples])
            per_increment = samples / increments
            for consumed in range(samples + 3):
                expected = 1 + (increments if consumed > samples else int(consumed / per_increment))
                assert schedule.global_batch_size(consumed) == expected, (
                    samples,
                    increments,
                    consumed,
                )


def test_a_batch_keeps_the_size_it_began_with():
    assert [build(**GOLDEN_RAMP).samples_before(n) for n in range(1, 14)] == [
        0,
        16,
        32,
        48,
        64,
        88,
        112,
        144,
        176,
        216,
        264,
        320,
        384,
    ]


def random_schedules(count, seed=0):
    rng = random.Random(seed)
    for _ in range(count):
        kind = rng.choice(["constant", "rampup", "steps", "decrease", "rampup-decrease"])
        mbs = rng.randint(1, 4)
        dp = rng.randint(1, 4)
        values = {"micro_batch_size": mbs, "data_parallel_size": dp}
        if kind == "constant":
            values["global_batch_size"] = rng.randint(1, 200)
        elif kind == "decrease":
            values.update(
                global_batch_size=rng.randint(mbs * dp, 200), decrease_batch_size_if_needed=True
            )
        elif kind == "steps":
            at = sorted(rng.sample(range(1, 2000), rng.randint(0, 5)))
            values["step_batch_size_schedule"] = " ".join(
                f"{t}:{rng.randint(1, 90)}" for t in [0, *at]
            )
        else:
            start = rng.randint(1, 40)
            increment = rng.randint(1, 20)
            count_ = rng.randint(0, 9)
            if kind == "rampup-decrease":
                start = rng.randint(mbs * dp, 40)
                values["decrease_batch_size_if_needed"] = True
            values.update(
                global_batch_size=start + increment * count_,
                rampup_batch_size=[start, increment, rng.randint(1, 3000)],
            )
        yield build_batch_size_schedule(**values)


def test_closed_forms_equal_walking_on_random_schedules():
    for schedule in random_schedules(300):
        walked = walk(schedule, 200)
        assert [schedule.samples_before(n) for n in range(1, 201)] == walked
        for samples in random.Random(1).sample(range(walked[-1]), min(40, walked[-1])):
            n = schedule.iterations_within(samples)
            assert schedule.samples_before(n + 1) <= samples < schedule.samples_before(n + 2)


def test_a_million_iterations_are_quick():
    schedule = build(micro_batch_size=1, global_batch_size=4096, rampup_batch_size=[16, 16, 10**8])
    begin = time.process_time()
    samples = [schedule.samples_before(n) for n in range(1, 1_000_001, 100)]
    assert samples[-1] > 10**8 and time.process_time() - begin < 10
    assert build(global_batch_size=8).samples_before(10**15) == 8 * (10**15 - 1)


def megatrons_rampup_iterations(start, increment, ramp, size, train_samples):
    """Megatron's count: simulate the ramp, then whole batches of the final
    size."""
    per_increment = ramp / ((size - start) // increment)
    consumed = iterations = 0
    while consumed <= ramp:
        consumed += start + increment * int(consumed / per_increment)
        iterations += 1
    return iterations + (train_samples - consumed) // size, consumed


def test_train_iters_of_a_rampup_are_megatrons():
    rng = random.Random(2)
    for _ in range(200):
        start = rng.randint(1, 50)
        increment = rng.randint(1, 20)
        count = rng.randint(1, 9)
        ramp = rng.randint(1, 5000)
        size = start + increment * count
        train_samples = rng.randint(ramp, 20 * ramp + 20000)
        expected, ramp_end = megatrons_rampup_iterations(
            start, increment, ramp, size, train_samples
        )
        schedule = build(global_batch_size=size, rampup_batch_size=[start, increment, ramp])
        if train_samples >= ramp_end:
            assert schedule.train_iters_from_samples(train_samples) == expected
        iterations = schedule.train_iters_from_samples(train_samples)
        assert schedule.samples_before(iterations + 1) <= train_samples


def test_train_iters_of_a_step_schedule_reach_the_target():
    schedule = build(step_batch_size_schedule="0:4 10:8")
    assert [schedule.train_iters_from_samples(n) for n in (1, 4, 5, 12, 13, 20, 21)] == [
        1,
        1,
        2,
        3,
        4,
        4,
        5,
    ]


def test_step_schedule_grammar():
    assert parse_step_schedule("0:768 250B:1536, 500B:3072", 2048) == [
        (0, 768),
        (250 * 10**9 // 2048, 1536),
        (500 * 10**9 // 2048, 3072),
    ]
    assert parse_step_schedule(" 1.5k:2K,0:1k ") == [(0, 1000), (1500, 2000)]
    assert parse_step_schedule("0:1 2e3:2 3T:3 4m:4") == [
        (0, 1),
        (2000, 2),
        (4 * 10**6, 4),
        (3 * 10**12, 3),
    ]
    schedule = build(step_batch_size_schedule="0:8 1K:16", seq_length=10)
    assert [schedule.global_batch_size(c) for c in (0, 99, 100, 10**9)] == [8, 8, 16, 16]
    assert schedule.final_global_batch_size == 16


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("", []),
        ("100", ["100 "]),
        ("0:x 5:-1", ["0:x ", "5:-1 "]),
        ("0:0", ["0:0 "]),
        ("5:8", ["5 samples"]),
        ("0:8 7:16 7:32", ["7 samples"]),
        ("0:8 inf:16", ["inf:16 "]),
        ("0:8:9", ["0:8:9 "]),
    ],
)
def test_bad_step_schedules(text, entries):
    with raises(ValueError, "step-schedule-malformed", "--step-batch-size-schedule", *entries):
        build(step_batch_size_schedule=text)


RAMP = "rampup_batch_size"
FULL = {"global_batch_size": 64}


@pytest.mark.parametrize(
    ("values", "code", "named"),
    [
        ({"micro_batch_size": 0}, "value-out-of-range", "--micro-batch-size 0"),
        ({"micro_batch_size": None}, "value-out-of-range", "--micro-batch-size None"),
        ({"global_batch_size": 0}, "value-out-of-range", "--global-batch-size 0"),
        ({**FULL, RAMP: [16, 8]}, "batch-ramp-malformed", "--rampup-batch-size 16 8"),
        ({**FULL, RAMP: ["a", 8, 1]}, "batch-ramp-malformed", "--rampup-batch-size a 8 1"),
        ({**FULL, RAMP: [16, 9, 300]}, "batch-ramp-increment-does-not-fit", "48"),
        ({**FULL, RAMP: [65, 8, 300]}, "batch-ramp-starts-too-high", "--global-batch-size 64"),
        ({**FULL, RAMP: [16, 0, 300]}, "value-out-of-range", "INCREMENT"),
        ({**FULL, RAMP: [16, 8, -1]}, "value-out-of-range", "SAMPLES"),
        ({**FULL, RAMP: [16, 8, 0]}, "value-out-of-range", "SAMPLES"),
        (
            {"micro_batch_size": 4, "global_batch_size": 3, "decrease_batch_size_if_needed": True},
            "batch-smaller-than-micro-batches",
            "--global-batch-size",
        ),
        (
            {"step_batch_size_schedule": "0:8", "global_batch_size": 16},
            "flags-exclude-each-other",
            "--global-batch-size",
        ),
        (
            {"step_batch_size_schedule": "0:8", RAMP: [1, 1, 1]},
            "flags-exclude-each-other",
            "--rampup-batch-size",
        ),
        (
            {"step_batch_size_schedule": "0:8", "decrease_batch_size_if_needed": True},
            "flags-exclude-each-other",
            "--decrease-batch-size-if-needed",
        ),
    ],
)
def test_bad_values_name_their_flag(values, code, named):
    with raises(ValueError, code, named):
        build(**values)


def test_a_ramp_from_the_full_size_is_constant():
    schedule = build(global_batch_size=64, rampup_batch_size=[64, 8, 300])
    assert schedule.is_constant and schedule.global_batch_size(0) == 64


def test_sizes_that_do_not_divide_are_problems_with_a_remedy():
    schedule = build(micro_batch_size=4, data_parallel_size=2, global_batch_size=10)
    (problem,) = schedule.problems()
    assert_problem(
        problem, "batch-not-divisible", "--global-batch-size", "(10)", "(4)", "(2)", "8 or 16"
    )
    with raises(ValueError, "batch-not-divisible"):
        schedule.num_microbatches(0)


def test_only_sizes_still_to_come_are_problems():
    ramp = build(
        micro_batch_size=8,
        data_parallel_size=2,
        global_batch_size=64,
        rampup_batch_size=[16, 8, 300],
    )
    assert [problem.split("(")[1].split(")")[0] for problem in ramp.problems()] == [
        "24",
        "40",
        "56",
    ]
    assert [ramp.problems(264)[0].split("(")[1].split(")")[0], len(ramp.problems(264))] == ["56", 1]
    assert ramp.problems(320) == []


def test_decreasing_rounds_the_running_size_and_keeps_the_nominal_one():
    schedule = build(
        micro_batch_size=4,
        data_parallel_size=3,
        global_batch_size=32,
        decrease_batch_size_if_needed=True,
    )
    assert (schedule.global_batch_size(0), schedule.nominal_global_batch_size(0)) == (24, 32)
    assert (schedule.num_microbatches(0), schedule.samples_before(11), schedule.problems()) == (
        2,
        240,
        [],
    )
    assert schedule.train_iters_from_samples(250) == 10
    assert schedule.lines()[0].startswith("decreasing batch size from 32 to 24")
    exact = build(
        micro_batch_size=4,
        data_parallel_size=2,
        global_batch_size=32,
        decrease_batch_size_if_needed=True,
    )
    assert exact.lines() == ["setting number of micro-batches to constant 4"]


def test_iterations_start_at_one():
    with pytest.raises(ValueError, match="not 0"):
        build(global_batch_size=8).samples_before(0)
