"""A set of parts made of a pair."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.pair_checksums import describe_with_sums
from megatron.data.parts.part_set import PartSet
from tests.pairs import PairWriter

MAKER = {"class": "ByteTokenizer", "fingerprint": "f"}


def cut_in_parts(source: str, target: Path, ends: Sequence[int], tasks: int = 3) -> str:
    """The documents of a pair as a set whose parts end at these documents."""
    corpus = IndexedDataset(source)
    made_of = tuple(f"{number:032x}" for number in range(len(ends)))
    parts = PartSet(str(target), tasks, made_of, {"format": 2})
    parts.write_plan()
    first = 0
    for number, end in enumerate(ends):
        part = parts.part(number)
        tokens = 0
        with PairWriter(part, corpus.dtype) as builder:
            for document in range(first, end):
                sequences = [corpus[n] for n in corpus.sequences_of(document)]
                ids = np.concatenate([np.zeros(0, corpus.dtype), *sequences])
                builder.add_document(ids, [len(each) for each in sequences])
                tokens += len(ids)
        note = {
            "tokenizer": MAKER,
            "documents": end - first,
            "tokens": tokens,
            "text_bytes": 3 * tokens,
            "part": {"made_of": made_of[number]},
        }
        Path(f"{part}.json").write_text(describe_with_sums(note, f"{part}.bin", f"{part}.idx"))
        first = end
    return str(target)
