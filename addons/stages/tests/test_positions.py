"""Where each data set goes on: every token of every data set is read as often as its share of the
samples says, in whatever stages, and no copy of it before all others were."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron.addons.stages.lines import staged
from megatron.config.command_line import planned
from megatron.data.epoch.proportional_draws import Shares, whole_weights
from megatron.data.request import Before, DataRequest
from megatron.data.sources import source_of
from megatron.features.registry import RunConfig
from megatron.training.feature import data_source
from tests.pairs import PairWriter
from tests.problems import raises
from tests.runs import SMALL, with_flags

ORDERS = ("megatron", "epoch")
TOKENS = {"a": 1000, "b": 777, "c": 501}
# mixes and lengths that change, the lengths by no whole factor
STAGES = """
[[stage]]
until_iterations = 10
data-path = ["0.7", "{0}/a", "0.3", "{0}/b"]

[[stage]]
until_iterations = 15
data-path = ["0.5", "{0}/a", "0.5", "{0}/c"]
seq-length = 77
global-batch-size = 3
micro-batch-size = 1

[[stage]]
data-path = ["1", "{0}/c", "3", "{0}/b", "2", "{0}/a"]
seq-length = 48
global-batch-size = 6
"""


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    """Data sets in which every token has another id: its number in the file."""
    folder = tmp_path_factory.mktemp("data")
    random = np.random.default_rng(5)
    for name, count in TOKENS.items():
        with PairWriter(folder / name, np.int32) as builder:
            done = 0
            while done < count:
                length = min(int(random.integers(1, 60)), count - done)
                builder.add_document(np.arange(done, done + length), [length])
                done += length
    return folder


def of_stages(texts: Path, text: str, order: str, *more: str):
    """The configuration of each stage of a file, with the iteration and sample before it."""
    file = texts / "stages.toml"
    file.write_text(text.format(texts))
    argv = with_flags(
        [*SMALL, "--data-path", f"{texts}/a", "--split", "100,0,0", "--eval-iters", "0"],
        *("--stages", str(file), "--save", str(texts / "save"), "--train-iters", "20"),
        *("--position-embedding-type", "rope", "--vocab-size", "2000", "--data-order", order),
        *("--max-position-embeddings", "128"),
        *more,
    )
    line, problems = planned(argv, 1, RunConfig)
    assert not problems, problems
    own = next(group for group in vars(line.config).values() if hasattr(group, "stage_file"))
    return staged(replace(line, words=argv), own)


def datasets(texts: Path, text: str, order: str):
    """(first sample, end, data set) of each stage, each of which begins with what the one before
    has left in its checkpoint."""
    before: Before | None = None
    for each in of_stages(texts, text, order):
        request = DataRequest(
            sizes=(each.samples[1], 0, 0),
            sequence_length=each.config.model.seq_length,
            vocab_size=2000,
            before=before,
        )
        train, _, _ = data_source(each.config).build(each.config.data, request, [])
        yield (*each.samples, train)
        before = Before({**train.order()}, each.samples[1])


@pytest.mark.parametrize("order", ORDERS)
def test_no_token_is_repeated_or_lost(texts, order):
    """A mix, sequence length and batch that change: of each data set the tokens so far are whole
    epochs, and of the last a part without a repeat."""
    read = {name: Counter() for name in TOKENS}
    for first, end, train in datasets(texts, STAGES, order):
        for index in range(first, end):
            name = Path(train.datasets[train.source(index)[0]].name).name
            sample = train[index]
            assert len(sample) == train.datasets[0].length + 1
            read[name].update(sample[:-1].tolist())
        for name, counts in read.items():
            whole, rest = divmod(counts.total(), TOKENS[name])
            often = Counter(counts[token] for token in range(TOKENS[name]))
            expected = {whole + 1: rest, whole: TOKENS[name] - rest}
            assert often == Counter({n: k for n, k in expected.items() if k}), (name, end)
    assert all(counts.total() > TOKENS[name] for name, counts in list(read.items())[:1])


@pytest.mark.parametrize("order", ORDERS)
def test_samples_are_text_that_follows_on(texts, order):
    """Within a document the next token follows, and a sample is where it says it is."""
    for first, end, train in datasets(texts, STAGES, order):
        for index in range(first, end, 7):
            spans = train.spans_of(index)
            pieces = [
                np.fromfile(f"{span.prefix}.bin", np.int32)[span.first_byte // 4 :][: span.length]
                for span in spans
            ]
            assert np.array_equal(np.concatenate(pieces), train[index])
            if order == "epoch":
                size = TOKENS[Path(spans[0].prefix).name]
                assert set(np.diff(train[index]) % size) == {1}


def test_the_first_epoch_has_megatrons_order_of_documents(texts):
    """In Megatron's order the documents of the first epoch come as in a run of one epoch."""
    ((first, end, train),) = datasets(texts, '[[stage]]\ndata-path = ["{0}/a"]', "megatron")
    config = of_stages(texts, '[[stage]]\ndata-path = ["{0}/a"]', "megatron")[0].config
    plain, _, _ = source_of(config.data).build(
        config.data, DataRequest(sizes=(None, 0, 0), sequence_length=32, vocab_size=2000), []
    )
    unshuffled = [int(plain.shuffle_index.tolist().index(row)) for row in range(len(plain))]
    stream = train.datasets[0].stream
    for row, sample in enumerate(unshuffled):
        assert np.array_equal(stream.read(32 * row, 33), plain[sample])


@pytest.mark.parametrize("weights", [(1e-9, 1.0), (1.0, 1e-300, 3.0), (1e200, 7e199), (1, 1, 1)])
def test_draws_at_extreme_weights(weights):
    """Each draw adds one to the count of its source, at the first draws and at those past 2**40;
    the place in the source is the count before it."""
    shares = Shares(whole_weights(weights))
    for draw in (0, 1, 2**31 - 1, 2**31, 2**40 - 1, 2**40, 2**43 + 5):
        source, place = shares.source(draw)
        before, after = shares.counts(draw), shares.counts(draw + 1)
        assert sum(after) == draw + 1
        assert [b - a for a, b in zip(before, after, strict=True)] == [
            int(n == source) for n in range(len(weights))
        ]
        assert place == before[source]


def test_one_past_the_end(texts):
    """The last sample of a stage is its own; workers that read ahead get it once more; what is
    behind the run, or before the stage, is an error."""
    stages = list(datasets(texts, STAGES, "epoch"))
    first, end, train = stages[1]
    assert np.array_equal(train[end - 1], train[min(end, len(train) - 1)])
    assert len({train.source(index) for index in range(first, end)}) == end - first
    for index in (first - 1, len(train)):
        with pytest.raises(IndexError):
            train[index]
    assert sum(Shares(train.order()["weights"]).counts(end - first)) == end - first


@pytest.mark.parametrize(
    ("words", "code", "named"),
    [
        ('"1e308", "{0}/a", "1.7e308", "{0}/b"', "blend-malformed", "1e+308"),
        ('"1", "{0}/a", "1e-7", "{0}/b"', "stage-data-unread", "1e-07"),
        ('"1", "{0}/a", "1", "{0}/a"', "stage-data-twice", "a"),
    ],
)
@pytest.mark.parametrize("order", ORDERS)
def test_mixes_that_are_refused(texts, words, code, named, order):
    with raises(ValueError, code, named):
        list(datasets(texts, f"[[stage]]\ndata-path = [{words}]", order))


def test_numbers_of_epochs_are_refused(texts):
    with raises(ValueError, "blend-malformed", "epochs"):
        list(datasets(texts, '[[stage]]\ndata-path = ["epochs:2", "{0}/a"]', "epoch"))


@pytest.mark.parametrize("order", ORDERS)
def test_within_a_stage_nothing_changes(texts, order):
    """A resume within a stage with another mix, length, seed or end."""
    first, second, _ = of_stages(texts, STAGES, order)
    request = DataRequest(sizes=(second.samples[1], 0, 0), sequence_length=32, vocab_size=2000)
    train, _, _ = data_source(first.config).build(first.config.data, request, [])
    within = Before({**train.order()}, first.samples[1] - 1)
    same, _, _ = data_source(first.config).build(
        first.config.data, DataRequest(**{**vars(request), "before": within}), []
    )
    assert same.order() == train.order()
    for change in ({"seed": 5}, {"sequence_length": 31}):
        with raises(ValueError, "data-order-differs", *change):
            changed = DataRequest(**{**vars(request), "before": within, **change})
            data_source(first.config).build(first.config.data, changed, [])
    with raises(ValueError, "data-order-differs", "until"):
        moved = of_stages(texts, STAGES.replace("= 10", "= 12"), order)[0].config
        data_source(moved).build(moved.data, DataRequest(**{**vars(request), "before": within}), [])


@pytest.mark.parametrize("order", ORDERS)
def test_a_run_without_stages_goes_on_between_two(texts, order):
    """Its data sets begin with their first token then; within a stage it is refused."""
    first, second, _ = of_stages(texts, STAGES, order)
    request = {"sizes": (second.samples[1], 0, 0), "sequence_length": 77, "vocab_size": 2000}
    between = DataRequest(**request, before=Before({"kind": "EpochBlend"}, first.samples[1]))
    train, _, _ = data_source(second.config).build(second.config.data, between, [])
    assert [part.start for part in train.datasets] == [0, 0]
    within = DataRequest(**request, before=Before({"kind": "EpochBlend"}, first.samples[1] + 1))
    with raises(ValueError, "data-order-differs", first.samples[1] + 1):
        data_source(second.config).build(second.config.data, within, [])
