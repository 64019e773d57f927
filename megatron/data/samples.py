"""What a loader reads: the samples of a dataset, each checked against the vocabulary and, for a ledger, hashed; and where
in its files a sample stands.

It knows datasets by index; it must not know batches, ranks or where a ledger is written.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron.data.blended_dataset import BlendedDataset
from megatron.data.gpt_dataset import GPTDataset
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.ledger import sample_hash, tokens_hash

Dataset = GPTDataset | BlendedDataset


@dataclass(frozen=True)
class Piece:
    """A run of a sample's tokens that lie together: tokens `offset .. offset + length` of document `document`.

    `first_byte .. end_byte` is where they are in `<prefix>.bin`, None for made-up data. `sequence` is the entry of the
    .idx they belong to: the document itself unless documents were split into sentences.
    """

    prefix: str
    document: int
    sequence: int
    offset: int
    length: int
    first_byte: int | None
    end_byte: int | None


def pieces(dataset: Dataset, index: int) -> list[Piece]:
    """Where the tokens of sample `index` of a dataset or a blend lie, in their order."""
    member, index = member_of(dataset, index)
    corpus, found = member.corpus, []
    for sequence, offset, length in member.locate(index):
        if not isinstance(corpus, IndexedDataset):
            found.append(Piece(corpus.path_prefix, sequence, sequence, offset, length, None, None))
            continue
        document, before = corpus.document_of(sequence)
        size = corpus.dtype.itemsize
        first = int(corpus.sequence_pointers[sequence]) + offset * size
        found.append(Piece(corpus.path_prefix, document, sequence, before + offset, length, first, first + length * size))
    return found


def member_of(dataset: Dataset, index: int) -> tuple[GPTDataset, int]:
    """The dataset that sample `index` of a blend comes from, and its number there; itself for a plain dataset."""
    if not isinstance(dataset, BlendedDataset):
        return dataset, index
    number, sample = dataset.source(index)
    return dataset.datasets[number], sample


class Samples:
    """`samples[i]` is sample i, int64 [sequence_length + 1]; with `hashed` a pair of it and its hash.

    Raises ValueError for an id that is not below `vocab_size`, with the file and the place where it stands.
    """

    def __init__(self, dataset: Dataset, vocab_size: int, hashed: bool = False) -> None:
        self.dataset, self.vocab_size, self.hashed = dataset, vocab_size, hashed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> np.ndarray | tuple[np.ndarray, int]:
        tokens = self.dataset[index]
        # As unsigned numbers negative ids are large ones: one pass finds both.
        if int(tokens.view(np.uint64).max()) >= self.vocab_size:
            raise self._outside(index, tokens)
        return (tokens, sample_hash(index, tokens_hash(tokens))) if self.hashed else tokens

    def _outside(self, index: int, tokens: np.ndarray) -> ValueError:
        place = at = int((tokens.view(np.uint64) >= self.vocab_size).argmax())
        for piece in pieces(self.dataset, index):
            if at < piece.length:
                break
            at -= piece.length
        return ValueError(
            f"{piece.prefix}.bin: token {piece.offset + at} of document {piece.document} is the id {tokens[place]}, the "
            f"vocabulary has {self.vocab_size}; give the tokenizer it was preprocessed with, or make the pair anew with "
            "tools/preprocess_data.py"
        )
