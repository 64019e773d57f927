"""--fim-data: token by token what Megatron-LM makes of the same draws, and samples that depend on
their number alone, whatever reads them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from megatron.addons.fim.feature import FimConfig
from megatron.addons.fim.middle import FillInMiddle, Ids
from megatron.addons.fim.source import FimDataset
from megatron.config.command_line import planned
from megatron.data.gpt_dataset import GPTDataset
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.request import DataRequest
from megatron.data.sample_lookup import Dataset, is_blend
from megatron.data.samples import Sample
from megatron.data.subsets import subset_names
from megatron.data.text_bytes import bytes_per_token
from megatron.data.tokenizers.build import ByteTokenizer, NullTokenizer
from megatron.features.registry import RunConfig
from megatron.training.feature import data_source
from pretrain_gpt import main
from tests.pairs import PairWriter
from tests.problems import assert_reported, raises
from tests.runs import NO_DROPOUT, SMALL, allow_workers, train, with_flags

# of ByteTokenizer, whose tokens are bytes
TOKENS = {"fim_prefix_token": "\1", "fim_middle_token": "\2", "fim_suffix_token": "\3"}
TOKENS |= {"fim_pad_token": "\4"}
WORDS = [word for name, text in TOKENS.items() for word in (f"--{name.replace('_', '-')}", text)]
EOD = 256
# Made by NVIDIA/Megatron-LM d98e8a64, megatron/training/datasets/fim_dataset.py, on megatron-core
# 0.16.1: the sample and what its GPTFIMDataset of `seed` gives, reading one after the other.
CASES = [
    json.loads(line)
    for line in (Path(__file__).parent / "megatron_samples.txt").read_text().splitlines()
]
TEXT = 'def f(x):\n    return "é" * x\n\nclass A:\n    pass\n'


def fill(**flags: object) -> FillInMiddle:
    return FillInMiddle(FimConfig(fim_data=True, **TOKENS, **flags), ByteTokenizer())


@pytest.mark.parametrize("case", CASES, ids=[f"seed {case['seed']}" for case in CASES])
def test_the_same_draws_give_megatrons_tokens(case):
    random = np.random.RandomState(case["seed"])
    rearrange = fill(**case["flags"])
    for sample, expected in case["samples"]:
        assert rearrange.apply(np.array(sample), random).tolist() == expected


def test_the_cases_have_every_branch():
    pairs = [pair for case in CASES for pair in case["samples"]]
    assert len(pairs) == 60 and sum(before != after for before, after in pairs) == 54
    assert any(4 in after for _, after in pairs)  # one became shorter
    assert any(case["flags"]["fim_no_prefix"] for case in CASES)
    assert any(case["flags"]["fim_split_sample"] for case in CASES)


@pytest.mark.parametrize(("spm", "first"), [(0, [1]), (1, [1, 3])])
def test_a_document_is_there_in_three_parts(spm, first):
    """Nothing is lost where there is room, and eod stays between documents."""
    text = [*TEXT.encode()]
    sample = np.array([*text, EOD, *text, EOD, *[9] * 20])
    changed = fill(fim_rate=1.0, fim_spm_rate=spm).apply(sample, np.random.RandomState(3)).tolist()
    assert len(changed) == len(sample)
    documents = changed[: changed.index(EOD)], changed[changed.index(EOD) + 1 :]
    for document in (documents[0], documents[1][: documents[1].index(EOD)]):
        assert document[: len(first)] == first
        parts = " ".join(map(str, document)).replace(" 2 ", "|").replace("3 ", "|3 ")
        assert parts.count("|") == 2
        if spm:  # prefix, suffix, SUFFIX, middle, PREFIX MIDDLE
            suffix, both = document[2 : document.index(2)], document[document.index(2) + 1 :]
            assert both + suffix == text
        else:
            prefix, suffix = document[1 : document.index(3)], document.index(3)
            middle = document[document.index(2) + 1 :]
            assert prefix + middle + document[suffix + 1 : document.index(2)] == text


def test_special_tokens_are_omitted_or_stay():
    """As in Megatron-LM, or with the flag as in BigCode's."""
    sample = np.array([*TEXT.encode(), EOD, *TEXT.encode(), 5, *[9] * 40])
    flags = {"fim_rate": 1.0, "fim_eod_token": "\5"}
    without = fill(**flags).apply(sample, np.random.RandomState(0))
    kept = fill(**flags, fim_keep_special_tokens=True).apply(sample, np.random.RandomState(0))
    assert EOD not in without
    assert bytes(kept[kept < EOD].tolist()).count(b"<|endoftext|>") == 1


def test_a_token_that_the_tokenizer_lacks():
    for flags, named in (
        (FimConfig(fim_data=True), "--fim-prefix-token <fim_prefix>"),
        (FimConfig(fim_data=True, **TOKENS, fim_split_sample="ab"), "--fim-split-sample ab"),
    ):
        with raises(ValueError, "fim-token-missing", named):
            Ids.of(flags, ByteTokenizer())
    same = {**TOKENS, "fim_suffix_token": "\2"}
    with raises(ValueError, "fim-tokens-equal", "--fim-suffix-token"):
        Ids.of(FimConfig(fim_data=True, **same), ByteTokenizer())
    one_for_two = {**TOKENS, "fim_pad_token": "<|endoftext|>"}
    assert Ids.of(FimConfig(fim_data=True, **one_for_two), ByteTokenizer()).pad == EOD
    with raises(ValueError, "fim-token-missing", "--fim-pad-token x"):
        numbers = dict(zip(TOKENS, ("7", "8", "9", "x"), strict=True))
        Ids.of(FimConfig(fim_data=True, **numbers, fim_eod_token="0"), NullTokenizer(20))


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("data")
    random = np.random.default_rng(0)
    for name in "ab":
        with PairWriter(folder / name, np.uint16) as builder:
            for _ in range(60):
                start, length = random.integers(0, 20), random.integers(1, 40)
                document = [*TEXT[start : start + length].encode(), EOD]
                builder.add_document(np.array(document), [len(document)])
    return [str(folder / name) for name in "ab"]


def argv(texts: Sequence[str], *more: str) -> list[str]:
    words = with_flags(
        [*SMALL, *NO_DROPOUT, *WORDS],
        *("--tokenizer-type", "ByteTokenizer", "--vocab-size", "257", "--fim-data"),
        *("--data-path", "0.7", texts[0], "0.3", texts[1], "--split", "80,20,0"),
        *("--train-iters", "4"),
    )
    return with_flags(words, *more)


def opened(words: list[str], **request: object) -> tuple[Dataset, Dataset]:
    """The data sets of training and validation."""
    line, problems = planned(words, 1, RunConfig)
    assert not problems
    asked = DataRequest(**{"sizes": (32, 8, 0), "sequence_length": 32, "seed": 5, **request})
    train_set, valid_set, _ = data_source(line.config).build(line.config.data, asked, [])
    assert train_set is not None and valid_set is not None and not isinstance(valid_set, list)
    return train_set, valid_set


@pytest.mark.parametrize("order", ["megatron", "epoch"])
def test_a_sample_is_a_function_of_seed_split_and_number(texts, order):
    words = argv(texts, "--data-order", order)
    first, valid = opened(words)
    samples = [first[number].tolist() for number in range(32)]
    again, _ = opened(words)
    assert [again[number].tolist() for number in reversed(range(32))] == samples[::-1]
    plain, _ = opened([word for word in words if word != "--fim-data"])
    rows = [plain[number] for number in range(32)]
    changed = [sample != row.tolist() for sample, row in zip(samples, rows, strict=True)]
    assert 20 < sum(changed) < 32  # of samples, with several documents each
    assert [again.spans_of(n) for n in range(32)] == [plain.spans_of(n) for n in range(32)]
    assert again.prefixes() == plain.prefixes() and is_blend(again)
    assert [again.source(n) for n in range(32)] == [plain.source(n) for n in range(32)]
    assert subset_names(again) == subset_names(plain) == ["a", "b"]
    assert bytes_per_token(again) is None
    # another split, seed or number: other draws of the same text
    always = FimConfig(fim_data=True, fim_rate=1.0, **TOKENS)
    sets = [FimDataset(plain, fill(fim_rate=1.0), always, seed, 257) for seed in (5, 6, 5 + 2**32)]
    sets.append(FimDataset(valid._dataset, fill(fim_rate=1.0), always, 5, 257))
    for each in sets:
        each._checked = [Sample(np.array([*TEXT[:32].encode()]))] * 40
    drawn = [[tuple(each[number].tolist()) for number in range(40)] for each in sets]
    for one, other in combinations(drawn, 2):
        assert len(set(one)) > 25
        assert sum(a == b for a, b in zip(one, other, strict=True)) < 5


def test_an_id_outside_of_the_vocabulary_is_an_error_with_its_place(tmp_path, texts):
    with PairWriter(tmp_path / "bad", np.uint16) as builder:
        builder.add_document(np.array([*b"abc", 300, EOD] * 20), [100])
    plain = GPTDataset(IndexedDataset(tmp_path / "bad"), sequence_length=32, num_samples=4, seed=1)
    filled = FimDataset(plain, fill(), FimConfig(), 1, 257)
    with raises(ValueError, "token-id-out-of-range", "300", tmp_path / "bad"):
        filled[0]


@pytest.mark.parametrize("order", [pytest.param("megatron", marks=pytest.mark.sweep), "epoch"])
def test_workers_a_resume_and_another_layout_see_the_same_samples(tmp_path, texts, order):
    """... and validation, which is rearranged, too."""
    words = argv(texts, "--data-order", order, "--eval-interval", "4", "--fp64")
    whole = train(tmp_path / "whole", words)
    half = tmp_path / "half"
    words = with_flags(words, "--save", str(half / "save"), "--num-workers", "2")
    train(half, [*words, "--exit-interval", "2"], hook=allow_workers)
    words = [*words, "--load", str(half / "save")]
    resumed = train(half, words, world=2, hook=allow_workers)
    assert resumed.resumes == [2]
    for got, expected in zip(resumed.rows, whole.rows, strict=True):
        assert got["lm_loss"] == pytest.approx(expected["lm_loss"], rel=1e-12)
    assert [loss for *_, loss in resumed.evaluations] == pytest.approx(
        [loss for *_, loss in whole.evaluations], rel=1e-12
    )


def test_a_resume_with_other_rates_is_refused(tmp_path, texts, capsys):
    words = [*argv(texts, "--exit-interval", "2"), "--save", str(tmp_path / "save")]
    train(tmp_path, words)
    for change in (("--fim-rate", "0.25"), ("--fim-no-prefix", "x")):
        with pytest.raises(SystemExit) as stop:
            main(with_flags(words, "--load", str(tmp_path / "save"), "--dry-run", *change))
        assert stop.value.code == 2
        assert_reported(capsys.readouterr().err, "data-order-differs", change[0])


def test_a_run_says_at_its_start_what_the_tokenizer_lacks(texts, capsys):
    """... and so does a dry run."""
    words = argv(texts, "--fim-pad-token", "pad")
    for more in ((), ("--dry-run",)):
        with pytest.raises(SystemExit) as stop:
            main([*words, *more])
        assert stop.value.code == 2
        assert_reported(capsys.readouterr().err, "fim-token-missing", "--fim-pad-token pad")
