"""The data ledger as it is written; megatron/data/ledger.py has its form."""

from __future__ import annotations

import errno
import os
import stat
import weakref
from collections.abc import Sequence

import numpy as np

from megatron.data.ledger import (
    HEADER,
    MAGIC,
    MASK,
    RECORD,
    SKIPPED,
    VERSION,
    read_header,
    sample_hash,
    tokens_hash,
)

TWO_32 = 1 << 32


class Ledger:
    """A ledger to write. Raises ValueError for a file that is none, or one of samples of another
    length.

    Opening changes nothing that is there. The first record written, of iteration n, removes those
    from n on: a resumed run does these again.
    """

    def __init__(self, path: str, sequence_length: int) -> None:
        self.path = path
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o666)
        except OSError as error:
            raise self._refused(error) from error
        weakref.finalize(self, os.close, self._file)
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            raise self._refused(OSError(errno.EINVAL, "not a regular file"))
        head = os.pread(self._file, HEADER.size, 0)
        if head:
            recorded = read_header(path, head)
            if recorded != sequence_length:
                raise ValueError(
                    f"--data-ledger {path}: is of samples of {recorded} tokens, --seq-length is "
                    f"{sequence_length}; give the ledger of this run, or a new file "
                    "[ledger-of-another-sequence-length]"
                )
        else:
            self._write(HEADER.pack(MAGIC, VERSION, sequence_length, 0), 0)
        self._begun = False

    def record(self, iteration: int, first: int, count: int, value: int) -> None:
        """Iteration `iteration` read `count` samples, the first being the `first`-th of the run;
        `value` is their hash."""
        self._append(np.array([(iteration, first, count, 0, value)], RECORD))

    def skip(self, iteration: int, firsts: Sequence[int]) -> None:
        """The iterations from `iteration` on were skipped; they begin at samples `firsts`, whose
        last entry is the end."""
        starts = np.asarray(firsts, np.int64)
        records = np.zeros(len(starts) - 1, RECORD)
        records["iteration"] = np.arange(iteration, iteration + len(records))
        records["first"], records["count"], records["flag"] = starts[:-1], np.diff(starts), SKIPPED
        self._append(records)

    def go_back(self) -> None:
        """The next record is of a repeated iteration: as after opening, it removes what follows."""
        self._begun = False

    def sync(self) -> None:
        """Wait until everything written is on the disk."""
        os.fsync(self._file)

    def _append(self, records: np.ndarray) -> None:
        offset = int(records["iteration"][0]) * RECORD.itemsize
        if not self._begun:
            os.ftruncate(self._file, max(HEADER.size, min(offset, os.fstat(self._file).st_size)))
            self._begun = True
        self._write(records.tobytes(), offset)

    def _write(self, data: bytes, offset: int) -> None:
        try:
            written = os.pwrite(self._file, data, offset)
        except OSError as error:
            raise self._refused(error) from error
        if written != len(data):
            raise self._refused(OSError(0, "the disk is full"))

    def _refused(self, error: OSError) -> ValueError:
        return ValueError(
            f"--data-ledger {self.path}: cannot be written ({error.strerror}); give a file on a "
            "disk that takes it, or omit --data-ledger [path-not-writable]"
        )


class Recorder:
    """One rank's part in a ledger: sums up the hashes of what it reads; `ledger` is None on all
    ranks but the one that writes. `counts`: whether this is the one of the ranks that read the same
    which adds them to the sum of all ranks.

    The sum travels as two halves, floats that stay exact over 2**21 ranks, with numbers that are
    summed anyway.
    """

    def __init__(self, ledger: Ledger | None, counts: bool) -> None:
        self.ledger = ledger
        self._counts = counts
        self._sum = 0

    @staticmethod
    def hash_of(number: int, row: np.ndarray) -> int:
        """The hash of sample `number`, as its data set gives it."""
        return sample_hash(number, tokens_hash(row))

    def add(self, value: int) -> None:
        """Add the hash of what was just read."""
        self._sum = (self._sum + value) & MASK

    def halves(self) -> tuple[float, float]:
        """The (low, high) 32 bits of the hash since the last call, zeros where another rank counts
        them."""
        high, low = divmod(self._sum if self._counts else 0, TWO_32)
        self._sum = 0
        return float(low), float(high)

    def record(self, iteration: int, first: int, count: int, low: float, high: float) -> None:
        """Write an iteration; `low` and `high` are the sums of all ranks' halves."""
        if self.ledger:
            self.ledger.record(iteration, first, count, (int(low) + int(high) * TWO_32) & MASK)
