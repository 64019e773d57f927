"""The epoch order: every token so often as asked, mixes in exact shares, the same order however
long the run is."""

import json
import os
import pickle
from collections import Counter

import numpy as np
import pytest

from megatron.data.data_order import data_order_fingerprint
from megatron.data.epoch.permutation import Permutation
from megatron.data.epoch.proportional_draws import Shares
from megatron.data.epoch.token_files import read_token_file
from megatron.data.indexed_dataset import HEADER, MAGIC, IndexedDataset, bin_path, idx_path
from megatron.data.order_change import data_order_differences
from megatron.data.request import Before
from tests import problems
from tests.core.data.corpora import build_datasets, data_flags, write_corpus

COMMON = {"sequence_length": 8, "seed": 7, "vocab_size": 60_000, "eod": 999}


def build(sizes=(50, 0, 0), changes=None, **flags):
    flags = {
        "data_order": "epoch",
        "split": None if "train_data_path" in flags else "1,0,0",
        **flags,
    }
    return build_datasets(data_flags(**flags), sizes=sizes, **{**COMMON, **(changes or {})})


def corpus(folder, name, documents, seed) -> str:
    """A corpus of unique tokens, so that each can be counted."""
    return write_corpus(
        folder / name, np.random.default_rng(seed).integers(0, 30, documents), np.int32
    )


def read(dataset, count=None, first=0) -> np.ndarray:
    """The input tokens of samples, in their order."""
    return np.concatenate(
        [dataset[i][:-1] for i in range(first, len(dataset) if count is None else count)]
    )


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 17, 100, 4097])
def test_a_permutation_takes_every_value_once(size):
    first, other = ([Permutation(size, seed)[i] for i in range(size)] for seed in (1, 2))
    assert sorted(first) == sorted(other) == list(range(size))
    assert size < 17 or (first != other and first != list(range(size)))


def test_a_permutation_shows_no_pattern():
    """Where values of a small and a large permutation go is even, and so are the steps between
    neighbours."""
    places = Counter((i, Permutation(4, "even", key)[i]) for key in range(3000) for i in range(4))
    assert len(places) == 16 and max(abs(n - 750) for n in places.values()) < 5 * 750**0.5
    order = np.array([Permutation(100_003, "large")[i] for i in range(20_000)])
    for values in (order, np.diff(order) % 100_003):
        bins = np.bincount(values * 50 // 100_003, minlength=50)
        # chi-square of 49 degrees of freedom: 1 in 30,000 is above 95
        assert ((bins - 400) ** 2 / 400).sum() < 100
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.03


@pytest.mark.parametrize("weights", [[7], [1, 3], [5, 1, 1, 9, 100], list(range(1, 400))])
def test_shares_are_exact_and_every_draw_is_counted_once(weights):
    shares = Shares(weights)
    given = [0] * len(weights)
    total = sum(weights)
    for draw in range(min(2 * total, 20_000)):
        if draw % 97 == 0:
            assert shares.counts(draw) == given
        source, number = shares.source(draw)
        assert number == given[source]
        given[source] += 1
        if len(weights) < 10:
            assert all(
                abs(n - (draw + 1) * w / total) <= 2 for n, w in zip(given, weights, strict=True)
            )
    assert shares.counts(total) == weights and shares.counts(10**15 * total) == [
        10**15 * w for w in weights
    ]


@pytest.mark.parametrize("documents", [200, 201, 202])
def test_epochs_show_each_document_exactly_so_often(tmp_path, documents):
    """Of whatever length: only the last tokens of the last epoch, fewer than a sample, are left
    out."""
    a = corpus(tmp_path, "a", documents, 1)
    b = corpus(tmp_path, "b", 150, 2)
    rows = []
    train, *_ = build((None, 0, 0), {"rows": rows}, data_path=["epochs:2", a, "epochs:1", b])
    for number, (prefix, epochs) in enumerate(((a, 2), (b, 1))):
        samples = [k for k in range(len(train)) if train.source(k)[0] == number]
        seen = Counter(np.concatenate([train[k][:-1] for k in samples]).tolist())
        tokens = IndexedDataset(prefix).bin_bytes // 4
        assert len(samples) == epochs * tokens // 8
        missing = epochs * tokens - sum(seen.values())
        assert 0 <= missing < 8 and set(seen) <= set(range(tokens))
        assert (
            sum(n == epochs for n in seen.values()) >= tokens - missing
            and max(seen.values()) == epochs
        )
    assert [(r.split, r.documents, round(r.epochs)) for r in rows] == [
        ("train", documents, 2),
        ("train", 150, 1),
    ]


def test_the_order_does_not_depend_on_the_length_of_the_run(tmp_path):
    words = ["1", corpus(tmp_path, "a", 60, 1), "2", corpus(tmp_path, "b", 90, 2)]
    short, *_ = build((70, 0, 0), data_path=words)
    long, *_ = build((5000, 0, 0), data_path=words)
    assert (read(short) == read(long, 70)).all()
    assert data_order_fingerprint(short, None) == data_order_fingerprint(long, None)
    other, *_ = build((70, 0, 0), {"seed": 8}, data_path=words)
    assert (read(other) != read(short)).any()


def test_samples_are_runs_of_the_corpus(tmp_path):
    """Several files end to end, the last one followed by the first: tokens and pieces agree with
    the files."""
    prefixes = [corpus(tmp_path, name, 20, seed) for seed, name in enumerate("abc")]
    train, *_ = build((300, 0, 0), data_path=prefixes)
    files = [np.fromfile(bin_path(prefix), np.int32) for prefix in prefixes]
    circle = np.concatenate([*files, *files])
    data = train.datasets[0]
    for k in range(300):
        at = data.position(k)
        assert train[k].tolist() == circle[at : at + 9].tolist() and train[k].dtype == np.int64
        pieces = [files[prefixes.index(p)][first : first + n] for p, first, n in train.ranges_of(k)]
        assert np.concatenate(pieces).tolist() == train[k].tolist()
    assert pickle.loads(pickle.dumps(train))[7].tolist() == train[7].tolist()


@pytest.mark.parametrize("trial", range(6))
def test_an_epoch_is_the_samples_that_end_in_one_pass(trial, tmp_path):
    """Against cutting the corpus one token after the other, as docs/design.md says it."""
    random = np.random.default_rng(trial)
    length = int(random.integers(1, 12))
    prefixes = [corpus(tmp_path, name, int(random.integers(2, 25)), trial) for name in "abc"]
    tokens = np.concatenate([np.fromfile(bin_path(one), np.int32) for one in prefixes]).tolist()
    passes = 4
    count = passes * len(tokens) // length
    train, *_ = build((count, 0, 0), {"sequence_length": length}, data_path=prefixes)
    at = 0
    naive: list[list[list[int]]] = [[] for _ in range(passes)]
    for _ in range(count):
        sample = [tokens[(at + i) % len(tokens)] for i in range(length + 1)]
        at += length
        naive[(at - 1) // len(tokens)].append(sample)
    read = iter(train[k].tolist() for k in range(count))
    epochs = [[next(read) for _ in part] for part in naive]
    assert [sorted(part) for part in epochs] == [sorted(part) for part in naive]
    assert epochs[0] != naive[0] and epochs[1] != naive[1]


def test_splits_are_those_of_megatrons_order(tmp_path):
    prefix = corpus(tmp_path, "a", 200, 3)
    flags = {"data_path": [prefix], "split": "80,15,5"}
    ours = build((None, None, None), **flags)
    theirs = build((None, None, None), **flags, data_order="megatron")
    for mine, other in zip(ours, theirs, strict=True):
        lengths = other.corpus.sequence_lengths
        assert mine.datasets[0].tokens == other.plan.tokens_per_epoch
        assert mine.datasets[0].documents == len(other.sequences) == other.num_documents
        first = int(lengths[: other.sequences.start].sum())
        assert set(read(mine).tolist()) <= set(range(first, first + other.plan.tokens_per_epoch))


def test_documents_are_counted_where_some_have_several_sequences_or_none(tmp_path):
    from tests.pairs import PairWriter

    with PairWriter(tmp_path / "a") as builder:
        for lengths in ([3, 4], [], [5], [1, 1, 1], [], [9]):
            builder.add_document(np.arange(sum(lengths)), lengths)
    file = read_token_file(str(tmp_path / "a"), [(0.0, 0.5), (0.5, 1.0), None])
    starts = IndexedDataset(tmp_path / "a").document_indices
    assert (file.sequences, file.documents, sorted(file.spans)) == (7, 6, [0, 1])
    for span in file.spans.values():
        assert span.documents == sum(
            span.sequences.start <= s < span.sequences.stop for s in starts[:-1].tolist()
        )


def test_a_directory_and_a_pattern_are_data_sets(tmp_path):
    (tmp_path / "d" / "e").mkdir(parents=True)
    prefixes = [
        corpus(tmp_path / "d", name, 30, seed) for seed, name in enumerate(("b", "c", "e/a"))
    ]
    named, *_ = build(data_path=prefixes)
    for word in (f"{tmp_path}/d", f"{tmp_path}/d/"):
        assert (read(build(data_path=[word])[0]) == read(named)).all()
    pattern, *_ = build(data_path=["1", f"{tmp_path}/d/*", "1", prefixes[2]])
    assert [d.num_files for d in pattern.datasets] == [2, 1]
    blend, *_ = build(
        data_path=["1", f"{tmp_path}/d/[bc].bin", "2", prefixes[2]], data_order="megatron"
    )
    assert [d.corpus.path_prefix for d in blend.datasets] == prefixes
    tokens = [d.plan.tokens_per_epoch for d in blend.datasets[:2]]
    assert np.allclose(
        blend.weights, [tokens[0] / sum(tokens) / 3, tokens[1] / sum(tokens) / 3, 2 / 3]
    )
    assert len(build(data_path=[f"{tmp_path}/d"], data_order="megatron")[0].datasets) == 3
    for word in (f"{tmp_path}/none/*", f"{tmp_path}/empty"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with problems.raises(FileNotFoundError, "data-not-found"):
            build(data_path=[word])


def resumed(train, consumed, other_mix=False) -> dict:
    order = json.loads(json.dumps(train.order()))
    return {"before": Before(order, consumed, other_mix)}


def test_another_mix_goes_on_where_each_data_set_was_left(tmp_path):
    a, b, c = (corpus(tmp_path, name, 400, seed) for seed, name in enumerate("abc"))
    first, *_ = build((1000, 0, 0), data_path=["1", a, "3", b])
    second, *_ = build((1000, 0, 0), resumed(first, 200, True), data_path=["2", b, "1", c])
    third, *_ = build((1000, 0, 0), resumed(second, 350, True), data_path=["1", c, "1", a])
    drawn: dict[str, list[int]] = {}
    for train, numbers in (
        (first, range(200)),
        (second, range(200, 350)),
        (third, range(350, 700)),
    ):
        for k in numbers:
            dataset, sample = train.source(k)
            drawn.setdefault(train.datasets[dataset].name, []).append(sample)
    # none twice, none left out
    assert all(samples == list(range(len(samples))) for samples in drawn.values())
    assert len(drawn[a]) == 50 + 175 and len(drawn[b]) == 150 + 100 and len(drawn[c]) == 50 + 175
    # resumed without a change
    again, *_ = build((1000, 0, 0), resumed(third, 600), data_path=["1", c, "1", a])
    assert again.source(650) == third.source(650) and again.order() == third.order()
    # not asked for: refused by the caller
    fresh, *_ = build((1000, 0, 0), resumed(first, 200), data_path=["2", b, "1", c])
    assert fresh.since == 0 and fresh.order() != first.order()
    with pytest.raises(IndexError, match="sample 199 of 200"):
        second.source(199)
    with problems.raises(ValueError, "data-mix-order-differs"):
        build((1000, 0, 0), {**resumed(first, 200, True), "seed": 9}, data_path=["2", b, "1", c])


@pytest.mark.parametrize(
    "words, sizes, message",
    [
        (
            ["epochs:2", "A", "epochs:1", "B"],
            (10**6, 0, 0),
            "329 samples .* 1000000.*epochs-too-few",
        ),
        (["epochs:0.001", "A", "epochs:1", "B"], (9, 0, 0), "epochs:0.001 of .*a .*epochs-too-few"),
        (["epochs:2", "A", "1", "B"], (9, 0, 0), "--data-path: 1 .*blend-malformed"),
        (["epochs:", "A"], (9, 0, 0), "epochs: .*blend-malformed"),
        (["1", "A", "2", "B"], (None, 0, 0), "weights-without-number-of-samples"),
        (["S"], (9, 0, 0), "5 tokens.*--seq-length 8 needs 9.*data-too-small"),
    ],
)
def test_what_cannot_be_met_is_refused(tmp_path, words, sizes, message):
    names = {
        "A": corpus(tmp_path, "a", 60, 1),
        "B": corpus(tmp_path, "b", 60, 2),
        "S": write_corpus(tmp_path / "s", [5]),
    }
    with pytest.raises(ValueError, match=message):
        build(sizes, data_path=[names.get(word, word) for word in words])


def test_epochs_need_the_epoch_order(tmp_path):
    with problems.raises(ValueError, "epochs-need-data-order-epoch", "--data-path", "--data-order"):
        build(data_path=["epochs:2", corpus(tmp_path, "a", 60, 1)], data_order="megatron")


def test_token_ids_beyond_the_vocabulary(tmp_path):
    prefix = corpus(tmp_path, "a", 60, 1)
    with problems.raises(ValueError, "token-id-out-of-range", "a.bin", "100"):
        build(data_path=[prefix], changes={"vocab_size": 100})


def test_three_milliard_documents(tmp_path):
    """Sparse files: 64-bit everywhere, nothing that grows with them."""
    count = 3_000_000_000
    length = 2
    prefix = str(tmp_path / "huge")
    with open(idx_path(prefix), "wb") as file:
        file.write(HEADER.pack(MAGIC, 1, 8, count, count + 1))
        for at in (0, count // 2 - 1, count // 2, count - 1):
            file.seek(34 + 4 * at)
            file.write(np.int32(length).tobytes())
            file.seek(34 + 4 * count + 8 * at)
            file.write(np.int64(at * length * 2).tobytes())
        file.seek(34 + 12 * count + 8 * count)
        file.write(np.int64(count).tobytes())
    with open(bin_path(prefix), "wb") as file:
        file.truncate(2 * length * count)
        file.seek(2 * (length * count - 1))
        file.write(np.uint16(7).tobytes())
    train, *_ = build((10**9, 0, 0), data_path=[prefix])
    assert train.datasets[0].tokens == length * count > 2**32
    last = max(range(300), key=lambda k: train.ranges_of(k)[0][1])
    assert train.ranges_of(last)[0][1] > 2**32 and train[last].tolist() == [0] * 9
    assert os.stat(idx_path(prefix)).st_blocks < 1000


def test_a_permutation_is_undone():
    for size in (1, 2, 3, 7, 64, 1000, 4097):
        order = Permutation(size, 5, "key")
        assert [order.index(order[i]) for i in range(size)] == list(range(size))
    large = Permutation(2**45 + 3, 1)
    assert [large.index(large[i]) for i in range(0, 2**45, 2**38 + 1)] == list(
        range(0, 2**45, 2**38 + 1)
    )


@pytest.mark.parametrize("order", ["megatron", "epoch"])
def test_validation_sets_are_made_each_from_its_own_data(tmp_path, order):
    a, b, c = (corpus(tmp_path, name, 60 + seed, seed) for seed, name in enumerate("abc"))
    rows = []
    flags = {"train_data_path": [a], "valid_data_path": [b, c], "data_order": order}
    _, valid, test = build((50, 20, 0), {"rows": rows}, **flags, multiple_validation_sets=True)
    assert isinstance(valid, list) and test is None
    for dataset, prefix in zip(valid, (b, c), strict=True):
        alone = build((50, 20, 0), train_data_path=[a], valid_data_path=[prefix], data_order=order)[
            1
        ]
        assert [dataset[k].tolist() for k in range(20)] == [alone[k].tolist() for k in range(20)]
    assert [row.split for row in rows] == ["train", "valid-0", "valid-1"]
    found = data_order_fingerprint(None, valid)["valid"]
    assert (
        found == [one.order() for one in valid]
        and data_order_differences({"valid": found}, {"valid": found}) == []
    )
    everything = build((50, None, 0), **flags, multiple_validation_sets=True)[1]
    tokens = [IndexedDataset(prefix).bin_bytes // 4 - (order == "megatron") for prefix in (b, c)]
    assert [len(one) for one in everything] == [count // 8 for count in tokens]
    for bad in ({"data_path": [a]}, {"train_data_path": [a], "valid_data_path": ["1", b, "1", c]}):
        with problems.raises(ValueError, "validation-sets-not-named", "--multiple-validation-sets"):
            build((50, 20, 0), **bad, multiple_validation_sets=True, data_order=order)
