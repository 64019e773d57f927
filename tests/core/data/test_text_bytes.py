"""Bits per byte: what preprocessing counts, what of it a data set of any kind is, and where it is
not known."""

import json
import math
from pathlib import Path

import pytest

from megatron.data.text_bytes import bits_per_byte, bytes_per_token
from megatron.data.tokenizers.build import ByteTokenizer, NullTokenizer
from megatron.data.tokenizers.metadata import description, text_size
from tests.core.data.corpora import build_datasets, data_flags, write_corpus

SEQUENCE = 8
TEXT_BYTES = {"a": 1500, "b": 700, "c": 4000}
TOKENS = {"a": 600, "b": 500, "c": 400}


def note(prefix: str, counts: dict[str, object], tokenizer=ByteTokenizer) -> None:
    tokenizer = tokenizer()
    Path(f"{prefix}.json").write_text(
        json.dumps(description(tokenizer.identity(), tokenizer.vocab_size, counts))
    )


@pytest.fixture
def corpora(tmp_path: Path) -> dict[str, str]:
    """Three pairs of documents of 10 tokens each, with different numbers of bytes per token."""
    found = {}
    for number, (name, tokens) in enumerate(TOKENS.items()):
        found[name] = write_corpus(tmp_path / name, [10] * (tokens // 10), seed=number)
        note(found[name], {"tokens": tokens, "text_bytes": TEXT_BYTES[name]})
    return found


def valid(size: int | None, **flags):
    return build_datasets(
        data_flags(**flags),
        sequence_length=SEQUENCE,
        seed=1,
        vocab_size=1000,
        eod=999,
        sizes=(8, size, 0),
    )[1]


def by_samples(dataset, corpora: dict[str, str]) -> float:
    """Bytes per token, sample by sample: each has the tokens of one pair."""
    names = list(corpora)
    sizes = [
        TEXT_BYTES[names[dataset.source(index)[0]]]
        / TOKENS[names[dataset.source(index)[0]]]
        * SEQUENCE
        for index in range(len(dataset))
    ]
    return sum(sizes) / SEQUENCE / len(dataset)


def test_one_pair(corpora):
    dataset = valid(10, data_path=[corpora["a"]], split="50,50")
    assert bytes_per_token(dataset) == 1500 / 600
    assert bits_per_byte(3 * math.log(2), 1500 / 600) == pytest.approx(3 * 600 / 1500)
    assert bits_per_byte(1.0, None) is None


@pytest.mark.parametrize("weights", [(0.5, 0.3, 0.2), (1, 8, 1), None])
def test_a_blend_counts_each_pair_by_its_samples(corpora, weights):
    words = list(corpora.values())
    if weights is not None:
        words = [str(word) for pair in zip(weights, words, strict=True) for word in pair]
    dataset = valid(40, data_path=words, split="50,50")
    assert bytes_per_token(dataset) == pytest.approx(by_samples(dataset, corpora), rel=1e-12)


def test_in_epoch_order(corpora, tmp_path):
    words = [str(word) for pair in zip((5, 3, 2), corpora.values(), strict=True) for word in pair]
    dataset = valid(40, data_path=words, split="50,50", data_order="epoch")
    assert len(dataset) == 40 and bytes_per_token(dataset) == pytest.approx(
        by_samples(dataset, corpora), rel=1e-12
    )
    whole = valid(
        40, valid_data_path=[str(tmp_path)], train_data_path=[corpora["a"]], data_order="epoch"
    )
    assert bytes_per_token(whole) == pytest.approx(sum(TEXT_BYTES.values()) / sum(TOKENS.values()))


@pytest.mark.parametrize(
    "counts",
    [
        None,
        {},
        {"tokens": 400},
        {"tokens": 400, "text_bytes": 0},
        {"tokens": 400, "text_bytes": "x"},
    ],
)
def test_one_pair_that_does_not_say_leaves_the_blend_without(corpora, counts):
    """As an older version wrote it, or another program."""
    Path(f"{corpora['c']}.json").unlink()
    if counts is not None:
        note(corpora["c"], counts)
    assert text_size(corpora["c"]) is None
    assert (
        bytes_per_token(valid(40, data_path=["1", corpora["a"], "1", corpora["c"]], split="50,50"))
        is None
    )
    assert (
        bytes_per_token(valid(40, data_path=["1", corpora["a"], "1", corpora["b"]], split="50,50"))
        is not None
    )


def test_numbers_are_no_text(corpora):
    note(corpora["a"], {"tokens": 600, "text_bytes": 1500}, lambda: NullTokenizer(1000))
    assert (
        "text_bytes" not in json.loads(Path(f"{corpora['a']}.json").read_text())
        and text_size(corpora["a"]) is None
    )
    assert bytes_per_token(valid(10, mock_data=True)) is None
