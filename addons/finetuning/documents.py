"""The documents of a pair of .bin and .idx as samples."""

import numpy as np

from megatron.data.indexed_dataset import IndexedDataset


class Documents:
    """Each document of the pair is a sample. Raises FileNotFoundError and ValueError as
    IndexedDataset does, and ValueError for a pair of something else than token ids."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self._corpus = IndexedDataset(prefix)
        if self._corpus.dtype.kind not in "iu":
            raise ValueError(
                f"{prefix}.idx: holds {self._corpus.dtype.name}, not token ids; preprocess text "
                "into it [data-not-token-ids]"
            )
        self._corpus.check()
        self._starts = np.asarray(self._corpus.document_indices, np.int64)
        ends = np.concatenate(([0], np.cumsum(self._corpus.sequence_lengths, dtype=np.int64)))
        self.lengths = np.diff(ends[self._starts])

    def read(self, sample: int, first: int, count: int) -> np.ndarray:
        """Ids `first .. first + count` of a document, int64."""
        start, stop = self._starts[sample : sample + 2].tolist()
        if stop - start == 1:
            return np.asarray(self._corpus.get(start, first, count), np.int64)
        last = int(self._corpus.sequence_lengths[stop - 1])
        return self._corpus.gather(np.arange(start, stop), 0, last)[first : first + count]

    def bytes_of(self, sample: int, first: int, count: int) -> tuple[int, int]:
        """The bytes of the .bin that hold them: a document's sequences lie one behind the other."""
        size = self._corpus.dtype.itemsize
        begin = int(self._corpus.sequence_pointers[self._starts[sample]]) + first * size
        return begin, begin + count * size

    def fingerprint(self) -> bytes:
        """What distinguishes its documents from others."""
        return repr(self._corpus.identity).encode()
