"""Flags of the data on whole small runs: the epoch order, another mix from a checkpoint on,
validation sets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

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
    return train(folder, with_flags(words, *more), world)


def validations(log: str) -> list[tuple[str, str, float]]:
    """(set, where, loss) of every validation line."""
    return [
        (name, where, float(loss))
        for name, where, loss in re.findall(
            r" validation(\S*) loss at (.*?) \| lm loss value: (\S+)", log
        )
    ]


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
    table = [
        line.split()
        for line in whole.first_rank_log.splitlines()
        if re.match(r"  (split +data|train|valid) ", line)
    ]
    assert table[0] == "split data documents tokens samples share epochs".split()
    assert [(row[0], row[2], row[4]) for row in table[1:3]] == [
        ("train", "160", "21"),
        ("train", "72", "43"),
    ]
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
    found = validations(both.log)
    assert [(name, where) for name, where, _ in found[:4]] == [
        ("-0", "iteration 2"),
        ("-1", "iteration 2"),
        ("-0", "iteration 4"),
        ("-1", "iteration 4"),
    ]
    for number, single in enumerate(alone):
        assert [(w, loss) for name, w, loss in found if name == f"-{number}"] == [
            v[1:] for v in validations(single.log)
        ]


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
    losses = [loss for *_, loss in validations(full.log)]
    assert (
        len(losses) == 3
        and len(set(losses)) == 1
        and losses == [loss for *_, loss in validations(more.log)]
    )
    assert len({loss for *_, loss in validations(parts.log)}) == 3
    samples = int(re.search(r"\n  valid .* ([\d,]+) +100.000 %", full.first_rank_log)[1])
    read = int(re.search(r"Evaluating on (\d+) samples", full.first_rank_log)[1])
    assert samples - 2 * world < read <= samples and read > 8
