"""Pairs that tools/inspect_data.py checks, damaged by tests/campaigns/hostile."""

from pathlib import Path
from typing import Any

from megatron.addons.datasets.inspect_data import check_pair
from megatron.addons.datasets.source_reader import DocumentSources
from megatron.data.pair_checksums import verify_tokens
from tests.campaigns.hostile import oracles
from tests.campaigns.hostile.campaign import Kind
from tests.campaigns.hostile.kinds import VOCAB, make_pair, make_texts, preprocess


def read_checked(folder: Path) -> dict[str, Any]:
    found = check_pair(str(folder / "d"), VOCAB, all_tokens=True)
    if "problem" in found:
        raise ValueError(found["problem"])
    return found


def make_sources(folder: Path) -> None:
    make_texts(folder)
    words = ("--tokenizer-type", "NullTokenizer", "--vocab-size", oracles.VOCAB)
    preprocess(folder, *words, "--max-bad-records", 9, "--metadata-keys", "n", "url")


def read_sources(folder: Path) -> list[Any]:
    prefix = str(folder / "x_text_document")
    verify_tokens(prefix)
    sources = DocumentSources(prefix)
    return [sources.document(number)["fields"] for number in range(len(sources))]


KINDS = [
    Kind("pair that is inspected", make_pair, read_checked, ("d.*",), checksummed=True),
    Kind("sources", make_sources, read_sources, ("*.sources",), checksummed=True),
]
