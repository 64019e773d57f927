"""The block sum: equal to its definition in plain Python, and blind to none of the faults a disk
makes."""

import errno
import os
import random
import zlib

import pytest

from megatron.checksums import (
    BLOCK_BYTES,
    ROW_WORDS,
    block_sum,
    block_sums,
    crc32,
)
from megatron.file_sums import read_summed


def by_definition(block: bytes) -> str:
    """The docstring of checksums.py, word by word."""
    row = 8 * 521
    rows = len(block) // row
    if rows < 2:
        return f"{zlib.crc32(block):08x}"
    columns = [0] * 521
    for at in range(0, rows * row, 8):
        columns[at // 8 % 521] += int.from_bytes(block[at : at + 8], "little")
    summed = b"".join((column % 2**64).to_bytes(8, "little") for column in columns)
    return f"{zlib.crc32(summed + block[rows * row :]):08x}"


@pytest.mark.parametrize("length", [0, 1, 8, 4167, 4168, 8335, 8336, 8337, 8344, 12504, 50_001])
def test_the_sum_is_its_definition(length):
    block = random.Random(length).randbytes(length)
    assert block_sum(block) == by_definition(block) == block_sum(memoryview(bytearray(block)))
    shifted = memoryview(b"x" + block)[1:]  # not aligned to words
    assert block_sum(shifted) == by_definition(block)


def test_known_values():
    assert crc32(b"123456789") == "cbf43926" == block_sum(b"123456789")  # the check value of CRC-32
    assert block_sum(bytes(BLOCK_BYTES)) == by_definition(bytes(BLOCK_BYTES))
    assert block_sums(b"") == () and ROW_WORDS * 8 > 4096


def test_blocks_are_summed_one_by_one():
    data = random.Random(1).randbytes(3 * 4096 + 5)
    assert block_sums(data, 4096) == tuple(
        block_sum(data[at : at + 4096]) for at in (0, 4096, 8192, 12288)
    )


@pytest.mark.parametrize("block_bytes", [4096, 8336, 1 << 18, BLOCK_BYTES])
def test_what_is_read_is_summed_as_what_is_held(block_bytes, tmp_path):
    data = random.Random(7).randbytes(3 * (1 << 20) + 4321)
    path = tmp_path / "data"
    path.write_bytes(data)
    with path.open("rb") as file:
        for start, stop in (
            (0, len(data)),
            (17, 17 + 2 * block_bytes),
            (5, 6),
            (0, 0),
            (100, 8500 + block_bytes // 2),
        ):
            view = memoryview(bytearray(stop - start + 1))[1:]  # not aligned to words
            done, sums = read_summed(file.fileno(), view, start, block_bytes)
            assert done == stop - start and view == data[start:stop]
            assert tuple(sums) == block_sums(data[start:stop], block_bytes)
        # beyond the end: what is there, and whole blocks
        view = memoryview(bytearray(2 * block_bytes + 50))
        start = len(data) - block_bytes - 9
        done, sums = read_summed(file.fileno(), view, start, block_bytes)
        assert done == block_bytes + 9 and sums == list(
            block_sums(data[start : start + block_bytes], block_bytes)
        )
        assert view[:done] == data[start:]
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        read_summed(10**6, memoryview(bytearray(9)), 0)


@pytest.mark.parametrize("content", ["random", "zeros", "floats"])
def test_every_fault_of_one_page_and_every_moved_page_changes_the_sum(content):
    rng = random.Random(4)
    pages = 24
    block = {
        "random": rng.randbytes(pages * 4096),
        "zeros": bytes(pages * 4096),
        "floats": (b"\x00\x00\x80\x3f" * 512 + rng.randbytes(2048)) * pages,
    }[content]
    good = block_sum(block)
    seen = 0
    for _ in range(1500):
        bad = bytearray(block)
        page = rng.randrange(pages) * 4096
        kind = rng.randrange(5)
        if kind == 0:
            bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        elif kind == 1:  # many flips, sign bits among them, in one page
            for _ in range(rng.randint(2, 40)):
                bad[page + 8 * rng.randrange(512) + 7] ^= 0x80
        elif kind == 2:
            bad[page : page + 4096] = bytes(4096)
        elif kind == 3:
            bad[page : page + 4096] = rng.randbytes(4096)
        else:
            other = rng.randrange(pages) * 4096
            bad[page : page + 4096], bad[other : other + 4096] = (
                block[other : other + 4096],
                block[page : page + 4096],
            )
        if bad != block:
            seen += 1
            assert block_sum(bytes(bad)) != good
    assert seen > 500
