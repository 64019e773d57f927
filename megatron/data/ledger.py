"""A data ledger as it is read: 32 bytes for each iteration that say which samples it read, and a
hash of them.

Record n is at byte 32 n and the header at byte 0, so that a repeated iteration replaces its record,
two ledgers can be compared with `cmp`, and iterations that nobody recorded are holes of zeros.
"""

import hashlib
import os
import struct

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


def read_header(path: str, head: bytes) -> int:
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
            sequence_length = read_header(path, file.read(HEADER.size))
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
