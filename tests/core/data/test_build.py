"""From data flags to datasets: target sizes, splits and blends, the record of the data order, and
bad requests."""

import json

import numpy as np
import pytest

from megatron.config.data import DataConfig
from megatron.data.blend.blended_dataset import BlendedDataset
from megatron.data.build import read_blends
from megatron.data.cyclic_sampler import CyclicSampler
from megatron.data.data_order import data_order_fingerprint
from megatron.data.gpt_dataset import GPTDataset, MockGPTDataset
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.order_change import data_order_differences
from megatron.data.sampler import SequentialSampler
from tests import problems
from tests.core.data.corpora import build_datasets, data_flags, write_corpus
from tests.problems import numbers

COMMON = {"sequence_length": 8, "seed": 7, "vocab_size": 1000, "eod": 999}


@pytest.fixture
def corpora(tmp_path) -> list[str]:
    """Three corpora of 40 to 60 documents."""
    random = np.random.default_rng(3)
    return [
        write_corpus(tmp_path / name, random.integers(1, 40, 40 + 10 * n), seed=n)
        for n, name in enumerate("abc")
    ]


def build(sizes=(50, 20, 4), changes=None, **flags):
    return build_datasets(data_flags(**flags), sizes=sizes, **{**COMMON, **(changes or {})})


def test_data_must_be_named():
    with problems.raises(ValueError, "data-missing", "--data-path"):
        read_blends(DataConfig())


def test_one_corpus(corpora, capsys):
    train, valid, test = build(data_path=[corpora[0]], split="80,15,5")
    out = capsys.readouterr().out.splitlines()
    assert out[0] == (
        "INFO:megatron.core.datasets.blended_megatron_dataset_config:"
        "Let split_matrix = [(0, 0.8), (0.8, 0.9500000000000001), (0.9500000000000001, 1.0)]"
    )
    assert sum("Load the _IndexReader" in line for line in out) == 1
    assert [d.index_split for d in (train, valid, test)] == ["train", "valid", "test"]
    assert [d.sequences for d in (train, valid, test)] == [
        range(0, 32),
        range(32, 38),
        range(38, 40),
    ]
    corpus = IndexedDataset(corpora[0])
    alone = GPTDataset(corpus, sequence_length=8, num_samples=20, seed=7, sequences=range(32, 38))
    assert [valid[i].tolist() for i in range(len(valid))] == [
        alone[i].tolist() for i in range(len(alone))
    ]


def test_no_validation_set_is_built_where_nothing_is_validated(corpora):
    for order in ("megatron", "epoch"):
        flags = {"train_data_path": corpora[:1], "valid_data_path": corpora[1:]}
        train, valid, _ = build(
            (50, 0, 0), **flags, multiple_validation_sets=True, data_order=order
        )
        assert valid is None
        assert data_order_fingerprint(train, valid)["valid"] is None


def test_the_cache_lies_beside_the_data_or_where_asked(corpora, tmp_path):
    build(data_path=[corpora[0]], split="80,15,5")
    beside = tmp_path / "a" / "cache" / "GPTDataset_indices"
    assert len(list(beside.iterdir())) == 3 * 4
    build(data_path=corpora[1:], split="80,15,5", data_cache_path=str(tmp_path / "asked"))
    names = [path.name.split("-")[1] for path in (tmp_path / "asked").iterdir()]
    assert (names.count("GPTDataset"), names.count("BlendedDataset")) == (2 * 3 * 4, 3 * 3)
    assert not (tmp_path / "b").exists()


def test_splits_without_share_or_samples_are_none(corpora):
    train, valid, test = build((50, 20, 4), data_path=[corpora[0]], split="90,10,0")
    assert train and valid and test is None
    train, valid, test = build((50, 0, 0), data_path=[corpora[0]], split="100,1,0")
    assert train and valid is None and test is None


def test_a_weighted_blend(corpora):
    train, valid, test = build(
        data_path=["0.2", corpora[0], "0.5", corpora[1], "0.3", corpora[2]], split="80,15,5"
    )
    assert [len(d) for d in (train, valid, test)] == [10 + 25 + 15, 4 + 10 + 6, 1 + 2 + 2]
    assert [d.num_samples for d in train.datasets] == [11, 26, 16]
    assert np.bincount(train.dataset_index).tolist() == [10, 25, 15]


def test_a_blend_without_weights(corpora):
    train, valid, _ = build((50, 20, 0), data_path=corpora, split="80,20,0")
    assert train.weights == pytest.approx(
        [len(d) / sum(map(len, train.datasets)) for d in train.datasets]
    )
    assert (
        [d.num_samples for d in train.datasets] == [None] * 3
        and len(train) == 50
        and len(valid) == 20
    )
    everything, _, _ = build((None, 0, 0), data_path=corpora, split="100,0,0")
    assert everything.size is None and len(everything) == sum(len(d) for d in everything.datasets)
    capped, _, _ = build((10**6, 0, 0), data_path=corpora, split="100,0,0")
    assert len(capped) == len(everything)


def test_one_weighted_corpus_is_a_blend_of_one(corpora):
    train, _, _ = build((50, 0, 0), data_path=["1", corpora[0]])
    plain, _, _ = build((50, 0, 0), data_path=[corpora[0]])
    assert isinstance(train, BlendedDataset) and isinstance(plain, GPTDataset) and len(train) == 50


def test_data_of_each_split(corpora, tmp_path):
    train, valid, test = build(
        (50, 20, 4),
        train_data_path=["0.5", corpora[0], "0.5", corpora[1]],
        valid_data_path=[corpora[2]],
    )
    assert isinstance(train, BlendedDataset) and len(train) == 50 and test is None
    assert (
        valid.sequences == range(60)
        and valid.index_split == "valid"
        and valid.description["split"] is None
    )
    path = tmp_path / "blends.json"
    path.write_text(
        json.dumps({"train": ["0.5", corpora[0], "0.5", corpora[1]], "valid": corpora[2]})
    )
    again = build((50, 20, 4), per_split_data_args_path=str(path))
    assert [train[i].tolist() for i in range(50)] == [again[0][i].tolist() for i in range(50)]
    assert valid[3].tolist() == again[1][3].tolist()


def test_mock_data_needs_no_files(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sets = build((100, 10, 10), {"sequence_length": 256}, mock_data=True)
    assert all(isinstance(d, MockGPTDataset) for d in sets) and list(tmp_path.iterdir()) == []
    assert [d.sequences for d in sets] == [
        range(0, 33333),
        range(33333, 66667),
        range(66667, 100000),
    ]
    assert sets[0][0].max() < 1000 and len(sets[0]) >= 100
    assert "Let split_matrix = [(0, 0.333" in capsys.readouterr().out
    assert build((100, 0, 0), {"sequence_length": 256}, mock_data=True)[1] is None


@pytest.mark.parametrize(
    ("flags", "code", "named"),
    [
        ({}, "data-missing", ["--data-path"]),
        (
            {"data_path": ["a"], "mock_data": True},
            "two-data-sources",
            ["--data-path", "--mock-data"],
        ),
        (
            {"data_path": ["a"], "train_data_path": ["b"]},
            "two-data-sources",
            ["--data-path", "--train-data-path"],
        ),
        (
            {"data_path": ["a"], "data_args_path": "b"},
            "two-data-sources",
            ["--data-path", "--data-args-path"],
        ),
        (
            {"train_data_path": ["a"], "split": "1,1,1"},
            "split-with-data-per-split",
            ["--split 1,1,1", "--train-data-path"],
        ),
        (
            {"per_split_data_args_path": "x", "split": "1"},
            "split-with-data-per-split",
            ["--split 1", "--per-split-data-args-path"],
        ),
        (
            {"valid_data_path": ["1", "a", "b", "c"]},
            "blend-malformed",
            ["--valid-data-path: b"],
        ),
    ],
)
def test_flags_that_name_no_data_or_name_it_twice(flags, code, named):
    with problems.raises(ValueError, code, *named):
        read_blends(data_flags(**flags))


@pytest.mark.parametrize(
    ("flags", "sizes", "changes", "code", "named"),
    [
        ({"split": "80,15,5"}, (0, 0, 0), {}, "value-out-of-range", "--train-iters"),
        ({"split": "999,1,0"}, (50, 20, 4), {}, "split-leaves-no-data", "40 sequences"),
        ({"split": "x"}, (50, 20, 4), {}, "split-malformed", "--split x"),
        ({}, (50, 0, 0), {"sequence_length": 5000}, "data-too-small", "5000 needs 5001"),
        ({}, (50, 0, 0), {"vocab_size": 500}, "token-id-out-of-range", "500"),
        ({}, (50, 0, 0), {"seed": -3}, "value-out-of-range", "--seed -3"),
        (
            {"split": "90,10,0"},
            (50, 20, 4),
            {"sequence_length": 200},
            "data-too-small",
            "4 valid sequences",
        ),
    ],
)
def test_requests_the_data_cannot_meet(corpora, flags, sizes, changes, code, named):
    with problems.raises(ValueError, code, named):
        build(sizes, changes, data_path=[corpora[0]], **flags)


def test_weights_need_a_size(corpora):
    with problems.raises(ValueError, "weights-without-number-of-samples"):
        build((None, 0, 0), data_path=["1", corpora[0], "2", corpora[1]])


def test_token_ids_are_not_looked_at_unless_asked(corpora):
    assert build((50, 0, 0), {"vocab_size": 5, "check_tokens": False}, data_path=[corpora[0]])[0]


def fingerprint(sizes=(50, 20, 4), changes=None, **flags):
    train, valid, _ = build(sizes, changes, **flags)
    return json.loads(
        json.dumps(data_order_fingerprint(train, valid, SequentialSampler(len(train), 2).order()))
    )


def test_the_data_order_is_recorded(corpora, tmp_path):
    """What changes the order is named, with its flag; what does not change it is no difference."""
    given = {"data_path": [corpora[0]], "split": "80,20,0"}
    saved = fingerprint(**given)
    assert data_order_differences(saved, fingerprint(**given)) == []
    assert data_order_differences(saved, fingerprint((60, 20, 4), **given)) == []  # still one epoch
    # no validation: nothing to compare
    assert data_order_differences(saved, fingerprint((50, 0, 0), **given)) == []
    cases = {
        "train.sequences": fingerprint(**{**given, "split": "70,30,0"}),
        "train.num_epochs": fingerprint((5000, 20, 4), **given),
        "valid.num_epochs": fingerprint((50, 2000, 4), **given),
        "train.sequence_length": fingerprint(changes={"sequence_length": 9}, **given),
        "train.seed": fingerprint(changes={"seed": 8}, **given),
        "train.corpus.idx_sha256": fingerprint(**{**given, "data_path": [corpora[1]]}),
        "train.kind": fingerprint(**{**given, "data_path": corpora[:2]}),
        "train.corpus.eod": fingerprint(changes={"sequence_length": 256}, mock_data=True),
    }
    for key, now in cases.items():
        lines = data_order_differences(saved, now)
        assert any(line.startswith(f"{key}: ") for line in lines), (key, lines)
    line = data_order_differences(saved, cases["train.sequence_length"])[0]
    assert numbers(line) == [8, 9] and line.endswith("(--seq-length)")


def test_the_order_of_a_blend(corpora):
    words = ["0.2", corpora[0], "0.8", corpora[1]]
    saved = fingerprint((50, 0, 0), data_path=words)
    assert data_order_differences(saved, fingerprint((60, 0, 0), data_path=words)) == []
    weights = fingerprint((50, 0, 0), data_path=["0.3", corpora[0], "0.7", corpora[1]])
    assert [line.split(":")[0] for line in data_order_differences(saved, weights)] == [
        "train.weights"
    ]
    swapped = fingerprint((50, 0, 0), data_path=["0.2", corpora[0], "0.8", corpora[2]])
    assert any(
        line.startswith("train.datasets.1.corpus")
        for line in data_order_differences(saved, swapped)
    )
    more = fingerprint((50, 0, 0), data_path=[*words, "1", corpora[2]])
    assert any(line.startswith("train.datasets:") for line in data_order_differences(saved, more))


def test_the_cyclic_order_depends_on_the_layout(corpora):
    train, valid, _ = build(data_path=[corpora[0]], split="80,20,0")
    first, second = (
        data_order_fingerprint(train, valid, CyclicSampler(len(train), 2, 0, dp).order())
        for dp in (1, 2)
    )
    [line] = data_order_differences(first, second)
    assert line.startswith("sampler.data_parallel_size: ") and numbers(line) == [1, 2]
