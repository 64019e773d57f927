"""What a loader reads: the samples of a dataset, each checked against the vocabulary and, for a
ledger, hashed.

It knows datasets by index; it must not know batches, ranks or where a ledger is written.
"""

from __future__ import annotations

import numpy as np

from megatron.data.ledger import sample_hash, tokens_hash
from megatron.data.packed.packed_dataset import LABELS
from megatron.data.sample_lookup import Dataset, pieces
from megatron.data.subsets import subset_of


class Samples:
    """`samples[i]` is sample i, int64 [sequence_length + 1] (packed: a row, [4, tokens]); with
    `hashed` a pair of it and its hash. With `with_subset` an id behind the tokens says which data
    set of a blend the sample is of.

    Raises ValueError for an id that is not below `vocab_size`, with the file and the place where it
    stands.
    """

    def __init__(
        self, dataset: Dataset, vocab_size: int, hashed: bool = False, with_subset: bool = False
    ) -> None:
        self.dataset = dataset
        self.vocab_size = vocab_size
        self.hashed = hashed
        self.with_subset = with_subset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> np.ndarray | tuple[np.ndarray, int]:
        tokens = self.dataset[index]
        # As unsigned numbers negative ids are large ones: one pass finds both.
        if int(ids_of(tokens).view(np.uint64).max()) >= self.vocab_size:
            raise self._outside(index, tokens)
        sample = np.append(tokens, subset_of(self.dataset, index)) if self.with_subset else tokens
        return (sample, sample_hash(index, tokens_hash(tokens))) if self.hashed else sample

    def _outside(self, index: int, tokens: np.ndarray) -> ValueError:
        lines = np.atleast_2d(ids_of(tokens))
        line, place = np.argwhere(lines.view(np.uint64) >= self.vocab_size)[0].tolist()
        at = place
        for piece in pieces(self.dataset, index):
            if at < piece.length:
                break
            at -= piece.length
        return ValueError(
            f"{piece.prefix}.bin: token {piece.offset + at + line} of document {piece.document} "
            f"is the id {lines[line, place]}, the vocabulary has {self.vocab_size}; give the "
            "tokenizer it was preprocessed with, or make the pair anew with "
            "tools/preprocess_data.py"
        )


def ids_of(sample: np.ndarray) -> np.ndarray:
    """What of a sample are token ids: all of it, of a packed row its tokens and labels."""
    return sample if sample.ndim == 1 else sample[: LABELS + 1]
