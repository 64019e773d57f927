"""GPTDataset: megatron-core's order by golden vectors, where its tokens lie, and what users hear
when data is short."""

import hashlib
import json
import pickle

import numpy as np
import pytest

from megatron.data.blend.splits import parse_split
from megatron.data.gpt_dataset import (
    GPTDataset,
    MockGPTDataset,
    MockSequences,
    describe,
    plan_epochs,
)
from megatron.data.index_cache import IndexCache
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.megatron_order import open_corpus
from tests import problems
from tests.core.data.corpora import LENGTHS, write_corpus

# requested samples -> epochs, samples, separate last epoch, document_index, sample_index,
# shuffle_index
GOLDEN = {
    6: (
        1,
        7,
        False,
        [2, 1, 5, 0, 4, 3],
        [[0, 0], [0, 4], [1, 0], [2, 1], [3, 1], [4, 0], [4, 4], [5, 1]],
        [5, 0, 3, 4, 2, 6, 1],
    ),
    9: (
        2,
        14,
        True,
        [2, 1, 5, 0, 4, 3, 0, 4, 3, 2, 5, 1],
        [
            [0, 0],
            [0, 4],
            [1, 0],
            [2, 1],
            [3, 1],
            [4, 0],
            [4, 4],
            [5, 1],
            [6, 3],
            [7, 2],
            [7, 6],
            [9, 1],
            [9, 5],
            [10, 1],
            [11, 1],
        ],
        [1, 0, 3, 2, 5, 4, 6, 9, 10, 12, 8, 11, 13, 7],
    ),
    13: (
        2,
        14,
        False,
        [1, 2, 5, 2, 3, 4, 1, 0, 4, 5, 0, 3],
        [
            [0, 0],
            [1, 1],
            [1, 5],
            [2, 1],
            [3, 1],
            [3, 5],
            [4, 1],
            [5, 3],
            [6, 0],
            [7, 1],
            [8, 0],
            [8, 4],
            [9, 1],
            [10, 1],
            [11, 0],
        ],
        [7, 11, 2, 3, 1, 9, 5, 4, 0, 8, 6, 10, 13, 12],
    ),
}


@pytest.fixture
def corpus(tmp_path) -> IndexedDataset:
    """The golden corpus; its tokens count up from 0, so a token is its own place."""
    return IndexedDataset(write_corpus(tmp_path / "golden", LENGTHS))


@pytest.mark.parametrize("requested", GOLDEN)
def test_golden_indices(corpus, requested):
    epochs, samples, separate, documents, starts, order = GOLDEN[requested]
    dataset = GPTDataset(corpus, sequence_length=4, num_samples=requested, seed=1234)
    assert (dataset.plan.num_epochs, len(dataset), dataset.plan.separate_last_epoch) == (
        epochs,
        samples,
        separate,
    )
    assert dataset.document_index.tolist() == documents
    assert dataset.sample_index.tolist() == starts
    assert dataset.shuffle_index.tolist() == order
    dtypes = [dataset.document_index.dtype, dataset.sample_index.dtype, dataset.shuffle_index.dtype]
    assert dtypes == [np.int32, np.int32, np.uint32]


@pytest.mark.parametrize("requested", GOLDEN)
def test_samples_are_a_shuffle_of_the_shuffled_stream(corpus, requested):
    """Neighbours in the stream of shuffled documents share one token; nothing else overlaps or is
    left out."""
    dataset = GPTDataset(corpus, sequence_length=4, num_samples=requested, seed=1234)
    stream = np.concatenate([corpus[i] for i in dataset.document_index])
    for index, row in enumerate(dataset.shuffle_index):
        sample = dataset[index]
        assert sample.dtype == np.int64 and sample.shape == (5,)
        assert sample.tolist() == stream[row * 4 : row * 4 + 5].tolist()
    assert sorted(dataset.shuffle_index.tolist()) == list(range(len(dataset)))


def test_empty_sequences_are_stepped_over(tmp_path):
    corpus = IndexedDataset(write_corpus(tmp_path / "d", [0, 3, 0, 0, 4, 5, 0]))
    dataset = GPTDataset(corpus, sequence_length=3, num_samples=6, seed=5)
    stream = np.concatenate([corpus[i] for i in dataset.document_index])
    for index, row in enumerate(dataset.shuffle_index):
        assert dataset[index].tolist() == stream[row * 3 : row * 3 + 4].tolist()
        assert all(length > 0 for _, _, length in dataset.locate(index))


def test_the_seeds_numbers():
    """234339484 tokens in the walk-through: samples 216895 / 81082 / 368 in 1 / 7 / 1 epochs."""
    train = 216895 * 1024 + 1
    valid = 11861200
    test = 368 * 1024 + 1
    assert train + valid + test <= 234339484
    for tokens, requested, epochs, samples in (
        (train, 8000, 1, 216895),
        (valid, 80080, 7, 81082),
        (test, 80, 1, 368),
    ):
        plan = plan_epochs(tokens, 1024, requested)
        assert (plan.num_epochs, plan.num_samples, plan.separate_last_epoch) == (
            epochs,
            samples,
            False,
        )


def test_old_megatrons_cache_hashes():
    """The three hashes of the seed's log."""
    hashes = {
        ("train", 8000): "743f9c78682483773343914511a6c2a5",
        ("valid", 80080): "5c58c96640514eacb357eae3e1bd7c1d",
        ("test", 80): "4422b241e58c2eba0e87abb1077559e9",
    }
    for (name, samples), wanted in hashes.items():
        prefix = "./data/meg-gpt2_text_document"
        split = "949,50,1"
        keys = describe("GPTDataset", prefix, samples, name, 1234, 1024, split, parse_split(split))
        assert hashlib.md5(json.dumps(keys, indent=4).encode()).hexdigest() == wanted


def build(corpus, cache, **changes):
    given = dict(
        sequence_length=4,
        num_samples=9,
        seed=1234,
        split="1,0,0",
        split_matrix=[(0, 1.0), None, None],
    )
    return GPTDataset(corpus, cache=cache, **{**given, **changes})


def test_log_lines_of_building_and_loading(corpus, tmp_path, capsys):
    cache = IndexCache(str(tmp_path / "cache"))
    head = "INFO:megatron.core.datasets.gpt_dataset:"
    built = build(corpus, cache)
    stem = hashlib.md5(json.dumps(built.description, indent=4).encode()).hexdigest() + "-GPTDataset"
    ends = [f"{head}> total number of samples: 14", f"{head}> total number of epochs: 2"]
    names = ("document", "sample", "shuffle")
    assert capsys.readouterr().out.splitlines() == [
        f"{head}Build and save the GPTDataset train indices",
        *(f"{head}\tBuild and save the {name} index to {stem}-{name}_index.npy" for name in names),
        *ends,
    ]
    build(corpus, cache)
    assert capsys.readouterr().out.splitlines() == [
        f"{head}Load the GPTDataset train indices",
        *(f"{head}\tLoad the {name} index from {stem}-{name}_index.npy" for name in names),
        *ends,
    ]
    build(corpus, None)
    assert capsys.readouterr().out.splitlines() == [
        f"{head}Build the GPTDataset train indices",
        *ends,
    ]


def test_cached_and_built_are_the_same(corpus, tmp_path):
    cache = IndexCache(str(tmp_path / "cache"))
    memory = build(corpus, None)
    built = build(corpus, cache)
    loaded = build(corpus, cache)
    for other in (built, loaded):
        for name in ("document_index", "sample_index", "shuffle_index"):
            first = getattr(memory, name)
            second = getattr(other, name)
            assert first.dtype == second.dtype and (first == second).all()
            assert not second.flags.writeable
        assert [other[i].tolist() for i in range(14)] == [memory[i].tolist() for i in range(14)]


def test_every_input_of_the_order_has_its_own_cache_entry(corpus, tmp_path):
    cache = IndexCache(str(tmp_path / "cache"))
    entries = lambda: {path.name for path in (tmp_path / "cache").glob("*description.txt")}  # noqa: E731
    build(corpus, cache)
    seen = entries()
    for change in (
        {"seed": 1},
        {"sequence_length": 5},
        {"num_samples": 8},
        {"sequences": range(5)},
        {"index_split": "valid"},
    ):
        build(corpus, cache, **change)
        assert len(entries() - seen) == 1, change
        seen = entries()
    # same name, other documents
    again = IndexedDataset(write_corpus(tmp_path / "golden", [*LENGTHS[1:], LENGTHS[0]]))
    fresh = build(again, cache)
    assert len(entries() - seen) == 1
    assert (fresh.sample_index == build(again, None).sample_index).all()


def test_pickled_with_paths_instead_of_arrays(tmp_path):
    corpus = IndexedDataset(write_corpus(tmp_path / "d", [40] * 500))
    sizes = {}
    for name, cache in (("files", IndexCache(str(tmp_path / "cache"))), ("memory", None)):
        dataset = build(corpus, cache, num_samples=4000)
        sent = pickle.dumps(dataset)
        sizes[name] = len(sent)
        assert [pickle.loads(sent)[i].tolist() for i in (0, 77)] == [
            dataset[i].tolist() for i in (0, 77)
        ]
    assert sizes["files"] < 5000 < 40000 < sizes["memory"]


@pytest.mark.parametrize(
    ("changes", "code", "named"),
    [
        ({"num_samples": 0}, "value-out-of-range", ["--train-iters", "give 0 samples"]),
        ({"num_samples": -8}, "value-out-of-range", ["--train-iters", "give -8 samples"]),
        ({"sequence_length": 0}, "value-out-of-range", ["--seq-length 0"]),
        ({"num_samples": 1 << 50}, "not-enough-memory", ["--train-iters", "--data-order epoch"]),
        ({"seed": -1}, "value-out-of-range", ["--seed -1"]),
        ({"seed": 1 << 32}, "value-out-of-range", ["--seed 4294967296"]),
        (
            {"sequences": range(3, 3), "index_split": "valid"},
            "split-leaves-no-data",
            ["--split 1,0,0", "valid", "6 sequences"],
        ),
        ({"sequences": range(3, 4)}, "data-too-small", ["2 tokens", "--seq-length 4 needs 5"]),
        ({"sequence_length": 29}, "data-too-small", ["29 tokens", "--seq-length 29 needs 30"]),
    ],
)
def test_short_data_and_bad_requests(corpus, changes, code, named):
    with problems.raises(ValueError, code, *named):
        build(corpus, None, **changes)


def test_a_corpus_without_sequences(tmp_path):
    corpus = IndexedDataset(write_corpus(tmp_path / "empty", []))
    with problems.raises(ValueError, "data-too-small", "empty.idx"):
        build(corpus, None)


def test_a_damaged_index_is_found_when_the_order_is_built(corpus, tmp_path):
    with open(corpus.idx_file, "r+b") as file:
        file.seek(34 + 4 * 6 + 8)
        file.write(np.int64(1 << 40).tobytes())
    with problems.raises(ValueError, "data-file-damaged", "golden.idx"):
        build(IndexedDataset(corpus.path_prefix), None)


def test_order_holds_what_the_order_depends_on(corpus):
    orders = {
        n: GPTDataset(corpus, sequence_length=4, num_samples=n, seed=1).order()
        for n in (1, 6, 9, 13)
    }
    assert orders[1] == orders[6]  # one epoch: more samples only go further
    assert orders[6] != orders[9] != orders[13]
    json.dumps(orders)


def test_open_corpus_checks_the_vocabulary(tmp_path):
    prefix = write_corpus(tmp_path / "d", [5, 5])
    assert len(open_corpus(prefix, 10)) == len(open_corpus(prefix)) == 2
    with problems.raises(ValueError, "token-id-out-of-range", "d.bin"):
        open_corpus(prefix, 9)
    with problems.raises(ValueError, "data-not-token-ids"):
        open_corpus(write_corpus(tmp_path / "floats", [5], np.float32))


def test_mock_sequences():
    mock = MockSequences(50, 49)
    lengths = np.random.default_rng(0).integers(1, 4096, 100_000, dtype=np.int32)
    assert len(mock) == 100_000 and (mock.sequence_lengths == lengths).all()
    for index in (0, 1, 77, int(lengths.argmin()), int(lengths.argmax())):
        whole = np.concatenate([(np.arange(lengths[index] - 1) + 1) % 50, [49]])
        assert mock.get(index).tolist() == whole.tolist()
        for offset, length in (
            (0, 1),
            (len(whole) - 1, 1),
            (len(whole) // 2, None),
            (len(whole), 0),
        ):
            end = len(whole) if length is None else offset + length
            assert mock.get(index, offset, length).tolist() == whole[offset:end].tolist()
    with pytest.raises(IndexError):
        mock.get(0, 0, int(lengths[0]) + 1)


def test_mock_samples_are_a_pure_function(capsys):
    make = lambda seed: MockGPTDataset(  # noqa: E731
        MockSequences(100, 99),
        sequence_length=64,
        num_samples=10,
        seed=seed,
        sequences=range(33_333),
    )
    first = make(1)
    again = make(1)
    other = make(2)
    assert "MockGPTDataset" in capsys.readouterr().out
    assert [first[i].tolist() for i in range(5)] == [again[i].tolist() for i in range(5)]
    assert first[0].tolist() != other[0].tolist()
    steps = np.diff(np.concatenate([first[i] for i in range(50)]))
    assert (steps == 1).mean() > 0.9  # most tokens are the last one plus one
    assert pickle.loads(pickle.dumps(first))[3].tolist() == first[3].tolist()
