"""`--dummy-data internlm`: the million generated samples of InternLM's demos."""

from __future__ import annotations

import numpy as np

SAMPLES = 1_000_000
SEED = 1999
TIMES = 200  # a pattern is repeated fewer times; ids are below


class DummySamples:
    """Sample i is [n, r] and then 0 .. n - 1, r times over, cut to `sequence_length`; n is below 30
    and r from 10 to 199."""

    prefix = "--dummy-data internlm"

    def __init__(self, sequence_length: int) -> None:
        random = np.random.RandomState(SEED)
        self._cycle = random.randint(1, 30, size=SAMPLES).astype(np.uint8)
        self._times = random.randint(10, TIMES, size=SAMPLES).astype(np.uint8)
        self.lengths = np.minimum(self._cycle.astype(np.int32) * self._times + 2, sequence_length)

    def read(self, sample: int, first: int, count: int) -> np.ndarray:
        """Ids `first .. first + count` of a sample, int64."""
        cycle = int(self._cycle[sample])
        ids = (np.arange(first, first + count) - 2) % cycle
        head = [cycle, int(self._times[sample])][first : first + count]
        ids[: len(head)] = head
        return ids

    def bytes_of(self, sample: int, first: int, count: int) -> None:
        """There are none."""

    def fingerprint(self) -> bytes:
        """There is only this one."""
        return b"internlm"
