"""The tokenizer that made a pair is known at training: another vocabulary is refused by name."""

import json
from pathlib import Path

import pytest

from megatron.data.megatron_order import check_tokenizer
from megatron.data.tokenizers.bpe import GPT2BPETokenizer
from megatron.data.tokenizers.build import NullTokenizer
from megatron.data.tokenizers.metadata import description, fingerprint
from tests import problems
from tests.core.data.corpora import data_flags, write_corpus
from tests.core.data.vocabularies import MERGES, write_bpe


@pytest.fixture
def made(tmp_path: Path) -> tuple[GPT2BPETokenizer, GPT2BPETokenizer, str]:
    """A tokenizer, one with a merge more, and a pair that the first one made."""
    tokenizers = []
    for number, merges in enumerate((MERGES, [*MERGES, "x y"])):
        (tmp_path / str(number)).mkdir()
        tokenizers.append(GPT2BPETokenizer(*write_bpe(tmp_path / str(number), merges)))
    (tmp_path / "data").mkdir()
    prefix = write_corpus(tmp_path / "data" / "x", [3, 4, 5])
    note = description(tokenizers[0].identity(), tokenizers[0].vocab_size, {"tokens": 12})
    Path(f"{prefix}.json").write_text(json.dumps(note))
    return tokenizers[0], tokenizers[1], prefix


def test_another_vocabulary_is_refused(
    made: tuple[GPT2BPETokenizer, GPT2BPETokenizer, str],
) -> None:
    mine, other, prefix = made
    folder = str(Path(prefix).parent)
    for flags in (
        {"data_path": [prefix]},
        {"data_path": [folder]},
        {"valid_data_path": ["0.5", prefix, "0.5", prefix]},
    ):
        check_tokenizer(data_flags(**flags), mine.identity())
        with problems.raises(ValueError, "data-of-another-tokenizer", prefix):
            check_tokenizer(data_flags(**flags), other.identity())
    check_tokenizer(data_flags(data_path=[prefix]), NullTokenizer(300).identity())
    check_tokenizer(data_flags(mock_data=True), other.identity())
    Path(f"{prefix}.json").unlink()
    check_tokenizer(data_flags(data_path=[prefix]), other.identity())


def test_where_the_files_lie_makes_no_difference(made: tuple, tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    copy = GPT2BPETokenizer(*write_bpe(tmp_path / "copy"))
    assert (
        fingerprint(copy.identity())
        == fingerprint(made[0].identity())
        != fingerprint(made[1].identity())
    )


def test_the_note_says_what_it_is_about(
    made: tuple[GPT2BPETokenizer, GPT2BPETokenizer, str],
) -> None:
    mine, _, prefix = made
    note = json.loads(Path(f"{prefix}.json").read_text())
    assert note["tokens"] == 12 and note["tokenizer"]["vocab_size"] == mine.vocab_size
    assert note["tokenizer"]["sha256"] == mine.identity()["sha256"]
