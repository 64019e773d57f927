"""The loop on whole small runs: where it stops, saves and evaluates, how batches grow, what
switches change."""

import functools
import gc
import itertools
import multiprocessing
import os
import re
from pathlib import Path

import pytest
import torch

from megatron.checkpoint import reading
from megatron.config import run_directory
from megatron.training import loop
from tests.runs import (
    EXACT,
    NO_DROPOUT,
    SMALL,
    Finished,
    allow_workers,
    late_from,
    same_tensors,
    train,
    with_flags,
    write_text,
)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    return write_text(tmp_path_factory.mktemp("data") / "text", 260)


@pytest.fixture(scope="module")
def plain(text, tmp_path_factory) -> Finished:
    """Four iterations without any switch."""
    return run(text, tmp_path_factory.mktemp("plain") / "run", 4)


def argv(text: str, folder: Path, iterations: int | None, *extra: str) -> list[str]:
    length = [] if iterations is None else ["--train-iters", str(iterations)]
    return [
        *with_flags(SMALL, "--micro-batch-size", "4"),
        "--data-path",
        text,
        "--split",
        "80,10,10",
        *length,
        "--save",
        str(folder / "save"),
        "--load",
        str(folder / "save"),
        "--save-interval",
        "100",
        *extra,
    ]


def without(words: list[str], flag: str) -> list[str]:
    """A command line less one flag and its value."""
    at = words.index(flag)
    return words[:at] + words[at + 2 :]


def run(
    text: str, folder: Path, iterations: int | None, *extra: str, world: int = 1, hook=None
) -> Finished:
    return train(folder, argv(text, folder, iterations, *extra), world, hook=hook)


def evaluated(done: Finished) -> list[tuple[str, int]]:
    """(set, iteration) of every evaluation."""
    return [(name, iteration) for name, iteration, _ in done.evaluations]


ENDS = {
    # flags after --eval-iters 2: iterations, those saved, evaluations
    "an exit, which does not evaluate": (
        "--train-iters 9 --exit-interval 4 --save-interval 3",
        4,
        [3, 4],
        [],
    ),
    "one save for three reasons": (
        "--train-iters 4 --exit-interval 4 --save-interval 2 --eval-interval 3",
        4,
        [2, 4],
        [("validation", 3)],
    ),
    "one save for two reasons": (
        "--train-iters 4 --save-interval 4",
        4,
        [4],
        [("validation", 4), ("test", 4)],
    ),
    "validation at its interval, and once at the end": (
        "--train-iters 5 --eval-interval 2",
        5,
        [5],
        [("validation", 2), ("validation", 4), ("validation", 5), ("test", 5)],
    ),
    "no validation before an iteration": (
        "--train-iters 6 --eval-interval 2 --start-eval-at-iter 3",
        6,
        [6],
        [("validation", 4), ("validation", 6), ("test", 6)],
    ),
    "no evaluation": ("--train-iters 4 --eval-iters 0 --eval-interval 1", 4, [4], []),
    "nothing to evaluate on": ("--train-iters 4 --split 100,0,0 --eval-interval 1", 4, [4], []),
}


@pytest.mark.parametrize("case", ENDS)
def test_what_a_run_saves_and_evaluates(text, tmp_path, case):
    flags, last, saved, evaluations = ENDS[case]
    words = with_flags(argv(text, tmp_path / "run", 9), "--eval-iters", "2", *flags.split())
    done = train(tmp_path / "run", words)
    assert [row["iteration"] for row in done.rows] == list(range(1, last + 1))
    assert done.saved == saved == run_directory.iterations(done.save)
    assert evaluated(done) == evaluations
    interval = int(dict(itertools.pairwise(words)).get("--eval-interval", 1000))
    before_save = [at for name, at in evaluations if name == "validation" and at % interval == 0]
    consumed = reading.load(done.save).state.consumed_valid_samples
    assert consumed == 16 * len(before_save)
    planned = re.search(r"^ validation .* (\d+) samples", done.first_rank_log, re.M)
    assert (planned is None) == ("no" == case[:2] and not evaluations)
    if "before" in case:
        assert int(planned[1]) == 48  # for the validations that come


@pytest.mark.parametrize("world", [1, 2])
def test_exit_duration(text, tmp_path, world):
    flags = [
        "--exit-duration-in-mins",
        "0.000001" if world == 1 else "60",
        "--save-interval",
        "100",
    ]
    hook = functools.partial(late_from, 3, 1) if world == 2 else None  # rank 1 alone
    done = run(text, tmp_path / "run", 9, *flags, world=world, hook=hook)
    assert [row["iteration"] for row in done.rows] == list(range(1, 2 if world == 1 else 4))
    minutes = re.fullmatch(r"stopped after (\S+) minutes", done.ending)
    assert 0.0 <= float(minutes[1]) < (5.0 if world == 1 else 1005.0)  # as the late rank counts
    assert reading.latest(done.save) == len(done.rows)


def test_exit_during_evaluation(text, tmp_path):
    """The time is over after the second global batch of the evaluation at 3: the run leaves. The
    resumed run is the one that had time."""
    flags = ["--eval-interval", "3", "--eval-iters", "4", "--save-interval", "100"]
    first = run(
        text,
        tmp_path / "run",
        9,
        *flags,
        "--exit-duration-in-mins",
        "60",
        hook=functools.partial(late_from, 5),
    )
    assert "Exiting during evaluation, timelimit reached\n" in first.log
    assert first.evaluations == [] and first.ending.startswith("stopped after ")
    assert reading.latest(first.save) == 3
    resumed = run(text, tmp_path / "run", 9, *flags)
    straight = run(text, tmp_path / "straight", 9, *flags)
    assert resumed.series(*EXACT) == straight.series(*EXACT)
    assert resumed.evaluations == straight.evaluations[1:] and len(straight.evaluations) == 4


def test_a_batch_of_its_own_for_evaluation(text, tmp_path):
    """Twice 8 samples and four times 4 of them, one at a time, are the same samples: the same
    losses, also through a pipeline, whose messages then have another size."""
    fp64 = ["--fp64", *NO_DROPOUT, "--eval-interval", "2", "--save-interval", "100"]
    whole = run(text, tmp_path / "whole", 5, *fp64, "--eval-iters", "2")
    small = [*fp64, "--eval-iters", "4", "--eval-global-batch-size", "4"]
    small += ["--eval-micro-batch-size", "1"]
    assert len(whole.evaluations) == 4
    for world, layout in ((1, ()), (2, ("--pipeline-model-parallel-size", "2"))):
        done = run(text, tmp_path / str(world), 5, *small, *layout, world=world)
        assert evaluated(done) == evaluated(whole)
        for (*_, small_loss), (*_, loss) in zip(done.evaluations, whole.evaluations, strict=True):
            assert small_loss == pytest.approx(loss, rel=1e-12)
        assert reading.load(done.save).state.consumed_valid_samples == 32


def test_skip_train(text, tmp_path):
    """It evaluates what it loaded, trains nothing, writes nothing."""
    trained = run(text, tmp_path / "run", 4, "--save-interval", "4", "--eval-iters", "2")
    tested = trained.evaluations[-1]
    (tmp_path / "run/metrics.jsonl").unlink()
    before = sorted(os.listdir(trained.save))
    only = run(text, tmp_path / "run", 4, "--eval-iters", "2", "--skip-train")
    assert only.rows == [] and sorted(os.listdir(trained.save)) == before
    assert evaluated(only) == [("validation", 4), ("test", 4)]
    assert only.evaluations[-1] == tested


@pytest.mark.parametrize(
    "flags, sizes",
    [
        (["--rampup-batch-size", "2", "2", "12"], [2, 2, 4, 6, 8, 8]),
        pytest.param(
            ["--step-batch-size-schedule", "0:4 0.000000256B:8"],
            [4, 4, 8, 8, 8, 8, 8, 8],
            marks=pytest.mark.campaign,
        ),
    ],
)
def test_batches_that_grow(text, tmp_path, flags, sizes):
    """A run that is stopped while the batch grows goes on with the sizes it would have had."""
    words = without(
        with_flags(
            argv(text, tmp_path / "run", None, *flags, "--train-samples", str(sum(sizes))),
            *("--micro-batch-size", "2"),
        ),
        "--lr-warmup-iters",
    )
    if "step" in flags[0]:
        words = without(words, "--global-batch-size")
    straight = train(tmp_path / "run", words)
    assert [row["global_batch_size"] for row in straight.rows] == sizes
    assert [row["consumed_samples"] for row in straight.rows] == [
        sum(sizes[:n]) for n in range(1, len(sizes) + 1)
    ]
    assert [int(line["batch"]) for line in straight.lines] == sizes
    again = [word.replace(str(tmp_path / "run"), str(tmp_path / "again")) for word in words]
    train(tmp_path / "again", [*again, "--exit-interval", "3"])
    resumed = train(tmp_path / "again", again)
    assert resumed.series(*EXACT) == straight.series(*EXACT)
    same_tensors(resumed.tensors(), straight.tensors())


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(["--rampup-batch-size", "2", "2", "12"], marks=pytest.mark.campaign),
        ["--step-batch-size-schedule", "0:2 0.000000128B:4 0.000000256B:8"],
    ],
)
def test_a_growing_batch_in_a_run_of_iterations(text, tmp_path, flags):
    """The learning rate follows the iterations: it is that of a run with a constant batch."""
    more = ["--micro-batch-size", "2", "--lr-decay-style", "cosine"]
    grows = run(text, tmp_path / "a", 6, *more, *flags)
    constant = run(text, tmp_path / "b", 6, *more)
    assert grows.series("learning_rate") == constant.series("learning_rate")
    sizes = [row["global_batch_size"] for row in grows.rows]
    assert sizes[0] == 2 and sizes[-1] == 8 and len(sizes) == 6
    assert grows.rows[-1]["consumed_samples"] == sum(sizes)
    run(text, tmp_path / "c", 6, *more, *flags, "--exit-interval", "3")
    assert run(text, tmp_path / "c", 6, *more, *flags).series(*EXACT) == grows.series(*EXACT)


def test_power_with_a_growing_batch_counts_the_tokens_trained_on(text, tmp_path):
    """B stays the full batch; a run that is stopped while the batch grows goes on alike."""
    more = "--rampup-batch-size 2 2 12 --train-samples 46 --micro-batch-size 2 --lr 0.01 "
    more += "--lr-decay-style power --lr-power-amplitude 0.01 --lr-wsd-decay-samples 16"

    def power_run(folder, *flags):
        words = with_flags(argv(text, folder, None, *flags), *more.split())
        return train(folder, without(words, "--lr-warmup-iters"))

    straight = power_run(tmp_path / "a")
    tokens = [32 * sum((2, 2, 4, 6, 8, 8)[:n]) for n in range(1, 7)]  # before the anneal
    rates = [min(0.01, 8 * 0.01 * n**-0.51) for n in tokens]
    found = [row["learning_rate"] for row in straight.rows]  # each of the next update
    assert found[:6] == pytest.approx(rates, rel=1e-12)
    assert 0 == found[-1] < found[-2] < found[5] < found[0]
    power_run(tmp_path / "c", "--exit-interval", "3")
    assert power_run(tmp_path / "c").series(*EXACT) == straight.series(*EXACT)


def test_a_resume_with_other_eval_iters(text, tmp_path):
    """It goes on, with a warning: validation data are not trained on. Used up, they begin again."""
    often = ["--eval-interval", "1", "--exit-interval", "3"]
    first = run(text, tmp_path / "run", 6, *often, "--eval-iters", "40")
    assert len(evaluated(first)) == 3
    more = run(text, tmp_path / "run", 6, *often[:2], "--eval-iters", "1")
    assert [row["iteration"] for row in more.rows] == [1, 2, 3, 4, 5, 6]
    assert [number for _, number in evaluated(more)][:6] == [1, 2, 3, 4, 5, 6]


def test_train_samples(text, tmp_path):
    """The length in samples: the same run as its length in iterations."""
    words = without(argv(text, tmp_path / "a", None, "--train-samples", "48"), "--lr-warmup-iters")
    samples = train(tmp_path / "a", [*words, "--lr-warmup-samples", "16"])
    iterations = run(text, tmp_path / "b", 6, "--lr-warmup-iters", "2")
    assert samples.series(*EXACT) == iterations.series(*EXACT) and len(samples.rows) == 6


def count_collections(folder: str) -> None:
    """Write down each collection of garbage and whether the automatic one is on then."""
    collect = gc.collect

    def counted() -> int:
        with open(f"{folder}/collections", "a") as file:
            file.write(f"{gc.isenabled()} ")
        return collect()

    gc.collect = counted


@pytest.mark.parametrize(
    "extra, count",
    [
        ([], 0),
        (["--manual-gc", "--manual-gc-interval", "2"], 5),
        (["--manual-gc", "--no-manual-gc-eval"], 0),
    ],
)
def test_manual_gc(text, tmp_path, extra, count):
    """Collections at the interval and around the 2 evaluations, and no automatic ones."""
    hook = functools.partial(count_collections, str(tmp_path))
    run(text, tmp_path / "run", 6, "--eval-interval", "3", "--split", "80,20,0", *extra, hook=hook)
    found = (tmp_path / "collections").read_text().split() if count else []
    assert len(found) == count and set(found) <= {"False"}


def note_switches(folder: str) -> None:
    """Write down torch's switches at the first step."""
    step = loop.train_step

    def noting(*args):
        switches = (
            torch.are_deterministic_algorithms_enabled(),
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.deterministic,
        )
        Path(f"{folder}/switches").write_text(" ".join(map(str, switches)))
        return step(*args)

    loop.train_step = noting


@pytest.mark.parametrize(
    "flags, switches",
    [
        (["--deterministic-mode"], "True False True"),
        (["--cudnn-benchmark"], "False True False"),
        (["--cudnn-deterministic"], "False False True"),
        ([], "False False False"),
    ],
)
def test_switches_of_torch(text, tmp_path, plain, flags, switches):
    done = run(
        text, tmp_path / "run", 4, *flags, hook=functools.partial(note_switches, str(tmp_path))
    )
    assert (tmp_path / "switches").read_text() == switches
    assert done.series(*EXACT) == plain.series(*EXACT)


@pytest.mark.parametrize("minutes, last", [("1", 1), ("2", 4)])
def test_time_is_counted_from_the_start_of_the_program(text, tmp_path, minutes, last):
    hook = functools.partial(late_from, 1, minutes=1.5)
    done = run(
        text,
        tmp_path / "run",
        4,
        "--exit-duration-in-mins",
        minutes,
        "--eval-iters",
        "0",
        hook=hook,
    )
    assert [row["iteration"] for row in done.rows] == list(range(1, last + 1))


def _no_workers_remain() -> None:
    """A hook: when the run is over, no data worker is left for the end of the process to kill."""
    allow_workers()
    real = loop.train

    def train_all(*args):
        gc.disable()
        real(*args)
        assert multiprocessing.active_children() == []

    loop.train = train_all


@pytest.mark.parametrize("flags", ["", "--exit-interval 3"])
def test_the_data_workers_have_ended(flags, tmp_path):
    words = with_flags(SMALL, "--num-workers", "1", "--eval-interval", "2")
    words += ["--train-iters", "4", "--mock-data", *NO_DROPOUT, *flags.split()]
    train(tmp_path, words, hook=_no_workers_remain)
