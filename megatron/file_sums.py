"""Checksums of files, read block by block, and of small tables."""

import errno
import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from megatron.checksums import BLOCK_BYTES, block_sum, block_sums, crc32
from megatron.small_files import open_regular, retried


def read_summed(
    file: int, view: memoryview, offset: int, block_bytes: int = BLOCK_BYTES
) -> tuple[int, list[str]]:
    """Fill `view` from byte `offset` of an open file: (bytes that were there, the sum of each whole
    block of them).

    A block is summed while it is in the caches of its core. Raises OSError.
    """
    sums: list[str] = []
    for start in range(0, len(view), block_bytes):
        block = view[start : start + block_bytes]
        done = _fill(file, block, offset + start)
        if done < len(block):
            return start + done, sums
        sums.append(block_sum(block))
    return len(view), sums


def _fill(file: int, view: memoryview, offset: int) -> int:
    done = 0
    while done < len(view):
        got = os.preadv(file, [view[done:]], offset + done)
        if got == 0:
            break
        done += got
    return done


def file_sum(sums: Iterable[str]) -> str:
    """One checksum of a whole file out of the sums of its blocks, as 32 lower-case hex digits."""
    return hashlib.blake2b("".join(sums).encode(), digest_size=16).hexdigest()


def sum_of_file(path: str, chunk_bytes: int = 16 * BLOCK_BYTES, threads: int = 1) -> str:
    """`file_sum` of a file, read once, by so many threads. Raises OSError."""
    share = -(-os.path.getsize(path) // (threads * BLOCK_BYTES)) * BLOCK_BYTES

    def sums(thread: int) -> list[str]:
        def read() -> list[str]:
            stop = (thread + 1) * share if thread + 1 < threads else None
            return _sums_between(path, thread * share, stop, chunk_bytes)

        return retried(read, errno.ESTALE)

    if threads == 1:
        return file_sum(sums(0))
    with ThreadPoolExecutor(threads) as pool:
        return file_sum(itertools.chain.from_iterable(pool.map(sums, range(threads))))


def _sums_between(path: str, start: int, stop: int | None, chunk_bytes: int) -> list[str]:
    """The sums of the blocks of a file from byte `start` on, up to `stop` or its end."""
    sums: list[str] = []
    with open_regular(path) as opened:
        file = opened.fileno()
        size = os.fstat(file).st_size
        size = size if stop is None else min(stop, size)
        buffer = memoryview(bytearray(max(0, min(chunk_bytes, size - start))))
        while start < size:
            hole = min(_data_after(file, start, size), size) - start
            if hole >= BLOCK_BYTES:  # zeros that the disk does not hold need not be read
                sums += [_ZERO_SUM] * (hole // BLOCK_BYTES)
                start += hole // BLOCK_BYTES * BLOCK_BYTES
                continue
            got = _fill(file, buffer[: size - start], start)
            if not got:
                break
            sums += block_sums(buffer[:got])
            start += got
    return sums


_ZERO_SUM = block_sum(bytes(BLOCK_BYTES))


def _data_after(file: int, offset: int, size: int) -> int:
    """Where data begin at or after byte `offset`: `size` if only a hole is left; `offset` where
    holes are not known."""
    try:
        return os.lseek(file, offset, os.SEEK_DATA)
    except AttributeError:
        return offset
    except OSError as error:
        return size if error.errno == errno.ENXIO else offset


def table_sum(table: Mapping[str, Any]) -> str:
    """Checksum of a table of JSON values, whatever the order and the white space of its text."""
    return crc32(json.dumps(table, sort_keys=True).encode())
