"""All parts of a set, read as the one pair that they are."""

import json
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Protocol

import numpy as np

from megatron.data.index_arrays import IndexArrays
from megatron.data.index_cache import IndexCache
from megatron.data.parts.part_set import read_plan
from megatron.data.token_bytes import TokenBytes, open_tokens

NAMES = ("sequence_lengths", "sequence_pointers", "document_indices")
KIND = "PartSet"
MOST_OPEN = 1024  # parts whose .bin is open; beyond, the one opened first is closed


class JoinedPair(Protocol):
    """What is read of a part: `indexed_dataset.IndexedDataset`."""

    dtype: np.dtype
    sequence_lengths: np.ndarray
    sequence_pointers: np.ndarray
    document_indices: np.ndarray

    def check(self) -> None:
        """Raise ValueError for a damaged index."""


class Joined:
    """The index and the tokens (`token_bytes.TokenBytes`) of a whole set. `arrays`: those of the
    joined index, by NAMES; `dtype`; `size`, the bytes of all parts.

    `open_pair` opens a part. Raises ValueError for a set that is not whole, naming the first part
    that is missing. The joined index is built once, at the first start, in the `cache` folder of
    the parts; where that cannot be written, at every start in memory.
    """

    def __init__(self, prefix: str, open_pair: Callable[[str], JoinedPair]) -> None:
        self._plan = read_plan(prefix)
        files = [record["files"] for record in self._plan.records()]
        self._ends = list(accumulate(file["bin"]["bytes"] for file in files))
        self._open: dict[int, TokenBytes] = {}
        self._open_pair = open_pair
        self.size = self._ends[-1]
        self.dtype = open_pair(self._plan.part(0)).dtype
        self.arrays = self._arrays([file["idx"]["sum"] for file in files])

    def _arrays(self, sums: Sequence[str]) -> IndexArrays:
        cache = IndexCache(f"{self._plan.folder}/cache")
        description = json.dumps({"parts": len(self._plan), "dtype": self.dtype.name, "idx": sums})
        arrays = cache.load(KIND, description, NAMES)
        if arrays is not None:
            return arrays
        if not cache.writable():
            return IndexArrays(self._built())
        with cache.building(KIND, description):
            arrays = cache.load(KIND, description, NAMES)  # by another process meanwhile
            return arrays or cache.store(KIND, description, self._built())

    def _built(self) -> dict[str, np.ndarray]:
        pairs = [self._open_pair(part) for part in self._plan.parts()]
        for pair in pairs:
            pair.check()
        starts = [0, *accumulate(len(pair.sequence_lengths) for pair in pairs)]
        bytes_before = [0, *self._ends]
        return {
            "sequence_lengths": np.concatenate([pair.sequence_lengths for pair in pairs]),
            "sequence_pointers": np.concatenate(
                [pair.sequence_pointers + n for pair, n in zip(pairs, bytes_before, strict=False)]
            ),
            "document_indices": np.concatenate(
                [
                    np.zeros(1, "<i8"),
                    *(
                        pair.document_indices[1:] + n
                        for pair, n in zip(pairs, starts, strict=False)
                    ),
                ]
            ),
        }

    def read(self, start: int, count: int) -> bytes:
        """`count` bytes from byte `start` on of the token files one behind the other. Raises
        ValueError where a file cannot give them."""
        chunks = []
        number = bisect_right(self._ends, start)
        while count:
            begin = self._ends[number - 1] if number else 0
            size = min(count, self._ends[number] - start)
            if size:
                chunks.append(self._part(number).read(start - begin, size))
            start += size
            count -= size
            number += 1
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def probe(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """See `TokenBytes`."""
        return [self.read(*each) for each in ranges]

    def _part(self, number: int) -> TokenBytes:
        opened = self._open.get(number)
        if opened is None:
            if len(self._open) >= MOST_OPEN:
                self._open.pop(next(iter(self._open))).close()
            opened = self._open[number] = open_tokens(f"{self._plan.part(number)}.bin")
        return opened

    def close(self) -> None:
        """Close the files."""
        while self._open:
            self._open.popitem()[1].close()
