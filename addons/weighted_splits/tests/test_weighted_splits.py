"""--train-weighted-split-paths: which documents are read, how often, and what malformed files end
with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from megatron.addons.weighted_splits.feature import WeightedSplitsConfig
from megatron.addons.weighted_splits.groups import groups_of
from megatron.config.command_line import planned
from megatron.data.build import Splits
from megatron.data.request import DataRequest
from megatron.features.registry import RunConfig
from megatron.training.feature import data_source
from pretrain_gpt import main
from tests.pairs import PairWriter
from tests.problems import assert_problem, assert_reported, raises
from tests.runs import NO_DROPOUT, SMALL, train, with_flags

# documents of each pair; each has 20 tokens of its own
DOCUMENTS = {"a": 40, "b": 30, "c": 21}
PLACE = {name: number * 60 for number, name in enumerate(DOCUMENTS)}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for name, count in DOCUMENTS.items():
        with PairWriter(folder / name, np.uint16) as builder:
            for document in range(count):
                builder.add_document(np.full(20, PLACE[name] + document, np.uint16), [20])
    (folder / "train.txt").write_text(
        f'"TRAIN: 0.7 0:0.95 {folder}/a, 0.2 0.1:0.5 {folder}/b, 0.1 0:1 {folder}/c"\n'
    )
    (folder / "valid.txt").write_text(
        f'"web: 1 0.95:1 {folder}/a" "code: 1 0.5:1 {folder}/b, 3 0.5:0.9 {folder}/a"'
    )
    return folder


def argv(pairs: Path, *more: str) -> list[str]:
    words = with_flags(
        [*SMALL, *NO_DROPOUT],
        *("--train-weighted-split-paths-path", str(pairs / "train.txt")),
        *("--valid-weighted-split-paths-path", str(pairs / "valid.txt")),
        *("--train-iters", "4", "--eval-interval", "2"),
    )
    return with_flags(words, *more)


def opened(words: Sequence[str], **request: object) -> Splits:
    line, problems = planned(words, 1, RunConfig)
    assert not problems
    asked = DataRequest(**{"sizes": (400, 40, 0), "sequence_length": 32, **request})
    return data_source(line.config).build(line.config.data, asked, [])


def documents_of(dataset) -> dict[str, set[int]]:
    """The documents of each pair that the samples show."""
    shown = {int(token) for number in range(len(dataset)) for token in dataset[number]}
    return {
        name: {token - PLACE[name] for token in shown if 0 <= token - PLACE[name] < 60}
        for name in DOCUMENTS
    }


@pytest.mark.parametrize("order", ["megatron", "epoch"])
def test_each_group_reads_its_documents_by_its_weights(pairs, order):
    train_set, valid, test = opened(argv(pairs, "--data-order", order))
    assert test is None and isinstance(valid, list)
    # both ends are rounded half to even: 0.95 x 40, 0.1 x 30, 0.5 x 30
    assert documents_of(train_set) == {"a": {*range(38)}, "b": {*range(3, 15)}, "c": {*range(21)}}
    sources = Counter(train_set.source(number)[0] for number in range(400))
    assert [sources[n] for n in range(3)] == [280, 80, 40]
    assert [each.set_name for each in valid] == ["web", "code"]
    assert documents_of(valid[0]) == {"a": {38, 39}, "b": set(), "c": set()}
    assert documents_of(valid[1]) == {"a": {*range(20, 36)}, "b": {*range(15, 30)}, "c": set()}
    sources = Counter(valid[1].source(number)[0] for number in range(40))
    assert [sources[n] for n in range(2)] == [10, 30]


def test_words_are_what_the_file_says(pairs):
    words = argv(pairs)
    typed = {
        split: (pairs / f"{split}.txt").read_text().strip().strip('"').split('" "')
        for split in ("train", "valid")
    }
    start = words.index("--train-weighted-split-paths-path")
    more = ["--train-weighted-split-paths", *typed["train"]]
    more += ["--valid-weighted-split-paths", *typed["valid"]]
    same, valid, _ = opened([*words[:start], *words[start + 4 :], *more])
    read, valid_read, _ = opened(words)
    assert same.order() == read.order()
    assert [each.order() for each in valid] == [each.order() for each in valid_read]
    assert [each.set_name for each in valid] == [each.set_name for each in valid_read]


@pytest.mark.parametrize("order", ["megatron", "epoch"])
def test_a_run_evaluates_each_group_by_its_name(tmp_path, pairs, order):
    words = argv(pairs, "--data-order", order, "--save", str(tmp_path / "save"))
    train(tmp_path, [*words, "--exit-interval", "2"])
    run = train(tmp_path, [*words, "--load", str(tmp_path / "save")])
    assert run.resumes == [2]
    sets = [(name, iteration) for name, iteration, _ in run.evaluations]
    assert sets == [
        *[("validation-web", 2), ("validation-code", 2)],
        *[("validation-web", 4), ("validation-code", 4)],
    ]
    assert len({loss for *_, loss in run.evaluations}) == 4


def test_another_range_on_resume_is_another_order(tmp_path, pairs, capsys):
    words = argv(pairs, "--save", str(tmp_path / "save"), "--eval-iters", "0")
    train(tmp_path, [*words, "--exit-interval", "2"])
    other = (pairs / "train.txt").read_text().replace("0:0.95", "0:0.9")
    (tmp_path / "other.txt").write_text(other)
    changed = ("--train-weighted-split-paths-path", str(tmp_path / "other.txt"))
    with pytest.raises(SystemExit) as stop:
        main(with_flags(words, "--load", str(tmp_path / "save"), "--dry-run", *changed))
    assert stop.value.code == 2
    assert_reported(capsys.readouterr().err, "data-order-differs", "sequences")


MALFORMED = {
    "empty": ("", ()),
    "no quotes": ("TRAIN: 1 0:1 x\n", ("line 1",)),
    "one quote": ('"TRAIN: 1 0:1 x\n', ("line 1",)),
    "two lines": ('"A: 1 0:1 x"\n"B: 1 0:1 x"\n', ("line 2",)),
    "text between": ('"A: 1 0:1 x" and "B: 1 0:1 x"', ("line 1",)),
    "no name": ('"1 0:1 x"', ("line 1", "1 0:1 x")),
    "a name with a blank": ('"A B: 1 0:1 x"', ("line 1", "A B")),
    "a name with a tab": ('"A\tB: 1 0:1 x"', ("line 1",)),
    "no data": ('"A:"', ("line 1", "A")),
    "an empty data set": ('"A: 1 0:1 x,"', ("line 1", "A")),
    "no weight": ('"A: 0:1 x"', ("line 1", "0:1 x")),
    "a word as weight": ('"A: x 0:1 x"', ("line 1", "weight x")),
    "weight 0": ('"A: 0 0:1 x"', ("line 1", "weight 0")),
    "weight nan": ('"A: nan 0:1 x"', ("line 1", "weight nan")),
    "weight inf": ('"A: inf 0:1 x"', ("line 1", "weight inf")),
    "no range": ('"A: 1 0.5 x"', ("line 1", "0.5")),
    "a range backwards": ('"A: 1 0.5:0.4 x"', ("line 1", "0.5:0.4")),
    "an empty range": ('"A: 1 0.5:0.5 x"', ("line 1", "0.5:0.5")),
    "a range beyond": ('"A: 1 0.5:1.1 x"', ("line 1", "0.5:1.1")),
    "a range before": ('"A: 1 -0.5:1 x"', ("line 1", "-0.5:1")),
    "a range of words": ('"A: 1 a:b x"', ("line 1", "a:b")),
    "a range of nan": ('"A: 1 nan:1 x"', ("line 1", "nan:1")),
    "a blank in a prefix": ('"A: 1 0:1 x y"', ("line 1", "x y")),
    "a store": ('"A: 1 0:1 s3://bucket/x"', ("line 1", "s3://bucket/x")),
    "two groups of a name": ('"A: 1 0:1 x" "A: 1 0:1 y"', ("A",)),
    "no text": (b'"A: 1 0:1 \xff"', ()),
    "zeros": (b"\0" * 50, ("line 1",)),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_file_is_one_error_with_file_and_line(tmp_path, name):
    content, named = MALFORMED[name]
    file = tmp_path / "groups.txt"
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    groups, problems = groups_of("valid", (), str(file))
    assert groups == [] and len(problems) == 1
    assert_problem(problems[0], "weighted-splits-malformed", file, *named)
    with raises(ValueError, "weighted-splits-malformed", file):
        WeightedSplitsConfig(train_weighted_split_paths_path=str(file)).groups()


def test_several_groups_of_training_and_documents_that_fill_no_sample(tmp_path, pairs):
    _, [problem] = groups_of("test", ("A: 1 0:1 x", "B: 1 0:1 x"), None)
    assert_problem(problem, "weighted-splits-malformed", "--test-weighted-split-paths", 2)
    groups = f"A: 1 0:1 {pairs}/a, 1 0:0.05 {pairs}/c"
    words = argv(pairs)
    start = words.index("--train-weighted-split-paths-path")
    words = [*words[:start], *words[start + 4 :], "--train-weighted-split-paths", groups]
    with raises(ValueError, "data-too-small", f"0:0.05 of {pairs}/c", "20 tokens"):
        main(words)


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
def test_samples_are_those_of_megatron_core(pairs, tmp_path):
    """... given the same documents: its data sets take any range of them."""
    datasets = pytest.importorskip("megatron.core.datasets.gpt_dataset")
    from megatron.core.datasets.blended_dataset import BlendedDataset
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split, normalize

    class Tokenizer:
        vocab_size, eod, pad = 211, 210, -1
        unique_identifiers = {"class": "Tokenizer"}  # noqa: RUF012

    config = datasets.GPTDatasetConfig(
        random_seed=7,
        sequence_length=32,
        tokenizer=Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        split="1,1,1",
        blend=([str(pairs / "a")], None),
    )
    ours, [web, _], _ = opened(argv(pairs), seed=7)
    ranges = {"a": range(38), "b": range(3, 15), "c": range(21)}
    members = [
        datasets.GPTDataset(
            IndexedDataset(str(pairs / name)),
            str(pairs / name),
            np.arange(documents.start, documents.stop, dtype=np.int32),
            member.num_samples,
            Split.train,
            config,
        )
        for (name, documents), member in zip(ranges.items(), ours.datasets, strict=True)
    ]
    weights = normalize([0.7, 0.2, 0.1])  # as its builder does
    theirs = BlendedDataset(members, weights, 400, config)
    for number in range(400):
        sample = theirs[number]
        expected = [*sample["tokens"].tolist(), int(sample["labels"][-1])]
        assert ours[number].tolist() == expected
    assert len(web) == 40 and web.datasets[0].num_samples == 40  # alone: without a surplus
