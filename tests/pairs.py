"""Small .bin/.idx pairs for tests, document by document."""

import os
from pathlib import Path
from typing import Self

import numpy as np

from megatron.data.preprocess.dataset_writer import write_index


class PairWriter:
    """Collects documents of a corpus, and writes it when its block ends without an exception."""

    def __init__(self, prefix: str | os.PathLike[str], dtype=np.int32):
        self._prefix = os.fspath(prefix)
        self._dtype = np.dtype(dtype)
        self._tokens = [np.zeros(0, self._dtype)]
        self._lengths: list[int] = []
        self._counts: list[int] = []

    def add_document(self, tokens, lengths) -> None:
        """A document: its tokens [sum(lengths)] and the length of each of its sequences."""
        self._tokens.append(np.asarray(tokens).astype(self._dtype))
        self._lengths += map(int, lengths)
        self._counts.append(len(lengths))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind, error, trace) -> None:
        if kind is not None:
            return
        # a reader of the old pair keeps its file
        for end in ("bin", "idx"):
            Path(f"{self._prefix}.{end}").unlink(missing_ok=True)
        Path(f"{self._prefix}.bin").write_bytes(np.concatenate(self._tokens).tobytes())
        lengths, counts = (np.array(n, np.int32) for n in (self._lengths, self._counts))
        sizes = len(lengths), len(counts)
        write_index(f"{self._prefix}.idx", self._dtype, sizes, lambda: [lengths], [counts])
