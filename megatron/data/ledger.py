"""The data ledger: 32 bytes for each iteration that say which samples it read, and a hash of them.

Record n is at byte 32 n and the header at byte 0, so that a repeated iteration replaces its record,
two ledgers can be compared with `cmp`, and iterations that nobody recorded are holes of zeros.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import struct
import weakref
from collections.abc import Sequence

import numpy as np

from megatron.small_files import open_regular

MAGIC = b"data-ledger\r\n\x1a\x00\x00"
VERSION = 1
HEADER = struct.Struct("<16sIIQ")  # magic, version, tokens of a sample without its last label, 0
RECORD = np.dtype(
    [("iteration", "<u8"), ("first", "<u8"), ("count", "<u4"), ("flag", "<u4"), ("hash", "<u8")]
)
SKIPPED = 1  # the flag of an iteration whose samples were consumed unread; its hash is 0
MASK = (1 << 64) - 1
TWO_32 = 1 << 32


def tokens_hash(ids: np.ndarray) -> int:
    """64 bits of the token ids [n] alone, whatever integers they are kept in: blake2b of them as
    little-endian int32."""
    return _hash(np.ascontiguousarray(ids, "<i4").data)


def sample_hash(number: int, tokens: int) -> int:
    """64 bits of a sample: its number in the training data and the hash of its tokens. An
    iteration's hash is the sum of those of its samples modulo 2**64, in whatever order and by
    whichever ranks they are read."""
    return _hash(struct.pack("<QQ", number, tokens))


def _hash(data: bytes | memoryview) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


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
            recorded = _read_header(path, head)
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


def _read_header(path: str, head: bytes) -> int:
    """The sequence length in a header."""
    if len(head) < HEADER.size or not head.startswith(MAGIC):
        raise ValueError(
            f"--data-ledger {path}: not a data ledger; give a new file, or one that --data-ledger "
            "wrote [ledger-malformed]"
        )
    _, version, sequence_length, _ = HEADER.unpack(head)
    if version != VERSION:
        raise ValueError(
            f"--data-ledger {path}: has version {version}, this program knows {VERSION}; give a "
            "new file [ledger-malformed]"
        )
    return sequence_length


def read_ledger(path: str, iterations: range | None = None) -> tuple[int, np.ndarray]:
    """(sequence length, the records (`RECORD`) of these iterations, without `iterations` of all) of
    a ledger.

    Iterations that are not recorded are omitted, and so is a last record cut short. Raises
    ValueError.
    """
    try:
        with open_regular(path) as file:
            sequence_length = _read_header(path, file.read(HEADER.size))
            count_of_records = os.fstat(file.fileno()).st_size // RECORD.itemsize
            numbers_read = (
                range(1, count_of_records)
                if iterations is None
                else range(iterations.start, min(iterations.stop, count_of_records))
            )
            file.seek(numbers_read.start * RECORD.itemsize)
            records = np.frombuffer(file.read(len(numbers_read) * RECORD.itemsize), RECORD)
    except OSError as error:
        raise ValueError(
            f"--data-ledger {path}: cannot be read ({error.strerror}); check the path "
            "[file-not-readable]"
        ) from error
    numbers = np.arange(numbers_read.start, numbers_read.start + len(records), dtype=np.uint64)
    wrong = (records["iteration"] != 0) & (records["iteration"] != numbers)
    if wrong.any():
        iteration = numbers_read.start + int(wrong.argmax())
        raise ValueError(
            f"--data-ledger {path}: holds another iteration where {iteration} belongs; the file is "
            "damaged [ledger-malformed]"
        )
    return sequence_length, records[records["iteration"] != 0]


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
