"""--train-range-to-skip on small runs, and a fault that they must catch; bad ranges are in
test_bad_skips.py."""

import functools
from pathlib import Path

import pytest

from megatron.checkpoint import reading, skip_log
from megatron.config import run_directory
from tests.core.training.skipping import skip_runs
from tests.core.training.skipping.skip_runs import (
    COLUMNS,
    EXACT,
    argv,
    batches,
    note_seconds,
    reads,
    watched,
)
from tests.forkrun import run_ranks
from tests.runs import (
    NO_DROPOUT,
    Finished,
    _rank,
    same_tensors,
    train,
    write_text,
)

SKIP = ("--train-range-to-skip", "2", "3")


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    return write_text(tmp_path_factory.mktemp("data") / "text", 400)


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory) -> Finished:
    """6 iterations, none skipped."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return watched(text, folder)


@pytest.fixture(scope="module")
def skips(text, tmp_path_factory) -> Finished:
    """The same without 2 and 3, with data workers that read ahead."""
    folder = tmp_path_factory.mktemp("skips") / "run"
    return watched(text, folder, *SKIP, "--num-workers", "2")


# --- the state after a skip


def test_columns_are_those_of_the_whole_run(whole, skips):
    assert skips.series(*COLUMNS) == whole.series(*COLUMNS)
    assert [row["skipped"] for row in skips.rows] == [0, 1, 1, 0, 0, 0]
    assert [row["skip_reason"] for row in skips.rows] == [None, "user", "user", None, None, None]
    assert [row["skipped_iterations_total"] for row in skips.rows] == [0, 1, 2, 2, 2, 2]
    assert [row["skipped_samples"] for row in skips.rows] == [0, 8, 16, 16, 16, 16]
    assert skips.first_rank_log.count("skipping iterations 2 to 3: 16 samples (512 tokens)\n") == 1


def test_lines_of_skipped_iterations_have_no_loss_and_no_norm(skips):
    assert ["loss" in line for line in skips.lines] == [True, False, False, True, True, True]
    assert ["grad norm" in line for line in skips.lines] == [True, False, False, True, True, True]
    assert [row["lm_loss"] is None for row in skips.rows] == [
        False,
        True,
        True,
        False,
        False,
        False,
    ]
    assert [row["grad_norm"] is None for row in skips.rows] == [
        False,
        True,
        True,
        False,
        False,
        False,
    ]


def test_nothing_of_the_state_changes(skips):
    for iteration in (2, 3):
        same_tensors(skips.tensors(iteration), skips.tensors(1))
        before, after = (reading.load(skips.save, n).state for n in (1, iteration))
        assert after.optimizer == before.optimizer and after.consumed_train_samples == 8 * iteration
        assert after.num_floating_point_operations == before.num_floating_point_operations
    assert not any(
        a.equal(b)
        for (name, a), b in zip(skips.tensors(4).items(), skips.tensors(1).values(), strict=True)
        if "fc1.weight" in name
    )


def test_the_data_are_those_of_the_whole_run_and_skipped_ones_unread(whole, skips):
    everything = batches(whole.folder)
    assert {n: rows for n, rows in everything.items() if n not in (2, 3)} == batches(skips.folder)
    assert reads(whole.folder) == list(range(48))
    assert reads(skips.folder) == [*range(8), *range(24, 48)]


# --- layouts

# ranks, micro-batch, workers
LAYOUTS = [(1, "1", "0"), (1, "2", "2"), (2, "1", "0"), (2, "2", "0")]
RAMP = ["--rampup-batch-size", "2", "2", "12", "--train-samples", "38"]


@pytest.mark.campaign
@pytest.mark.parametrize("ramp", [[], RAMP], ids=["constant", "ramp"])
def test_same_data_after_the_range_in_every_layout(text, tmp_path, ramp):
    """Iterations after the range train on what they would have; samples of the range are fetched
    nowhere, nor ahead."""
    whole, _ = layout(text, tmp_path / "whole", ramp, 1, "2", "0", [])
    seen = []
    for number, place in enumerate(LAYOUTS):
        folder = tmp_path / str(number)
        if ramp and place[0] == 2 and place[1] == "2":
            # a batch of 2 is one micro-batch of 1 on each of two ranks
            continue
        got, done = layout(text, folder, ramp, *place, ["--train-range-to-skip", "3", "4"])
        assert got == {n: rows for n, rows in whole.items() if n not in (3, 4)}
        seen.append((reads(folder), [row["consumed_samples"] for row in done.rows]))
    assert all(one == seen[0] for one in seen)
    everything = reads(tmp_path / "whole")
    assert len(set(everything)) == len(everything) and set(seen[0][0]) < set(everything)
    assert len(everything) - len(seen[0][0]) == sum(len(whole[n]) for n in (3, 4))


def layout(
    text: str,
    folder: Path,
    ramp: list[str],
    ranks: int,
    micro_batch: str,
    workers: str,
    skips: list[str],
) -> tuple[dict[int, list], Finished]:
    words = argv(
        text,
        folder,
        *NO_DROPOUT,
        *ramp,
        "--micro-batch-size",
        micro_batch,
        "--num-workers",
        workers,
        *skips,
    )
    for flag in ("--train-iters", "--lr-warmup-iters") if ramp else ():
        at = words.index(flag)
        del words[at : at + 2]
    folder.mkdir()
    done = train(folder, words, ranks, hook=functools.partial(skip_runs.note_batches, str(folder)))
    return batches(folder), done


# --- kills and resumes

TWELVE = ["--train-iters", "12", "--train-range-to-skip", "5", "8"]
LONG = ["--train-iters", "22", "--train-range-to-skip", "10", "20", "--save-interval", "4"]


@pytest.fixture(scope="module")
def straight(text, tmp_path_factory) -> Finished:
    """12 iterations of which 5 to 8 are skipped, in one go."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    return train(folder, argv(text, folder, *TWELVE))


@pytest.fixture(scope="module")
def long(text, tmp_path_factory) -> Finished:
    """22 iterations without 10 to 20, in one go."""
    folder = tmp_path_factory.mktemp("long") / "run"
    return train(folder, argv(text, folder, *LONG))


def same_end(one: Finished, other: Finished) -> None:
    """Two runs are the same from beginning to end."""
    assert one.series(*EXACT) == other.series(*EXACT)
    same_tensors(one.tensors(), other.tensors())
    mine, theirs = (reading.load(run.save).state for run in (one, other))
    assert (
        mine.skipped == theirs.skipped
        and mine.skipped_train_samples == theirs.skipped_train_samples
    )


@pytest.mark.campaign
@pytest.mark.parametrize("iteration", [9, 10, 15, 20, 21])
def test_killed_and_resumed(text, tmp_path, long, iteration):
    """kill -9 after each of these iterations, before a save of it: the same run in the end."""
    folder = tmp_path / "run"
    skip_runs.killed(text, folder, functools.partial(skip_runs.kill_after, iteration), *LONG)
    assert reading.latest(folder / "save") == (iteration - 1) // 4 * 4
    same_end(train(folder, argv(text, folder, *LONG)), long)


@pytest.mark.parametrize(
    "stop", [pytest.param(n, marks=pytest.mark.campaign) for n in (4, 5, 6, 8, 9)]
)
def test_stopped_at_each_boundary_and_resumed(text, tmp_path, straight, stop):
    """On each side of both ends and inside: a save at a skipped iteration is as good as any."""
    folder = tmp_path / "run"
    first = train(folder, argv(text, folder, *TWELVE, "--exit-interval", str(stop)))
    assert reading.latest(first.save) == stop
    resumed = train(folder, argv(text, folder, *TWELVE))
    same_end(resumed, straight)
    assert reading.load(resumed.save).state.skipped == [[5, 8]]


def test_the_same_command_line_on_a_third_resume(text, tmp_path, straight):
    """No error, no double skip, one entry; and without the flag the ranges are skipped all the
    same."""
    folder = tmp_path / "run"
    for stop in ("6", "7"):
        train(folder, argv(text, folder, *TWELVE, "--exit-interval", stop))
    path = folder / "save" / skip_log.FILE_NAME
    assert len(path.read_text().splitlines()) == 1
    [record] = skip_runs.records(folder / "save")
    assert (record.ranges, record.s0, record.s1, record.tokens) == ("5-8", 32, 64, 1024)
    assert (record.reason, record.source) == ("user", "command line")
    last = train(folder, argv(text, folder, "--train-iters", "12"))
    same_end(last, straight)
    assert f": 5-8 (user, {folder}/save/skips.jsonl)\n" in last.first_rank_log
    assert last.first_rank_log.count(": 5-8 (user, command line, new)\n") == 1
    assert len(path.read_text().splitlines()) == 1


def test_a_decision_outlives_a_crash_before_the_next_save(text, tmp_path):
    """It is in the file before training goes on, though no checkpoint has it: the next run, without
    the flag, skips the range."""
    folder = tmp_path / "run"
    words = ("--train-iters", "9", "--save-interval", "2")
    watched(text, folder, *words, "--exit-interval", "2")
    hook = functools.partial(skip_runs.kill_after, 3)
    skip_runs.killed(text, folder, hook, *words, "--train-range-to-skip", "5", "6")
    state = reading.load(folder / "save").state
    assert (state.iteration, state.skips, state.skipped) == (2, [], [])
    done = watched(text, folder, *words)
    assert [row["iteration"] for row in done.rows if row["skipped"]] == [5, 6]


# --- ranks

GRIDS = {
    "tp2": (2, ["--tensor-model-parallel-size", "2"]),
    "pp2": (2, ["--pipeline-model-parallel-size", "2"]),
    "pp4": (4, ["--pipeline-model-parallel-size", "4"]),
    "vpp": (
        2,
        ["--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1"],
    ),
    "dp2": (2, []),
}
FOUR_LAYERS = ["--num-layers", "4", "--fp64", *NO_DROPOUT, "--train-range-to-skip", "2", "4"]


@pytest.fixture(scope="module")
def one_rank(text, tmp_path_factory) -> Finished:
    return watched(text, tmp_path_factory.mktemp("one") / "run", *FOUR_LAYERS)


@pytest.mark.campaign
@pytest.mark.parametrize("grid", GRIDS)
def test_every_layout_skips_alike(text, tmp_path, one_rank, grid):
    """Equal losses and data, no hang; no stage reads what is skipped."""
    world, flags = GRIDS[grid]
    done = watched(text, tmp_path / "run", *FOUR_LAYERS, *flags, world=world)
    assert done.series(
        "iteration", "skipped", "skipped_iterations_total", *COLUMNS
    ) == one_rank.series("iteration", "skipped", "skipped_iterations_total", *COLUMNS)
    for a, b in zip(done.rows, one_rank.rows, strict=True):
        assert a["skipped"] or a["lm_loss"] == pytest.approx(b["lm_loss"], rel=1e-10)
    assert set(reads(done.folder)) == set(reads(one_rank.folder)) == {*range(8), *range(32, 48)}
    same = {n: sorted(set(rows)) for n, rows in batches(done.folder).items()}
    assert same == {n: sorted(set(rows)) for n, rows in batches(one_rank.folder).items()}
    assert len((done.save / skip_log.FILE_NAME).read_text().splitlines()) == 1


def test_two_ranks_and_evaluations_on_skipped_iterations(text, tmp_path):
    """Ranks stay together; what is due on a skipped iteration happens; weights there are those of
    before."""
    flags = [
        "--train-range-to-skip",
        "2",
        "5",
        "--eval-interval",
        "1",
        "--eval-iters",
        "2",
        "--fp64",
        *NO_DROPOUT,
        "--save-interval",
        "3",
    ]
    one = watched(text, tmp_path / "one", *flags)
    two = watched(text, tmp_path / "two", *flags, world=2)
    for a, b in zip(one.rows, two.rows, strict=True):
        assert a["skipped"] == b["skipped"] and a["consumed_samples"] == b["consumed_samples"]
        if not a["skipped"]:
            assert b["lm_loss"] == pytest.approx(a["lm_loss"], rel=1e-10)
    assert [n for _, n, _ in two.evaluations[:6]] == [1, 2, 3, 4, 5, 6]
    assert run_directory.iterations(two.save) == [3, 6]
    assert two.first_rank_log.count("skipping iterations 2 to 5: 32 samples (1024 tokens)\n") == 1


# --- cost, and dropout


def test_a_million_iterations_in_a_second(tmp_path):
    """And not a byte of theirs is read: 2 iterations of 2 samples of 33 tokens, of the 2 million
    that were consumed."""
    folder = tmp_path / "run"
    folder.mkdir()
    text = write_text(tmp_path / "text", 2000)
    last = 1_000_001
    words = argv(
        text,
        folder,
        "--train-iters",
        str(last + 1),
        "--train-range-to-skip",
        "2",
        str(last),
        "--log-interval",
        "100000",
        "--save-interval",
        "10000000",
        "--global-batch-size",
        "2",
        "--split",
        "100,0,0",
        "--dataloader-type",
        "cyclic",
    )
    assert run_ranks(
        1, _rank, words, f"{folder}/log", None, functools.partial(note_seconds, str(folder))
    ) == [0]
    said = (folder / "log.0").read_text()
    assert len(reads(folder)) == 4
    assert sum(map(int, (folder / "bytes").read_text().split())) == 4 * 2 * 33
    assert f"skipping iterations 2 to {last}: 2000000 samples (64000000 tokens)\n" in said
    assert f"\n iter {last - 1:7d}/{last + 1} | " in said
    assert float((folder / "seconds").read_text()) < 20
    assert reading.load(folder / "save").state.consumed_train_samples == 2 * (last + 1)
