"""Metrics that `forward_step` returns by name: summed over ranks, averaged, logged."""

import functools
import json
import re
import sys

import pytest
import torch

from megatron.arguments import flags_of
from megatron.features.registry import RunConfig
from megatron.training import loop
from megatron.training.step import train_step
from tests.core.parity.layouts import CP, DISTRIBUTED, PP, TP
from tests.core.training.tiny_run import EOD, make_run, micro_batches, samples
from tests.forkrun import run_ranks
from tests.problems import raises
from tests.runs import NO_DROPOUT, SMALL, Finished, plot, train, with_flags

FORMATS = flags_of(RunConfig)["log_format"].choices


def with_metrics(make, batch, model):
    """The `forward_step` of pretrain_gpt.py with the metrics `make(batch, loss, tokens)` more."""
    output = plot().forward_step(batch, model)
    if model.output_layer is None:
        return output
    loss, tokens, metrics = output
    return loss, tokens, metrics | make(batch, loss, tokens)


def three_metrics(batch, loss, tokens):
    return {
        "loss again": (loss, tokens),
        "share of large ids": (batch.labels > 100).double(),
        "tokens per micro-batch": float(tokens),
    }


def add_metrics() -> None:
    """A hook."""
    step = loop.train_step

    def more(run, forward_step, *args):
        return step(run, functools.partial(with_metrics, three_metrics), *args)

    loop.train_step = more


def run(folder, *flags: str, world: int = 1) -> Finished:
    words = [*SMALL, *NO_DROPOUT, *"--mock-data --train-iters 4 --fp64 --log-interval 2".split()]
    return train(folder, with_flags(words, *flags), world, hook=add_metrics)


def own_script(rank: int, world: int, words: list[str]) -> None:
    """A program with a `forward_step` of its own."""
    sys.argv = ["mine.py", *words]
    plot().main(forward_step=functools.partial(with_metrics, three_metrics))


def test_a_script_passes_its_forward_step(tmp_path):
    file = tmp_path / "metrics.jsonl"
    words = [*SMALL, "--mock-data", "--train-iters", "4", "--metrics-file", str(file)]
    run_ranks(1, own_script, with_flags(words, "--eval-iters", "0"))
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["loss again"] for row in rows] == [row["lm_loss"] for row in rows] != []


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Finished:
    return run(tmp_path_factory.mktemp("alone"))


def values(finished: Finished) -> list[tuple]:
    return finished.series("loss again", "share of large ids", "tokens per micro-batch")


def test_means_over_the_global_batch(alone):
    rows = alone.rows
    assert len(rows) == 4
    for row in rows:
        assert row["loss again"] == row["lm_loss"]
        assert row["tokens per micro-batch"] == 2 * 32
        assert 0.0 < row["share of large ids"] < 1.0


@pytest.mark.parametrize(
    "layout, world",
    [
        pytest.param((TP, "2"), 2, id="tp 2", marks=pytest.mark.campaign),
        pytest.param((PP, "2"), 2, id="pp 2"),
        pytest.param((CP, "2"), 2, id="cp 2", marks=pytest.mark.campaign),
        pytest.param(DISTRIBUTED, 2, id="distributed optimizer", marks=pytest.mark.campaign),
    ],
)
def test_alike_in_every_layout(alone, tmp_path, layout, world):
    """In exact arithmetic but for the order of sums; a rank of cp has half the tokens."""
    found = run(tmp_path, *layout, world=world)
    share = 2.0 if CP in layout else 1.0
    for one, other in zip(values(found), values(alone), strict=True):
        assert one == pytest.approx((*other[:2], other[2] / share), rel=1e-12)


@pytest.mark.parametrize("form", FORMATS)
def test_logged_in_every_format(tmp_path, form):
    found = run(tmp_path, "--log-format", form)
    names = "loss again", "share of large ids", "tokens per micro-batch"
    lines = [line for line in found.log.splitlines() if "share of large ids" in line]
    assert lines
    last = found.rows[-1]
    mean = {name: sum(row[name] for row in found.rows[-2:]) / 2 for name in names}
    # the lines of a feature may be of one iteration
    shown = [mean] if form == "short" else [mean, last]
    text = re.sub(r"\s+", " ", found.log[found.log.rindex(names[0]) :])
    for name in names:
        value = re.search(re.escape(name) + r"[:= ]+([-+.\deE]+)", text)[1]
        assert any(float(value) == pytest.approx(one[name], rel=1e-3) for one in shown)


def test_a_pair_without_a_count_is_no_value():
    """As the mean over tokens of a kind that the batch has none of."""
    forward = functools.partial(with_metrics, lambda batch, loss, tokens: {"none": (0.0, 0)})
    outcome = train_step(make_run(), forward, micro_batches(samples(), 2), 1)
    assert outcome.metrics == {"none": None}


def test_masked_means_are_those_of_the_whole_batch():
    """A pair weighs micro-batches by their counts."""

    def last(batch, loss, tokens):
        ends = batch.labels == EOD
        return {"ends": (ends.sum(), 2), "position": ((ends * torch.arange(12)).sum(), ends.sum())}

    tokens = samples()
    outcome = train_step(
        make_run(), functools.partial(with_metrics, last), micro_batches(tokens, 2), 1
    )
    ends = (tokens[:, 1:] == EOD).nonzero()[:, 1].double()
    assert outcome.metrics["ends"] == len(ends) / len(tokens)
    assert outcome.metrics["position"] == pytest.approx(ends.mean().item(), rel=1e-15)


def test_a_pair_of_loss_and_tokens_is_accepted():
    def two(batch, model):
        return plot().forward_step(batch, model)[:2]

    one = train_step(make_run(), plot().forward_step, micro_batches(samples(), 2), 1)
    other = train_step(make_run(), two, micro_batches(samples(), 2), 1)
    assert (one.loss, one.grad_norm, one.metrics) == (other.loss, other.grad_norm, {})


def test_names_may_not_change():
    """The ranks reserve slots once."""
    made = make_run()
    train_step(made, plot().forward_step, micro_batches(samples(), 2), 1)
    forward = functools.partial(with_metrics, lambda batch, loss, tokens: {"new": 1.0})
    with raises(ValueError, "metrics-differ", "new"):
        train_step(made, forward, micro_batches(samples(), 2), 2)
