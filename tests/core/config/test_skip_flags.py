"""The skip flags: all rules that need no ledger, and look-ups against a
plain set."""

import random
import time

import pytest

from megatron.config.plan.batch_size import build_batch_size_schedule
from megatron.config.skip_flags import describe, parse_skips
from tests.problems import assert_problem, codes_of, raises


def problems(*values, train_iters=1000, **more):
    with pytest.raises(ValueError) as caught:
        parse_skips(list(values), train_iters, **more)
    return str(caught.value).split("\n")


def parse(*values, train_iters=1000, **more):
    return parse_skips(list(values), train_iters, **more)


def test_both_ends_are_inclusive_and_pairs_go_by_position():
    skips, warnings, infos = parse("10", "20", "25", "30")
    assert skips.ranges == ((10, 20), (25, 30))
    assert [n for n in range(1, 40) if skips.is_skipped(n)] == [*range(10, 21), *range(25, 31)]
    assert warnings == []
    assert infos == ["skipping 17 iterations: --train-range-to-skip 10 20 25 30"]


BAD = [
    ([], "value-missing", ""),
    (["ten", "20"], "value-malformed", "ten"),
    (["10-20"], "value-malformed", "10 20"),
    (["10..20"], "value-malformed", "10 20"),
    (["10:20"], "value-malformed", "10 20"),
    (["1e3", "2000"], "value-malformed", "1000"),
    (["1_0", "20"], "value-malformed", "10"),
    (["2k", "2000"], "value-malformed", "2000"),
    (["1.5", "20"], "value-malformed", "1.5"),
    (["nan", "20"], "value-malformed", "nan"),
    (["", "20"], "value-malformed", ""),
    (["9" * 5000, "20"], "value-malformed", "9" * 5000),
    (["10", "20", "30"], "skip-range-incomplete", "30 30"),
    (["20", "10"], "skip-range-reversed", "10 20"),
    (["-5", "3"], "skip-before-first-iteration", "1 3"),
    (["0", "3"], "skip-before-first-iteration", "1 3"),
    (["-5", "-3"], "skip-before-first-iteration", "-5 -3"),
    (["1001", "1005"], "skip-after-last-iteration", "1001 1005"),
    (["1", "1000"], "skip-leaves-nothing-to-train", "1000"),
    (["1", "500", "501", "2000"], "skip-leaves-nothing-to-train", "1000"),
]


@pytest.mark.parametrize(("values", "code", "remedy"), BAD, ids=[row[1] for row in BAD])
def test_bad_values_are_one_line_each(values, code, remedy):
    [line] = problems(*values)
    assert_problem(line, code, "--train-range-to-skip", remedy)


def test_all_problems_come_together():
    found = problems("20", "10", "0", "5", "2000", "2001", "7", iterations_to_skip=["1e2", "x"])
    assert len(found) == 6
    expected = [
        ("value-malformed", "1e2"),
        ("value-malformed", "x"),
        ("skip-range-incomplete", "7"),
        ("skip-range-reversed", "20 10"),
        ("skip-before-first-iteration", "0 5"),
        ("skip-after-last-iteration", "2000 2001"),
    ]
    for line, (code, value) in zip(found, expected, strict=True):
        assert_problem(line, code, value)
    assert all("--iterations-to-skip" in line for line in found[:2])


def test_a_thousand_problems_are_counted_not_listed():
    found = problems(*(["5", "3"] * 1000))
    assert len(found) == 21 and set(codes_of(found[:20])) == {"skip-range-reversed"}
    assert " 980 " in found[-1]


@pytest.mark.parametrize(
    ("values", "ranges"),
    [
        (["5", "5"], ((5, 5),)),
        (["25", "30", "10", "20"], ((10, 20), (25, 30))),
        (["10", "20", "10", "20"], ((10, 20),)),
        (["10", "20", "21", "30"], ((10, 30),)),
        (["21", "30", "10", "20", "32", "33"], ((10, 30), (32, 33))),
        (["5", "5", "6", "6", "7", "7"], ((5, 7),)),
    ],
)
def test_order_repetition_and_neighbours_are_normalised_with_an_info_line(values, ranges):
    skips, warnings, infos = parse(*values)
    assert (skips.ranges, warnings, len(infos)) == (ranges, [], 1)


def test_overlaps_merge_with_a_warning_that_names_both():
    skips, warnings, _ = parse(
        "10", "20", "15", "25", "24", "26", "24", "26", "100", "110", "102", "103"
    )
    assert skips.ranges == ((10, 26), (100, 110))
    both = [("10 20", "15 25"), ("15 25", "24 26"), ("100 110", "102 103")]
    for line, ranges in zip(warnings, both, strict=True):
        assert_problem(line, "skip-ranges-overlap", *ranges)


def test_the_end_of_training_cuts_a_range_with_a_warning():
    skips, warnings, _ = parse("990", "2000")
    assert skips.ranges == ((990, 1000),)
    [line] = warnings
    assert_problem(line, "skip-range-cut", "990 2000", "990 1000")
    assert parse("990", "2000", train_iters=None)[0].ranges == ((990, 2000),)


def test_single_iterations_join_the_union():
    skips, warnings, _ = parse("10", "12", iterations_to_skip=["13", 20, "11"])
    assert skips.ranges == ((10, 13), (20, 20))
    [line] = warnings
    assert_problem(line, "skip-ranges-overlap", "10 12", "11 11")
    assert parse_skips(None, 100, iterations_to_skip=[3])[0].ranges == ((3, 3),)
    with raises(ValueError, "skip-after-last-iteration", "--iterations-to-skip 1001"):
        parse_skips(None, 1000, iterations_to_skip=[1001])
    with raises(ValueError, "value-missing", "--iterations-to-skip"):
        parse_skips(None, 1000, iterations_to_skip=[])


def test_more_than_five_percent_warns_with_what_it_costs():
    batches = build_batch_size_schedule(
        micro_batch_size=1, global_batch_size=8, rampup_batch_size=[2, 2, 8]
    )
    assert parse("951", "1000")[1] == []
    [line] = parse("950", "1000")[1]
    assert_problem(line, "skip-large-share", "51 of 1000", "5.1 %")
    [line] = parse(
        "2", "3", "6", "7", train_iters=10, samples_in=batches.samples_in, seq_length=128
    )[1]
    assert_problem(line, "skip-large-share", "4 of 10", "40.0 %", "22 samples", "2816 tokens")


def test_nothing_left_after_a_resume():
    skips = parse("501", "1000")[0]
    assert [skips.nothing_to_train(done, 1000) for done in (499, 500, 750, 1000)] == [
        False,
        True,
        True,
        False,
    ]


def test_look_ups_equal_a_plain_set_on_random_ranges():
    rng = random.Random(0)
    for _ in range(200):
        values = []
        for _ in range(rng.randint(1, 8)):
            first = rng.randint(1, 60)
            values += [first, first + rng.randint(0, 12)]
        skips = parse(*values)[0]
        plain = {
            n
            for first, last in zip(values[::2], values[1::2], strict=True)
            for n in range(first, last + 1)
        }
        assert {n for n in range(0, 90) if skips.is_skipped(n)} == plain
        assert all(
            last + 1 < first
            for (_, last), (first, _) in zip(skips.ranges, skips.ranges[1:], strict=False)
        )
        for _ in range(20):
            low = rng.randint(0, 80)
            high = rng.randint(0, 80)
            assert skips.count_in(low, high) == len([n for n in plain if low <= n <= high])
        for n in plain:
            first, last = skips.containing(n)
            assert first <= n <= last and (first, last) in skips.ranges


def test_a_hundred_thousand_ranges():
    firsts = [10 * i + 1 for i in range(100_000)]
    random.Random(0).shuffle(firsts)
    values = [str(value) for first in firsts for value in (first, first + 2)]
    begin = time.process_time()
    skips = parse_skips(values, 10**6)[0]
    assert len(skips.ranges) == 100_000
    assert sum(skips.is_skipped(n) for n in range(1, 200_001)) == 60_000
    assert time.process_time() - begin < 60  # a walk over the ranges at each look would take hours
    assert "(100000 ranges)" in describe(skips) and len(describe(skips)) < 400
