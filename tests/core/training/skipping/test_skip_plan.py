"""What a resume makes of ranges to skip: all rules of resuming, from numbers alone."""

from __future__ import annotations

import functools

import pytest

from megatron.checkpoint.skip_log import SkipRecord
from megatron.config import command_line
from megatron.config.plan.plan import make_plan
from megatron.config.skip_ranges import SkipRanges
from megatron.training.skipping.skip_plan import Position, Skips
from tests.problems import assert_problem, codes_of

WORDS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --mock-data --vocab-size 100 --micro-batch-size 2 --lr 0.003 "
    "--device cpu"
).split()
TRAINED = "skip-already-trained"


@functools.cache
def plan(size: int = 8, iterations: int = 100):
    words = [*WORDS, "--global-batch-size", str(size), "--train-iters", str(iterations)]
    return make_plan(command_line.read(words, {}).config, 1, 100)


def record(ranges: str, size: int = 8) -> SkipRecord:
    """The record of a run with batches of `size`."""
    numbers = list(map(int, ranges.replace("-", " ").split()))
    return SkipRecord(ranges, (numbers[0] - 1) * size, numbers[-1] * size, 1, "user", "test", "now")


def skips(typed=(), recorded=(), checkpoints=()) -> Skips:
    return Skips(
        SkipRanges(typed), [("F", record(one)) for one in recorded], frozenset(), checkpoints, "D"
    )


def at(iteration: int, *executed, consumed: int | None = None) -> Position:
    return Position(iteration, 8 * iteration if consumed is None else consumed, executed)


def test_recorded_and_typed_are_joined():
    found = skips([(10, 20), (40, 41)], ["10-20", "30-35"])
    assert found.all().ranges == ((10, 20), (30, 35), (40, 41))
    assert found.new(at(5)).ranges == ((40, 41),) and not found.problems(plan(), at(5))
    assert skips([(10, 20), (30, 30)]).new(at(0)).ranges == ((10, 20), (30, 30))


@pytest.mark.parametrize("iteration", [10, 12, 20, 25])
def test_the_past_that_was_skipped_is_silent(iteration):
    """In and behind the range, typed again or not; an older checkpoint has no record of it."""
    here = at(iteration, [10, min(iteration, 20)])
    for found in (skips([(10, 20)], ["10-20"]), skips([(10, 20)]), skips([], ["10-20"])):
        assert found.problems(plan(), here) == [] and found.all().ranges == ((10, 20),)
        assert bool(found.new(here)) == (not found.records and iteration < 20)


@pytest.mark.parametrize(
    ("iteration", "executed"),
    [(10, []), (25, []), (25, [[10, 15]]), (25, [[11, 20]]), (15, [[10, 14]])],
)
@pytest.mark.parametrize(
    ("typed", "recorded", "name"),
    [([(10, 20)], [], "--train-range-to-skip 10 20"), ([], ["3-4 10-20"], "F: 10-20")],
)
def test_the_past_that_was_trained_is_refused(iteration, executed, typed, recorded, name):
    here = at(iteration, [3, 4], *executed)
    named = (name, f"10 to {min(iteration, 20)}", f"iteration {iteration}")
    [line] = skips(typed, recorded, [3, 9, 10, 25]).problems(plan(), here)
    assert_problem(line, TRAINED, *named, "--ckpt-step 9")
    [line] = skips(typed, recorded, [10]).problems(plan(), here)
    assert_problem(line, TRAINED, *named, "D has no checkpoint", "without --load")


@pytest.mark.parametrize(
    ("recorded", "executed", "codes"),
    [
        ("11-20", [], ["skip-record-not-applicable"]),
        ("1-3", [[1, 3]], []),
        ("3-8", [[3, 4]], ["skip-record-not-applicable"]),
        ("1-3 20-30", [[1, 3]], ["skip-record-not-applicable"]),
        ("1-3 70-90", [[1, 3]], ["skip-record-not-applicable"]),
    ],
)
def test_other_batch_sizes(recorded, executed, codes):
    """A record is of samples: those that are to come must be the same iterations. Iteration 5
    begins at sample 32."""
    here = at(4, *executed, consumed=32)
    assert codes_of(skips([], [recorded]).problems(plan(16), here)) == codes
    assert skips([], [recorded]).problems(plan(8), here) == []


def test_nothing_to_train():
    """New ranges with all that is left are refused, recorded ones are not: their run must be able
    to end."""
    [line] = skips([(51, 100)]).problems(plan(), at(50))
    assert_problem(line, "skip-leaves-nothing-to-train", "--train-range-to-skip", "51 to 100")
    assert skips([(51, 100)], ["51-100"]).problems(plan(), at(60, [51, 60])) == []
    assert skips([(41, 100)]).problems(plan(), at(60, [41, 60])) != []
    assert skips([(60, 70)], ["60-70"]).problems(plan(8, 80), at(80, [60, 70])) == []
    assert skips([], ["90-120", "150-160"]).problems(plan(8, 100), at(0)) == []


def test_many():
    found = skips([], [f"{n}-{n}" for n in range(1, 41)]).problems(plan(), at(50))
    assert len(found) == 21
    many = [(2 * n, 2 * n) for n in range(1, 1001)]
    [line] = skips(many).listed(at(0))
    assert len(line) < 200 and str(1000 - 20) in line
