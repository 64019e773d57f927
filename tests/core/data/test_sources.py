"""The data sources: which flags choose which, and one more source, written here in a few lines."""

import numpy as np
import pytest

from megatron.config.data import DataConfig
from megatron.data import sources
from megatron.data.data_order import data_order_fingerprint
from megatron.data.plan_table import Row
from megatron.data.sample_lookup import TokenSpan, check_document
from megatron.data.samples import Samples
from megatron.data.subsets import subset_names
from tests.core.data.corpora import build_datasets, planned_rows, write_corpus
from tests.problems import raises


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        ({}, sources.MegatronOrder),
        ({"data_order": "epoch"}, sources.EpochOrder),
        ({"mock_data": True}, sources.Mock),
        ({"mock_data": True, "data_order": "epoch"}, sources.Mock),
    ],
)
def test_the_flags_choose_the_source(flags, kind):
    assert type(sources.source_of(DataConfig(**flags))) is kind


class Counting:
    """Sample k is k, k + 1, ...: the data set of the source below."""

    name = "counting"
    index_split = "train"

    def __init__(self, size, length):
        self.size = size
        self.length = length

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return np.arange(index, index + self.length + 1)

    def order(self):
        return {"kind": "Counting", "sequence_length": self.length}

    def prefixes(self):
        return [self.name]

    def spans_of(self, index):
        return [TokenSpan(self.name, 0, index, self.length + 1, None, None)]

    def samples_showing(self, prefix, document):
        check_document(document, prefix, 1)
        return dict.fromkeys(range(self.size), self.length + 1)


class CountingSource:
    def build(self, data, request, rows):
        rows += self.plan_rows(data, request)
        return Counting(request.sizes[0], request.sequence_length), None, None

    def plan_rows(self, data, request):
        size = request.sizes[0]
        return [Row("train", "counting", 1, size, size, request.sequence_length)]


def test_another_source_is_a_class_and_a_row_of_the_table(monkeypatch):
    row = sources.SourceRow(lambda data: data.data_order == "counting", CountingSource())
    monkeypatch.setattr(sources, "SOURCES", (row, *sources.SOURCES))
    data = DataConfig(data_order="counting")
    rows = []
    train, valid, test = build_datasets(data, rows, sizes=(5, 0, 0), sequence_length=3)
    assert train[2].tolist() == [2, 3, 4, 5] and valid is None and test is None
    assert rows == planned_rows(data, (5, 0, 0), 3)
    assert data_order_fingerprint(train, valid)["train"]["kind"] == "Counting"
    assert subset_names(train) == ["counting"]
    assert Samples(train, vocab_size=8)[4].tokens.tolist() == [4, 5, 6, 7]
    with pytest.raises(ValueError, match=r"counting.bin: token 7 of document 0 .*\b7\b"):
        Samples(train, vocab_size=7)[4]
    with raises(ValueError, "value-out-of-range", "--document 1"):
        train.samples_showing("counting", 1)


@pytest.mark.parametrize(
    "flags",
    [
        {"data_path": ("A",)},
        {"data_path": ("1", "A", "2", "B")},
        {"data_path": ("1", "A", "2", "B"), "data_order": "epoch"},
    ],
    ids=["megatron", "blend", "epoch"],
)
def test_what_a_sample_shows_is_what_shows_the_document(flags, tmp_path):
    """spans_of and samples_showing are each other's inverse, for every source of files."""
    words = {name: write_corpus(tmp_path / name, [7, 3, 9, 12, 5] * 4) for name in "AB"}
    named = {
        flag: tuple(words.get(word, word) for word in value) if flag.endswith("path") else value
        for flag, value in flags.items()
    }
    data = DataConfig(split="1,0,0", **named)
    train, _, _ = build_datasets(
        data, sizes=(20, 0, 0), sequence_length=8, vocab_size=1000, eod=999
    )
    held = {}
    for k in range(len(train)):
        for piece in train.spans_of(k):
            counts = held.setdefault((piece.prefix, piece.document), {})
            counts[k] = counts.get(k, 0) + piece.length
    for prefix in train.prefixes():
        for document in range(20):
            assert train.samples_showing(prefix, document) == held.get((prefix, document), {})
