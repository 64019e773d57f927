"""How many documents and tokens of a corpus came from each input file, source or licence."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from megatron.data.document_sources import DocumentSources
from megatron.data.indexed_dataset import IndexedDataset


class Share(NamedTuple):
    """The documents that have these values, one of each key, None where they do not have it."""

    values: tuple[Any, ...]
    documents: int
    tokens: int


def data_card(prefix: str, keys: Sequence[str]) -> list[Share]:
    """A pair or a set of parts, divided by the values of these keys (of preprocess_data.py
    --metadata-keys), or without keys by input file; most tokens first. Every document is in one
    share. Raises OSError, and ValueError for data without sources, or without one of the keys."""
    sources = DocumentSources(prefix)
    corpus = IndexedDataset(prefix)
    if len(sources) != corpus.num_documents:
        raise ValueError(
            f"{prefix}: has {corpus.num_documents} documents, its .sources {len(sources)}; they "
            "are of two pairs: copy all files again [data-file-damaged]"
        )
    numbers: defaultdict[tuple[bytes, ...], int] = defaultdict(itertools.count().__next__)
    documents = np.zeros(0, np.int64)
    tokens = np.zeros(0, np.int64)
    first = 0
    for values in sources.values(keys):
        shares = np.fromiter(map(numbers.__getitem__, values), np.int64, len(values))
        stop = first + len(shares)
        new = (0, len(numbers) - len(documents))
        documents = np.pad(documents, new) + np.bincount(shares, minlength=len(numbers))
        # floats, but exact: no block has 2^53 tokens
        weights = _tokens(corpus, first, stop)
        sums = np.bincount(shares, weights, len(numbers)).astype(np.int64)
        tokens = np.pad(tokens, new) + sums
        first = stop
    card = [
        Share(tuple(json.loads(text) if text else None for text in texts), *counts)
        for texts, *counts in zip(numbers, documents.tolist(), tokens.tolist(), strict=True)
    ]
    return sorted(card, key=lambda share: (-share.tokens, -share.documents, repr(share.values)))


def _tokens(corpus: IndexedDataset, first: int, stop: int) -> np.ndarray:
    """The number of tokens of each of these documents."""
    sequences = np.asarray(corpus.document_indices[first : stop + 1])
    lengths = corpus.sequence_lengths[sequences[0] : sequences[-1]]
    before = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    return np.diff(before[sequences - sequences[0]])
