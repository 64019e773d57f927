"""Blends: the words of --split and --data-path, sizes, the greedy choice, and what users hear about
bad weights."""

import json
import math
import pickle

import numpy as np
import pytest

from megatron.data.blend.blended_dataset import (
    BlendedDataset,
    blend_sizes,
    parse_blend,
    read_blend_file,
    read_split_blends,
)
from megatron.data.blend.splits import normalize, parse_split, split_range
from megatron.data.gpt_dataset import GPTDataset
from megatron.data.index_cache import IndexCache
from megatron.data.indexed_dataset import IndexedDataset
from tests import problems
from tests.core.data.corpora import write_corpus


@pytest.fixture
def members(tmp_path) -> list[GPTDataset]:
    """Three datasets of 9, 24 and 4 samples (one epoch each) of 5 tokens; the tokens of the n-th
    begin at 1000 n."""
    found = []
    for number, documents in enumerate((4, 10, 2)):
        path = tmp_path / f"part{number}"
        corpus = IndexedDataset(write_corpus(path, [10] * documents))
        found.append(GPTDataset(corpus, sequence_length=4, num_samples=None, seed=1))
    assert [len(dataset) for dataset in found] == [9, 24, 4]
    return found


def test_golden_split():
    matrix = parse_split("949,50,1")
    assert matrix == [(0, 0.949), (0.949, 0.999), (0.999, 1.0)]
    assert str(matrix) == "[(0, 0.949), (0.949, 0.999), (0.999, 1.0)]"
    ranges = [split_range(part, 79000) for part in matrix]
    assert ranges == [range(0, 74971), range(74971, 78921), range(78921, 79000)]


@pytest.mark.parametrize(
    ("split", "matrix"),
    [
        ("100,0,0", [(0, 1.0), None, None]),
        ("1", [(0, 1.0), None, None]),
        ("0,1", [None, (0.0, 1.0), None]),
        ("969, 30, 1", [(0, 0.969), (0.969, 0.999), (0.999, 1.0)]),
        ("98/2/0", [(0, 0.98), (0.98, 1.0), None]),
        (".5,.25,.25", [(0, 0.5), (0.5, 0.75), (0.75, 1.0)]),
        ("1,1,1", [(0, 1 / 3), (1 / 3, 2 / 3), (2 / 3, 1.0)]),
    ],
)
def test_splits(split, matrix):
    assert parse_split(split) == matrix


@pytest.mark.parametrize(
    "split", ["", "a,b,c", "0,0,0", "1,2,3,4", "1.2.3,4", "-5,50,50", "1,nan,2", "inf,1,1", "8;2"]
)
def test_bad_splits(split):
    with problems.raises(ValueError, "split-malformed", "--split"):
        parse_split(split)


def test_bounds_round_half_to_even():
    assert split_range((0.5, 1.0), 5) == range(2, 5) and split_range((0, 0.5), 7) == range(0, 4)
    assert split_range((0.999, 1.0), 12) == range(12, 12)


@pytest.mark.parametrize(
    ("items", "blend"),
    [
        (["a"], (["a"], None)),
        (["a", "b"], (["a", "b"], None)),
        (["a", "b", "c"], (["a", "b", "c"], None)),
        (["0.3", "a", "0.7", "b"], (["a", "b"], [0.3, 0.7])),
        (["1", "a"], (["a"], [1.0])),
        (("30", " a ", "70", "b"), (["a", "b"], [30.0, 70.0])),
        (["0.3", "a", "0.7"], (["0.3", "a", "0.7"], None)),
        (["a", "a"], (["a", "a"], None)),
    ],
)
def test_blend_grammar(items, blend):
    assert parse_blend(items) == blend


@pytest.mark.parametrize(
    ("items", "named"),
    [
        ([], "--data-path: names"),
        (["a", ""], "--data-path: names"),
        (["0.3", "a", "b", "0.7"], "b stands"),
        (["0", "a", "0", "b"], "weight 0 "),
        (["-1", "a", "2", "b"], "weight -1 "),
        (["nan", "a", "1", "b"], "weight nan "),
        (["inf", "a"], "weight inf "),
    ],
)
def test_bad_blends(items, named):
    with problems.raises(ValueError, "blend-malformed", named):
        parse_blend(items)


def test_blend_files(tmp_path):
    words = tmp_path / "words"
    blends = tmp_path / "blends.json"
    words.write_text("0.3 a\n  0.7\tb\n")
    assert read_blend_file(str(words)) == (["a", "b"], [0.3, 0.7])
    blends.write_text('{"train": ["0.3", "a", 0.7, "b"], "test": "c d"}')
    assert read_split_blends(str(blends)) == [(["a", "b"], [0.3, 0.7]), None, (["c", "d"], None)]


@pytest.mark.parametrize(
    ("text", "code", "named"),
    [
        ("{", "blend-file-malformed", "column 2"),
        ("[1]", "blend-file-malformed", "train, valid, test"),
        ("{}", "blend-file-malformed", "train, valid, test"),
        ('{"training": ["a"]}', "blend-file-malformed", "train, valid, test"),
        ('{"train": 3}', "blend-file-malformed", "json, train:"),
        ('{"train": [["a"]]}', "blend-file-malformed", "json, train:"),
        ('{"train": []}', "blend-malformed", "json, train:"),
        ('{"valid": "1 a b 2"}', "blend-malformed", "json, valid: b"),
    ],
)
def test_bad_blend_files(tmp_path, text, code, named):
    path = tmp_path / "blends.json"
    path.write_text(text)
    with problems.raises(ValueError, code, f"--per-split-data-args-path {path}", named):
        read_split_blends(str(path))


def test_a_missing_blend_file():
    with problems.raises(ValueError, "file-not-readable", "--data-args-path"):
        read_blend_file("/gone")


def test_sizes():
    assert blend_sizes([0.3, 0.7], 1000, 0.005) == ([300, 700], [302, 704])
    assert blend_sizes([1 / 3, 2 / 3], 100, 0.0) == ([34, 67], [34, 67])
    assert all(
        type(size) is int for sizes in blend_sizes(np.array([0.5, 0.5]), 9, 0.5) for size in sizes
    )


def test_weights_decide(members):
    blend = BlendedDataset(members, [5.0, 12.0, 3.0], 20)
    assert len(blend) == 20 and blend.weights == normalize([5.0, 12.0, 3.0])
    for upto in range(1, 21):
        counts = np.bincount(blend.dataset_index[:upto], minlength=3)
        assert all(
            abs(count - upto * weight) <= 1
            for count, weight in zip(counts, blend.weights, strict=True)
        )
    for index in range(20):
        dataset, sample = blend.source(index)
        assert blend[index].tolist() == members[dataset][sample].tolist()
        assert blend.locate(index) == members[dataset].locate(sample)
    for outside in (-1, 20):
        with pytest.raises(IndexError):
            blend[outside]


def test_no_size_uses_everything_once(members):
    blend = BlendedDataset(members, [9, 24, 4], None)
    assert len(blend) == 37
    assert sorted(blend.source(i) for i in range(37)) == [
        (d, s) for d, n in enumerate((9, 24, 4)) for s in range(n)
    ]


def test_a_longer_blend_only_goes_on(members):
    short, longer = (BlendedDataset(members, [5.0, 12.0, 3.0], size) for size in (7, 20))
    assert [short.source(i) for i in range(7)] == [longer.source(i) for i in range(7)]
    assert short.order() == longer.order()
    assert short.order() != BlendedDataset(members, [5.0, 12.0, 4.0], 7).order()
    json.dumps(longer.order())


def test_the_blend_is_cached_where_asked(members, tmp_path, capsys):
    cache = IndexCache(str(tmp_path / "cache"), "--data-cache-path")
    head = "INFO:megatron.core.datasets.blended_dataset:"
    first = BlendedDataset(members, [1, 2, 1], 12, cache=cache)
    assert capsys.readouterr().out.splitlines()[-2:] == [
        f"{head}Build and save the BlendedDataset indices",
        f"{head}> BlendedDataset length: 12",
    ]
    second = BlendedDataset(members, [1, 2, 1], 12, cache=cache)
    assert capsys.readouterr().out.splitlines()[-2] == f"{head}Load the BlendedDataset indices"
    assert [first.source(i) for i in range(12)] == [second.source(i) for i in range(12)]
    assert [second.source(i) for i in range(12)] == [
        pickle.loads(pickle.dumps(second)).source(i) for i in range(12)
    ]
    for weights, size in (([1, 2, 2], 12), ([1, 2, 1], 11), ([9, 24, 4], None)):
        capsys.readouterr()
        BlendedDataset(members, weights, size, cache=cache)
        assert f"{head}Build" in capsys.readouterr().out


def test_asking_one_dataset_for_too_much(members):
    named = ("--mid-level-dataset-surplus 0.005", "needs 5 samples", "part2, 4 were")
    with problems.raises(ValueError, "dataset-surplus-too-small", *named):
        BlendedDataset(members, [1, 1, 1], 15, surplus=0.005)


@pytest.mark.parametrize(
    "weights", [[1, 0, 1], [1, -1, 1], [math.nan, 1, 1], [math.inf, 1, 1], [0, 0, 0]]
)
def test_bad_weights(members, weights):
    with problems.raises(ValueError, "blend-malformed", "--data-path"):
        BlendedDataset(members, weights, 5)


def test_a_blend_of_nothing(members):
    with pytest.raises(ValueError, match=r"\b0 samples"):
        BlendedDataset(members, [1, 1, 1], 0)


def test_more_datasets_than_sixteen_bits_can_number(members):
    """Megatron's ids are int16: of 32,767 datasets and more, ours are int32."""
    blend = BlendedDataset(members[:1] * 40_000, [1.0] * 39_999 + [40_000.0], 3)
    assert blend.dataset_index.dtype == np.int32 and blend.source(0)[0] == 39_999
    assert BlendedDataset(members[:1] * 32_766, [1.0] * 32_766, 3).dataset_index.dtype == np.int16
