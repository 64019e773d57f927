"""What a resume makes of ranges to skip: all rules of resuming, from numbers alone."""

import functools

import pytest

from megatron.checkpoint.skip_log import Position, SkipRecord, Skips
from megatron.config import command_line
from megatron.config.plan.plan import make_plan
from megatron.config.skip_ranges import SkipRanges
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


def at(iteration: int, *skipped, consumed: int | None = None) -> Position:
    samples = 8 * iteration if consumed is None else consumed
    return Position.of(iteration, samples, skipped)


def skips(here: Position, typed=(), recorded=(), checkpoints=()) -> Skips:
    records = {record(one): "F" for one in recorded}
    return Skips(SkipRanges(typed), records, here, checkpoints, "D")


def test_recorded_and_typed_are_joined():
    both = skips(at(5), [(10, 20), (40, 41)], ["10-20", "30-35"])
    assert both.all().ranges == ((10, 20), (30, 35), (40, 41))
    assert both.new().ranges == ((40, 41),) and not both.problems(plan())
    assert skips(at(0), [(10, 20), (30, 30)]).new().ranges == ((10, 20), (30, 30))


@pytest.mark.parametrize("iteration", [10, 12, 20, 25])
def test_the_past_that_was_skipped_is_silent(iteration):
    """In and behind the range, typed again or not; an older checkpoint has no record of it."""
    here = at(iteration, [10, min(iteration, 20)])
    for wanted in (([(10, 20)], ["10-20"]), ([(10, 20)],), ([], ["10-20"])):
        resumed = skips(here, *wanted)
        assert resumed.problems(plan()) == [] and resumed.all().ranges == ((10, 20),)
        assert bool(resumed.new()) == (not resumed.records and iteration < 20)


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
    [line] = skips(here, typed, recorded, [3, 9, 10, 25]).problems(plan())
    assert_problem(line, TRAINED, *named, "--ckpt-step 9")
    [line] = skips(here, typed, recorded, [10]).problems(plan())
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
    assert codes_of(skips(here, [], [recorded]).problems(plan(16))) == codes
    assert skips(here, [], [recorded]).problems(plan(8)) == []


def test_nothing_to_train():
    """New ranges with all that is left are refused, recorded ones are not: their run must be able
    to end."""
    [line] = skips(at(50), [(51, 100)]).problems(plan())
    assert_problem(line, "skip-leaves-nothing-to-train", "--train-range-to-skip", "51 to 100")
    assert skips(at(60, [51, 60]), [(51, 100)], ["51-100"]).problems(plan()) == []
    assert skips(at(60, [41, 60]), [(41, 100)]).problems(plan()) != []
    assert skips(at(80, [60, 70]), [(60, 70)], ["60-70"]).problems(plan(8, 80)) == []
    assert skips(at(0), [], ["90-120", "150-160"]).problems(plan(8, 100)) == []


def test_many():
    assert len(skips(at(50), [], [f"{n}-{n}" for n in range(1, 41)]).problems(plan())) == 21
    many = [(2 * n, 2 * n) for n in range(1, 1001)]
    [line] = skips(at(0), many).listed()
    assert len(line) < 200 and str(1000 - 20) in line
