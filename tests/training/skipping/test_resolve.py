"""What a resume makes of ranges to skip: all rules of resuming, from numbers
alone."""

from __future__ import annotations

import dataclasses
import functools
import random

import pytest

from megatron.checkpoint.skip_log import SkipRecord
from megatron.config import command_line
from megatron.config.plan.plan import make_plan
from megatron.config.skip_ranges import SkipRanges
from megatron.training.skipping.resolve import Position, Recorded, Resolution, resolve
from tests.problems import assert_problem

WORDS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --mock-data --vocab-size 100 --micro-batch-size 2 --lr 0.003 "
    "--device cpu"
).split()


@functools.cache
def plan(size: int = 8, iterations: int = 100):
    words = [*WORDS, "--global-batch-size", str(size), "--train-iters", str(iterations)]
    return make_plan(command_line.read(words, {}).config, 1, 100)


def record(a: int, b: int, size: int = 8, reason: str = "user") -> SkipRecord:
    return SkipRecord(
        f"{a}-{b}",
        a,
        b,
        (a - 1) * size,
        b * size,
        (b - a + 1) * size * 32,
        reason,
        "test",
        "now",
        "0",
    )


def judged(
    typed=(),
    records=(),
    at: int = 0,
    executed=(),
    forget=(),
    checkpoints=(),
    size: int = 8,
    consumed: int | None = None,
    iterations: int = 100,
) -> Resolution:
    recorded = Recorded(
        {one.id: one for one in records}, {one.id: "F" for one in records}, checkpoints, "D"
    )
    place = Position(at, 8 * at if consumed is None else consumed, executed)
    return resolve(plan(size, iterations), SkipRanges(typed), forget, recorded, place)


def test_a_first_start_records_what_is_typed():
    found = judged([(10, 20), (30, 30)])
    assert (found.problems, found.skips.ranges, found.new) == (
        [],
        ((10, 20), (30, 30)),
        [(10, 20), (30, 30)],
    )
    assert found.notes == [
        "iterations to skip: 10-20 (user, command line, new), 30-30 (user, command line, new)"
    ]


def test_recorded_and_typed_are_joined():
    found = judged([(10, 20), (40, 41)], [record(10, 20), record(30, 35, reason="spike")], at=5)
    assert (
        found.skips.ranges == ((10, 20), (30, 35), (40, 41))
        and found.new == [(40, 41)]
        and not found.problems
    )
    assert found.notes == [
        "iterations to skip: 10-20 (user, F), 30-35 (spike, F), 40-41 (user, command line, new)"
    ]
    assert list(found.kept) == ["10-20", "30-35"]


@pytest.mark.parametrize("at", [10, 12, 20, 25])
def test_the_past_that_was_skipped_is_silent(at):
    """In and behind the range, typed again or not; an older checkpoint has no record of it."""
    for typed, records in (
        ([(10, 20)], [record(10, 20)]),
        ([(10, 20)], []),
        ([], [record(10, 20)]),
    ):
        found = judged(typed, records, at=at, executed=[[10, min(at, 20)]])
        assert found.problems == [] and found.skips.ranges == (
            ((10, 20),) if at < 20 or records else ((10, 20),)
        )
        assert found.new == ([(10, 20)] if not records and at < 20 else [])


@pytest.mark.parametrize(
    ("at", "executed"), [(10, []), (25, []), (25, [[10, 15]]), (25, [[11, 20]]), (15, [[10, 14]])]
)
def test_the_past_that_was_trained_is_refused(at, executed):
    last = min(at, 20)
    named = (f"10 to {last}", f"iteration {at}", "--ckpt-step 9")
    [line] = judged([(10, 20)], at=at, executed=executed, checkpoints=[3, 9, 10, 25]).problems
    assert_problem(line, "skip-already-trained", "--train-range-to-skip 10 20", *named)
    [line] = judged(
        [], [record(10, 20)], at=at, executed=executed, checkpoints=[3, 9, 10, 25]
    ).problems
    assert_problem(line, "skip-already-trained", "F: 10-20", "--forget-skip 10-20", *named)
    [line] = judged([(10, 20)], at=at, checkpoints=[10]).problems
    assert_problem(line, "skip-already-trained", "D has no checkpoint", "without --load")
    assert judged([], [record(10, 20)], at=at, executed=executed, forget=["10-20"]).problems == []


def test_forgetting():
    recorded = [record(10, 20), record(15, 30)]
    found = judged([], recorded, at=5, forget=["10-20"])
    assert (found.problems, found.forgotten, found.skips.ranges) == ([], ["10-20"], ((15, 30),))
    assert found.notes[0] == "F: 10-20 is forgotten (--forget-skip)"
    inside = judged([], recorded[:1], at=15, executed=[[10, 15]], forget=["10-20"])
    assert (inside.problems, inside.skips.ranges) == ([], ())
    assert_problem(
        judged([], recorded, forget=["1-2"]).problems[0],
        "skip-id-unknown",
        "--forget-skip 1-2",
        "10-20, 15-30",
    )
    assert_problem(
        judged([], [], forget=["1-2"]).problems[0], "skip-id-unknown", "--forget-skip 1-2"
    )
    [line] = judged([(20, 22)], recorded[:1], forget=["10-20"]).problems
    assert_problem(line, "flags-exclude-each-other", "--forget-skip 10-20", "--train-range-to-skip")
    done = judged([], recorded[:1], at=40, executed=[[10, 20]], checkpoints=[9], forget=["10-20"])
    assert_problem(
        done.problems[0],
        "skip-already-done",
        "--forget-skip 10-20",
        "iteration 40",
        "--ckpt-step 9",
    )


def test_forgetting_again_is_no_error():
    """The same command line must do after a restart."""
    recorded = Recorded({}, {"10-20": "F"}, [], "D")
    assert resolve(plan(), SkipRanges(), ["10-20"], recorded, Position(15, 120)).problems == []


def test_other_batch_sizes():
    """Whole iterations are found again, parts are refused; what is behind does not matter."""
    # iteration 5 begins at sample 32, 11-20 at 80
    found = judged([], [record(11, 20)], at=4, size=16, consumed=32)
    assert (
        found.problems == []
        and found.moved == [("11-20", "user", (8, 12))]
        and found.skips.ranges == ((8, 12),)
    )
    assert "F: 11-20 is iterations 8 to 12 now, since batch sizes have changed" in found.notes
    found = judged([], [record(12, 20)], at=4, size=16, consumed=32)
    remedy = "--forget-skip 12-20 --train-range-to-skip 8 12"
    assert_problem(
        found.problems[0], "skip-record-not-applicable", "F: 12-20", "88 to 159", "8 to 12", remedy
    )
    assert judged([], [record(12, 20)], at=4, size=16, consumed=32, forget=["12-20"]).problems == []
    past = judged([], [record(1, 3)], at=4, size=16, consumed=32, executed=[[1, 3]])
    assert past.problems == [] and past.moved == []
    within = judged([], [record(3, 8)], at=4, size=16, consumed=32, executed=[[3, 4]])
    assert within.problems == [] and within.moved == [("3-8", "user", (5, 6))]


def test_a_moved_range_covers_its_samples_whatever_the_sizes():
    rng = random.Random(1)
    for _ in range(300):
        old = rng.choice([2, 4, 8])
        new = rng.choice([2, 4, 8, 16])
        at = rng.randint(0, 20)
        first = rng.randint(at + 1, 40)
        one = record(first, first + rng.randint(0, 8), old)
        found = judged([], [one], at=at, size=new, consumed=at * old, iterations=1000)
        shift = at * old - at * new
        covered = {
            n * new + shift + i
            for a, b in found.skips.ranges
            for n in range(a - 1, b)
            for i in range(new)
        }
        exact = set(range(one.s0, one.s1))
        assert found.problems or covered == exact
        whole = (one.s0 - shift) % new == 0 and (one.s1 - shift) % new == 0
        assert bool(found.problems) != whole


def test_nothing_to_train():
    """A new wish to skip all that is left is refused, one that is on record is not: its run must be
    able to end."""
    [line] = judged([(51, 100)], at=50).problems
    assert_problem(line, "skip-leaves-nothing-to-train", "--train-range-to-skip", "51 to 100")
    assert judged([(51, 100)], [record(51, 100)], at=60, executed=[[51, 60]]).problems == []
    assert judged([(41, 100)], [], at=60, executed=[[41, 60]]).problems != []
    assert (
        judged([(60, 70)], [record(60, 70)], at=80, executed=[[60, 70]], iterations=80).problems
        == []
    )


def test_a_shorter_run_cuts_what_is_recorded():
    assert judged([], [record(90, 120), record(150, 160)], iterations=100).skips.ranges == (
        (90, 100),
    )


def test_many():
    records = [dataclasses.replace(record(n, n), id=f"{n}-{n}") for n in range(1, 41)]
    found = judged([], records, at=50, executed=())
    assert len(found.problems) == 21 and found.problems[-1] == "... and 20 more of these"
    found = judged([], records)
    assert "20-20 (user, F), 20 more" in found.notes[0]


def many(size: int = 8) -> SkipRecord:
    """Iterations 10-20, 30-30 and 50-59 in one record."""
    return SkipRecord(
        "10-59x3",
        10,
        59,
        9 * size,
        59 * size,
        22 * size * 32,
        "user",
        "test",
        "now",
        "0",
        "10-20 30-30 50-59",
    )


def test_a_record_of_many_ranges():
    """It is to the last iteration what its ranges would be one by one."""
    found = judged([], [many()], at=5)
    assert (found.problems, found.skips.ranges, found.new) == (
        [],
        ((10, 20), (30, 30), (50, 59)),
        [],
    )
    assert found.notes == ["iterations to skip: 10-59x3 (user, F)"]
    again = judged([(10, 20), (30, 30), (50, 59)], [many()], at=35, executed=[[10, 20], [30, 30]])
    assert (again.problems, again.new) == ([], [])
    more = judged([(30, 30), (70, 71)], [many()], at=5)
    assert more.new == [(70, 71)] and more.skips.ranges == ((10, 20), (30, 30), (50, 59), (70, 71))
    trained = judged([], [many()], at=40, executed=[[10, 20]], checkpoints=[25])
    assert_problem(
        trained.problems[0], "skip-already-trained", "F: 10-59x3", "30 to 30", "--ckpt-step 25"
    )
    gone = judged([], [many()], at=5, forget=["10-59x3"])
    assert (gone.problems, gone.forgotten, gone.skips.ranges) == ([], ["10-59x3"], ())
    assert (
        "requests iterations of it again"
        in judged([(30, 30)], [many()], forget=["10-59x3"]).problems[0]
    )
    assert judged([(25, 26)], [many()], forget=["10-59x3"]).problems == []
    done = judged([], [many()], at=80, executed=[[10, 20], [30, 30], [50, 59]], forget=["10-59x3"])
    assert "these iterations have been skipped already" in done.problems[0]


def test_many_ranges_and_other_batch_sizes():
    found = judged([], [many()], at=4, size=16, consumed=32)
    assert_problem(
        found.problems[0], "skip-record-not-applicable", "10-59x3", "--forget-skip 10-59x3"
    )
    assert (
        judged(
            [], [many()], at=60, size=16, consumed=480, executed=[[10, 20], [30, 30], [50, 59]]
        ).problems
        == []
    )


def test_more_than_a_thousand_new_ranges_are_one_id():
    typed = [(2 * n, 2 * n) for n in range(1, 1002)]
    assert judged(typed, iterations=5000).notes == [
        "iterations to skip: 2-2002x1001 (user, command line, new)"
    ]
