"""--train-range-to-skip on small runs: T1 to T4, T6 to T8, T10 to T12 of facts/spikes.md 4.6, as far as no ledger is.

T5, the mutant that keeps the data position, is a change that the test applies; it must make T4 fail.
"""
from __future__ import annotations

import functools
import json
import multiprocessing
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.checkpoint import store
from megatron.config import command_line
from megatron.config.skip_ranges import SkipRanges
from megatron.data import gpt_dataset
from megatron.parallel.random import DropoutSeeds
from megatron.training import loop, step
from tests.forkrun import ROOT, run_ranks
from tests.runs import NO_DROPOUT, SMALL, Finished, _rank, same_tensors, train, with_flags, write_text

ITERATIONS = 6
EXACT = ("iteration", "lm_loss", "grad_norm", "learning_rate", "loss_scale", "consumed_samples", "skipped")


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    return write_text(tmp_path_factory.mktemp("data") / "text", 400)


def argv(text: str, folder: Path, *extra: str) -> list[str]:
    save = str(folder / "save")
    mine = ["--data-path", text, "--split", "90,10,0", "--train-iters", str(ITERATIONS), "--save", save, "--load", save,
            "--save-interval", "1", "--eval-iters", "0"]
    return with_flags(with_flags(SMALL, *mine), *extra)


# --- what is read, seen from outside -------------------------------------------------------------------------------


def note_reads(folder: str) -> None:
    """Every process of the run, data workers too, writes down each training sample it fetches."""
    fetch = gpt_dataset.GPTDataset.__getitem__

    def noted(self, index):
        if self.index_split == "train":
            with open(f"{folder}/reads", "a") as file:
                file.write(f"{index}\n")
        return fetch(self, index)

    gpt_dataset.GPTDataset.__getitem__ = noted


def note_batches(folder: str) -> None:
    """... and each iteration the hash of every micro-batch it trains on."""
    note_reads(folder)
    make, train_step = step.make_batch, loop.train_step
    now = []

    def noted_step(run, forward_step, samples, iteration, flag):
        now[:] = [iteration]
        return train_step(run, forward_step, samples, iteration, flag)

    def noted_batch(samples, rules, device, dropout=None):
        if dropout is not None:
            with open(f"{folder}/batches", "a") as file:
                file.write(json.dumps([now[0], samples.sum(1).tolist(), samples[:, :3].tolist()]) + "\n")
        return make(samples, rules, device, dropout)

    step.make_batch, loop.train_step = noted_batch, noted_step


def reads(folder: Path) -> list[int]:
    path = folder / "reads"
    return sorted(map(int, path.read_text().split())) if path.exists() else []


def batches(folder: Path) -> dict[int, list]:
    """The rows that each iteration trained on, in whatever order ranks and micro-batches came."""
    found: dict[int, list] = {}
    for line in (folder / "batches").read_text().splitlines():
        iteration, sums, heads = json.loads(line)
        found.setdefault(iteration, []).extend(zip(sums, map(tuple, heads), strict=True))
    return {iteration: sorted(rows) for iteration, rows in found.items()}


def watched(text: str, folder: Path, *extra: str, world: int = 1, hook=note_batches) -> Finished:
    folder.mkdir()
    return train(folder, argv(text, folder, *extra), world, hook=functools.partial(hook, str(folder)))


# --- T1 to T4, T12 -------------------------------------------------------------------------------------------------


def test_columns_weights_and_data(text, tmp_path):
    """Skip 2 and 3 with dropout on: columns, silence, frozen state, untouched samples, and iteration 4's own batch."""
    whole = watched(text, tmp_path / "whole")
    skips = watched(text, tmp_path / "skips", "--train-range-to-skip", "2", "3")
    assert skips.series("learning_rate", "consumed_samples", "consumed_tokens") == whole.series(
        "learning_rate", "consumed_samples", "consumed_tokens")                                             # T1
    assert [row["skipped"] for row in skips.rows] == [0, 1, 1, 0, 0, 0]
    lines = [line for line in skips.log.splitlines() if line.startswith(" iteration ")]
    assert ["lm loss" in line for line in lines] == [True, False, False, True, True, True]                  # T2
    assert ["grad norm" in line for line in lines] == [True, False, False, True, True, True]
    for iteration in (2, 3):
        same_tensors(skips.tensors(iteration), skips.tensors(1))                                            # T3
        before, after = (store.load(skips.save, n).state for n in (1, iteration))
        assert after.optimizer == before.optimizer and after.skipped_train_samples == 8 * (iteration - 1)
        assert after.consumed_train_samples == 8 * iteration
        assert after.num_floating_point_operations == before.num_floating_point_operations
    assert not any(a.equal(b) for (name, a), b in zip(skips.tensors(4).items(), skips.tensors(1).values(), strict=True)
                   if "fc1.weight" in name)
    assert set(batches(tmp_path / "skips")) == {1, 4, 5, 6}                                                 # T4
    everything = batches(tmp_path / "whole")
    assert {n: rows for n, rows in everything.items() if n not in (2, 3)} == batches(tmp_path / "skips")
    assert len(reads(tmp_path / "whole")) == 48 and len(reads(tmp_path / "skips")) == 32


def keep_position(folder: str) -> None:
    """T5: the first version of the seed, whose skipped iterations did not move the data."""
    note_batches(folder)
    right = loop.training_samples

    def wrong(sampler, schedule, skips, first, last, shift=0):
        return right(sampler, schedule, SkipRanges(), first, last, shift)

    loop.training_samples = wrong


def test_the_data_test_notices_a_position_that_stays(text, tmp_path):
    whole = watched(text, tmp_path / "whole")
    mutant = watched(text, tmp_path / "mutant", "--train-range-to-skip", "2", "3", hook=keep_position)
    assert mutant.series("learning_rate", "consumed_samples") == whole.series("learning_rate", "consumed_samples")
    assert batches(tmp_path / "mutant")[1] == batches(tmp_path / "whole")[1]
    assert batches(tmp_path / "mutant")[4] == batches(tmp_path / "whole")[2] != batches(tmp_path / "whole")[4]


def note_masks(folder: str) -> None:
    """Write down the seeds of every dropout mask of iteration 4."""
    right = loop.train_step
    seed_of = DropoutSeeds.seed
    now = []

    def noted_step(run, forward_step, samples, iteration, flag):
        now[:] = [iteration]
        return right(run, forward_step, samples, iteration, flag)

    def noted_seed(self, layer, site, part=0):
        seed = seed_of(self, layer, site, part)
        if now == [4]:
            with open(f"{folder}/masks", "a") as file:
                file.write(f"{layer} {site} {seed}\n")
        return seed

    loop.train_step, DropoutSeeds.seed = noted_step, noted_seed


def test_masks_after_the_range_are_the_same(text, tmp_path):
    """T12: dropout of iteration 4 does not depend on what was skipped before."""
    watched(text, tmp_path / "whole", hook=note_masks)
    watched(text, tmp_path / "skips", "--train-range-to-skip", "2", "3", hook=note_masks)
    masks = (tmp_path / "whole/masks").read_text()
    assert (tmp_path / "skips/masks").read_text() == masks
    assert masks.count("\n") == 4 * (1 + 2 * 3)         # micro-batches x (embedding, and three sites of each layer)


# --- T6 ------------------------------------------------------------------------------------------------------------

LAYOUTS = [(1, "1", "0"), (1, "2", "2"), (2, "1", "0"), (2, "2", "0")]       # ranks, micro-batch, workers


RAMP = ["--rampup-batch-size", "2", "2", "12", "--train-samples", "38"]


@pytest.mark.parametrize("ramp", [[], pytest.param(RAMP, marks=pytest.mark.campaign)], ids=["constant", "ramp"])
def test_same_data_after_the_range_in_every_layout(text, tmp_path, ramp):
    """Iterations after the range train on what they would have; samples of the range are fetched nowhere, nor ahead."""
    whole, _ = layout(text, tmp_path / "whole", ramp, 1, "2", "0", [])
    seen = []
    for number, place in enumerate(LAYOUTS):
        folder = tmp_path / str(number)
        if ramp and place[0] == 2 and place[1] == "2":
            continue                                     # a batch of 2 is one micro-batch of 1 on each of two ranks
        got, done = layout(text, folder, ramp, *place, ["--train-range-to-skip", "3", "4"])
        assert got == {n: rows for n, rows in whole.items() if n not in (3, 4)}
        seen.append((reads(folder), [row["consumed_samples"] for row in done.rows]))
    assert all(one == seen[0] for one in seen)
    everything = reads(tmp_path / "whole")
    assert len(set(everything)) == len(everything) and set(seen[0][0]) < set(everything)
    assert len(everything) - len(seen[0][0]) == sum(len(whole[n]) for n in (3, 4))


def layout(text: str, folder: Path, ramp: list[str], ranks: int, micro_batch: str, workers: str,
           skips: list[str]) -> tuple[dict[int, list], Finished]:
    words = argv(text, folder, *NO_DROPOUT, *ramp, "--micro-batch-size", micro_batch, "--num-workers", workers, *skips)
    for flag in ("--train-iters", "--lr-warmup-iters") if ramp else ():
        at = words.index(flag)
        del words[at:at + 2]
    folder.mkdir()
    done = train(folder, words, ranks, hook=functools.partial(undaemon_and_note, str(folder)))
    return batches(folder), done


def undaemon_and_note(folder: str) -> None:
    """A forked rank may have data workers too."""
    multiprocessing.process.current_process()._config["daemon"] = False
    note_batches(folder)


# --- T7, T8 --------------------------------------------------------------------------------------------------------

TWELVE = ["--train-iters", "12", "--train-range-to-skip", "5", "8"]


@pytest.fixture(scope="module")
def straight(text, tmp_path_factory) -> Finished:
    """12 iterations of which 5 to 8 are skipped, in one go."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    return train(folder, argv(text, folder, *TWELVE))


@pytest.mark.parametrize("stop", [4, pytest.param(5, marks=pytest.mark.campaign), 6, 8,
                                  pytest.param(9, marks=pytest.mark.campaign)])
def test_stopped_at_each_boundary_and_resumed(text, tmp_path, straight, stop):
    """T8 on each side of both ends and inside: a save at a skipped iteration is as good as any."""
    folder = tmp_path / "run"
    first = train(folder, argv(text, folder, *TWELVE, "--exit-interval", str(stop)))
    assert store.latest(first.save) == stop
    resumed = train(folder, argv(text, folder, *TWELVE))
    assert resumed.series(*EXACT) == straight.series(*EXACT)
    same_tensors(resumed.tensors(), straight.tensors())
    states = [store.load(run.save).state for run in (resumed, straight)]
    assert states[0].skipped_train_samples == states[1].skipped_train_samples == 32


@pytest.mark.campaign
@pytest.mark.parametrize("steps", [4, 5])
def test_killed_around_the_range_and_resumed(text, tmp_path, straight, steps):
    """T7: kill -9 in the last step before the range, and in the first one after it; saves lie within the range."""
    folder = tmp_path / "run"
    words = argv(text, folder, *TWELVE, "--save-interval", "3")
    train(folder, words, kill_at=steps)
    assert store.latest(folder / "save") == {4: 3, 5: 6}[steps]
    resumed = train(folder, words)
    assert resumed.series(*EXACT) == straight.series(*EXACT)
    same_tensors(resumed.tensors(), straight.tensors())


def test_two_ranks_and_evaluations_on_skipped_iterations(text, tmp_path):
    """Ranks stay together; what is due on a skipped iteration happens; weights there are those of before."""
    flags = ["--train-range-to-skip", "2", "5", "--eval-interval", "1", "--eval-iters", "2", "--fp64", *NO_DROPOUT,
             "--save-interval", "3"]
    one = watched(text, tmp_path / "one", *flags)
    two = watched(text, tmp_path / "two", *flags, world=2)
    for a, b in zip(one.rows, two.rows, strict=True):
        assert a["skipped"] == b["skipped"] and a["consumed_samples"] == b["consumed_samples"]
        if not a["skipped"]:
            assert b["lm_loss"] == pytest.approx(a["lm_loss"], rel=1e-10)
    assert re.findall(r"loss at iteration (\d) \|", two.log) == list("123456")
    assert store.iterations(two.save) == [3, 6]
    assert two.first_rank_log.count("skipping iterations 2 to 5: 32 samples, 1024 tokens are not trained\n") == 1


# --- T10 -----------------------------------------------------------------------------------------------------------

GOOD = ("--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
        "--mock-data --vocab-size 100 --micro-batch-size 2 --global-batch-size 8 --lr 0.003 --train-iters 100 "
        "--device cpu").split()
REFUSED = {
    "": "needs a value", "5": "the last one, 5, has no partner; write 5 5", "1 2 7": "7, has no partner",
    "ten 20": "ten: not an integer", "10-20": "10-20: not an integer; write --train-range-to-skip 10 20",
    "1e1 20": "1e1: not an integer; write 10",
    "20 10": "20 10: the first iteration is after the last; did you mean 10 20?",
    "0 5": "0 5: iterations start at 1; write 1 5", "-3 5": "-3 5: iterations start at 1; write 1 5",
    "101 120": "101 120: never reached, training ends with iteration 100", "1 100": "nothing to train",
    "1 60 61 100": "nothing to train"}
ACCEPTED = {
    "7 7": ([(7, 7)], None), "30 31 3 4": ([(3, 4), (30, 31)], None), "3 4 5 6 3 4": ([(3, 6)], None),
    "2 4 3 5": ([(2, 5)], "2 4 and 3 5 overlap; merged"), "99 120": ([(99, 100)], "99 120: cut to 99 100"),
    "1 9": ([(1, 9)], "skips 9 of 100 iterations (9.0 %), 72 samples = 2304 tokens")}


@pytest.mark.parametrize("words", REFUSED)
def test_bad_ranges(capsys, words):
    """Exit code 2 and one line that names flag, values and remedy; nothing was built or opened."""
    with pytest.raises(SystemExit) as leave:
        command_line.read([*GOOD, "--train-range-to-skip", *words.split()], {})
    out, err = capsys.readouterr()
    assert leave.value.code == 2 and out == ""
    assert err.startswith("error: --train-range-to-skip") and err.count("\n") == 1 and REFUSED[words] in err


@pytest.mark.parametrize("words", ACCEPTED)
def test_good_ranges(words):
    ranges, warning = ACCEPTED[words]
    line = command_line.read([*GOOD, "--train-range-to-skip", *words.split()], {})
    count = sum(last - first + 1 for first, last in ranges)
    said = " ".join(f"{first} {last}" for first, last in ranges)
    assert f"skipping {count} iterations: --train-range-to-skip {said}" in line.notes
    assert warning is None or any(warning in note for note in line.notes)
    assert command_line.read([*GOOD, "--train-range-to-skip", *said.split()], {}).config is not None


def test_single_iterations_are_ranges_too():
    line = command_line.read([*GOOD, "--iterations-to-skip", "9", "4", "--train-range-to-skip", "5", "6"], {})
    assert "skipping 4 iterations: --train-range-to-skip 4 6 9 9" in line.notes


def test_refused_before_any_set_up():
    """In a new interpreter: not even torch or numpy is loaded."""
    code = ("import runpy, sys, atexit\n"
            "atexit.register(lambda: print(*(name for name in sys.modules if name in ('torch', 'numpy', "
            "'megatron.training.build', 'megatron.data.build'))))\n"
            f"sys.argv = ['x', *{[*GOOD, '--train-range-to-skip', '20', '10']!r}]\n"
            f"runpy.run_path({str(ROOT / 'pretrain_gpt.py')!r}, run_name='__main__')\n")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (2, [])


def test_a_hundred_thousand_ranges():
    """Accepted; start-up and look-up cost nothing."""
    words = [str(n) for first in range(10, 2_000_000, 20) for n in (first, first + 1)]
    start = time.perf_counter()
    ranges = SkipRanges.parse(words, 3_000_000).ranges
    seconds = time.perf_counter() - start
    assert len(ranges.ranges) == 100_000 and seconds < 1.0
    start = time.perf_counter()
    assert sum(ranges.is_skipped(n) for n in range(1, 100_001)) == 10_000
    assert time.perf_counter() - start < 1.0


# --- T11 -----------------------------------------------------------------------------------------------------------


def time_skipping(folder: str) -> None:
    """Write down this thread's seconds in the loop, training apart, and which samples were fetched."""
    note_reads(folder)
    train, train_one = loop.Trainer.train, loop.Trainer.train_one
    trained = []

    def timed_one(self, *args):
        start = time.thread_time()
        result = train_one(self, *args)
        trained.append(time.thread_time() - start)
        return result

    def timed(self):
        start = time.thread_time()
        result = train(self)
        Path(folder, "seconds").write_text(f"{time.thread_time() - start - sum(trained)}")
        return result

    loop.Trainer.train, loop.Trainer.train_one = timed, timed_one


def test_a_million_iterations_in_a_second(tmp_path):
    """And nothing of their samples is read: 2 iterations fetch 2 each, of the 2 million that were consumed."""
    folder = tmp_path / "run"
    folder.mkdir()
    text = write_text(tmp_path / "text", 2000)
    last = 1_000_001
    words = argv(text, folder, "--train-iters", str(last + 1), "--train-range-to-skip", "2", str(last),
                 "--log-interval", "100", "--save-interval", "10000000", "--global-batch-size", "2",
                 "--split", "100,0,0", "--dataloader-type", "cyclic")
    done = run_without_metrics(folder, words)
    assert len(reads(folder)) == 4
    assert f"skipping iterations 2 to {last}: 2000000 samples, 64000000 tokens are not trained\n" in done
    assert f" iteration  {last // 100 * 100}/ {last + 1} | consumed samples: " in done
    assert float((folder / "seconds").read_text()) < 1.0
    assert store.load(folder / "save").state.consumed_train_samples == 2 * (last + 1)


def run_without_metrics(folder: Path, words: list[str]) -> str:
    """A row for each of a million iterations would be a file of 300 MB: a run without one."""
    run_ranks(1, bare_run, words, str(folder))
    return (folder / "log.0").read_text()


def bare_run(rank: int, world: int, words: list[str], folder: str) -> None:
    assert _rank(rank, world, words, f"{folder}/log", None, functools.partial(time_skipping, folder)) == 0
    assert os.path.getsize(f"{folder}/log.0") > 0
