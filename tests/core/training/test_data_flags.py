"""Flags of the data on whole small runs: the epoch order, another mix from a checkpoint on,
validation sets."""

import json
import re
from pathlib import Path

import pytest

from megatron.data.indexed_dataset import IndexedDataset
from megatron.training import build_data, evaluation
from tests.forkrun import RanksFailed
from tests.runs import NO_DROPOUT, SMALL, Finished, train, with_flags, write_text


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("data")
    sizes = {"a": 200, "b": 90, "c": 40}
    return [
        write_text(folder / name, documents, seed)
        for seed, (name, documents) in enumerate(sizes.items())
    ]


def tell_samples() -> None:
    """A hook: the samples of each data set, and of each evaluation, are printed."""
    build, evaluate = build_data.build_data, evaluation.evaluate

    def building(*args):
        data = build(*args)
        print("PLANNED", json.dumps([(row.split, row.documents, row.samples) for row in data.rows]))
        return data

    def evaluating(run, forward_step, samples, count, *args):
        print("READ", count * run.plan.evaluation_batch.divisor)
        return evaluate(run, forward_step, samples, count, *args)

    build_data.build_data, evaluation.evaluate = building, evaluating


def run(folder: Path, *more: str, world: int = 1) -> Finished:
    words = [
        *SMALL,
        *NO_DROPOUT,
        "--train-iters",
        "4",
        "--save",
        str(folder / "save"),
        "--load",
        str(folder / "save"),
        "--save-interval",
        "4",
    ]
    return train(folder, with_flags(words, *more), world, hook=tell_samples)


def test_the_epoch_order_does_not_depend_on_the_length_of_the_run_nor_on_the_ranks(texts, tmp_path):
    """Eight iterations, or four and then four more, on one rank or two: the same losses."""
    flags = [
        "--data-path",
        "1",
        texts[0],
        "2",
        texts[1],
        "--split",
        "80,20,0",
        "--data-order",
        "epoch",
        "--lr-decay-style",
        "constant",
    ]
    whole = run(tmp_path / "whole", *flags, "--train-iters", "8", world=2)
    run(tmp_path / "parts", *flags)
    parts = run(tmp_path / "parts", *flags, "--train-iters", "8", "--override-opt-param-scheduler")
    losses = [row["lm_loss"] for row in parts.rows]
    assert len(losses) == 8 and losses == pytest.approx(
        [row["lm_loss"] for row in whole.rows], rel=1e-5
    )
    planned = json.loads(re.search("^PLANNED (.*)$", whole.first_rank_log, re.M)[1])
    assert planned[:2] == [["train", 160, 21], ["train", 72, 43]]
    megatron = run(tmp_path / "megatron", *flags[:-4], "--lr-decay-style", "constant")
    assert megatron.rows[0]["lm_loss"] != losses[0]


def test_another_mix_has_to_be_asked_for(texts, tmp_path):
    flags = ["--split", "100,0,0", "--data-order", "epoch", "--eval-iters", "0"]
    run(tmp_path / "run", *flags, "--data-path", "1", texts[0], "3", texts[1])
    other = [
        *flags,
        "--train-iters",
        "8",
        "--lr-decay-style",
        "constant",
        "--data-path",
        "1",
        texts[1],
        "1",
        texts[2],
    ]
    other += ["--override-opt-param-scheduler"]
    with pytest.raises(RanksFailed, match=r"--continue-data-mix.*\[data-order-differs\]"):
        run(tmp_path / "run", *other)
    changed = run(tmp_path / "run", *other, "--continue-data-mix")
    assert [row["iteration"] for row in changed.rows] == list(range(1, 9))
    again = run(tmp_path / "run", *other, "--train-iters", "10")  # with the mix it has now
    assert [row["iteration"] for row in again.rows] == list(range(1, 11))


def test_several_validation_sets_have_their_own_losses(texts, tmp_path):
    """Each set's loss is that of a run which has this set alone; the flag changes nothing else."""
    train_on = ["--train-data-path", texts[0], "--eval-interval", "2"]
    both = run(
        tmp_path / "both", *train_on, "--valid-data-path", *texts[1:], "--multiple-validation-sets"
    )
    alone = [run(tmp_path / f"alone{n}", *train_on, "--valid-data-path", texts[n]) for n in (1, 2)]
    sets = ("validation-0", "validation-1")
    assert [place for *place, _ in both.evaluations[:4]] == [[s, n] for n in (2, 4) for s in sets]
    for name, single in zip(sets, alone, strict=True):
        assert [more for one, *more in both.evaluations if one == name] == [
            more for _, *more in single.evaluations
        ]


@pytest.mark.campaign
@pytest.mark.parametrize("order, world", [("megatron", 1), ("epoch", 2)])
def test_full_validation_reads_all_of_the_set_each_time(texts, tmp_path, order, world):
    """At a learning rate of 0 each validation has the same loss, whatever --eval-iters says;
    without it each reads on."""
    flags = [
        "--train-data-path",
        texts[0],
        "--valid-data-path",
        texts[2],
        "--eval-interval",
        "2",
        "--lr",
        "0",
        "--data-order",
        order,
        "--lr-decay-style",
        "constant",
    ]
    full = run(tmp_path / "full", *flags, "--full-validation", world=world)
    more = run(tmp_path / "more", *flags, "--full-validation", "--eval-iters", "3", world=world)
    parts = run(tmp_path / "parts", *flags, world=world)
    losses = [loss for *_, loss in full.evaluations]
    assert len(losses) == 2 and len(set(losses)) == 1
    assert full.evaluations == more.evaluations
    assert len({loss for *_, loss in parts.evaluations}) == 2
    samples = (int(IndexedDataset(texts[2]).sequence_lengths.sum()) - 1) // 32
    reads = [int(read) for read in re.findall(r"^READ (\d+)$", full.first_rank_log, re.M)]
    assert len(reads) == 2 and all(samples - 2 * world < read <= samples for read in reads)
