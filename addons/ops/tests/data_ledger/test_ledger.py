"""The data ledger: its bytes, its hash, appending over resumes, and files that are none."""

from __future__ import annotations

import errno
import hashlib
import os
import struct
import time

import numpy as np

from megatron.addons.ops.data_ledger.writer import Ledger, Recorder
from megatron.data.ledger import MASK, RECORD, read_ledger, sample_hash, tokens_hash
from tests import problems


def rows(path, iterations: range | None = None) -> list[tuple]:
    return read_ledger(str(path), iterations)[1].tolist()


def test_the_bytes_of_a_record(tmp_path):
    path = tmp_path / "ledger"
    Ledger(str(path), 32).record(2, 8, 8, 0xFEDCBA9876543210)
    data = path.read_bytes()
    assert (
        len(data) == 96
        and data[:16] == b"data-ledger\r\n\x1a\0\0"
        and struct.unpack("<IIQ", data[16:32]) == (1, 32, 0)
    )
    assert data[32:64] == bytes(32) and data[64:] == struct.pack(
        "<QQIIQ", 2, 8, 8, 0, 0xFEDCBA9876543210
    )
    assert (
        RECORD.itemsize == 32
        and read_ledger(str(path))[0] == 32
        and rows(path) == [(2, 8, 8, 0, 0xFEDCBA9876543210)]
    )


def test_the_hash_is_that_of_ids_and_number():
    """Worked out here with the standard library alone; how ids are kept does not matter."""
    ids = [5, 0, 50256, 2**31 - 1]
    expected = int.from_bytes(
        hashlib.blake2b(struct.pack("<4i", *ids), digest_size=8).digest(), "little"
    )
    for dtype in (np.int64, np.int32, np.uint32, ">i4"):
        assert tokens_hash(np.array(ids, dtype)) == expected
    assert tokens_hash(np.array([5, 9, 0, 9, 50256, 9, 2**31 - 1])[::2]) == expected
    pair = hashlib.blake2b(struct.pack("<QQ", 7, expected), digest_size=8).digest()
    assert sample_hash(7, expected) == int.from_bytes(pair, "little") != sample_hash(8, expected)


def test_a_resumed_run_replaces_what_it_does_again(tmp_path):
    path = tmp_path / "ledger"
    first = Ledger(str(path), 4)
    for n in range(1, 8):
        first.record(n, 2 * (n - 1), 2, 100 + n)
    again = Ledger(str(path), 4)
    assert len(rows(path)) == 7  # opening loses nothing
    again.record(4, 6, 2, 204)
    assert [row[4] for row in rows(path)] == [101, 102, 103, 204]
    again.record(5, 8, 2, 205)
    again.sync()
    assert [row[0] for row in rows(path)] == [1, 2, 3, 4, 5] and os.path.getsize(path) == 6 * 32
    assert [row[4] for row in rows(path, range(2, 5))] == [102, 103, 204]
    assert rows(path, range(9, 12)) == []


def test_holes_and_a_last_record_cut_short(tmp_path):
    """A ledger that is begun late has holes, and a machine may stop within a record."""
    path = tmp_path / "ledger"
    ledger = Ledger(str(path), 4)
    ledger.record(1000, 5, 2, 1)
    ledger.record(1001, 7, 2, 2)
    os.truncate(path, os.path.getsize(path) - 5)
    assert rows(path) == [(1000, 5, 2, 0, 1)]
    Ledger(str(path), 4).record(1001, 7, 2, 3)
    assert [row[4] for row in rows(path)] == [1, 3]


def test_skipped_iterations(tmp_path):
    path = tmp_path / "ledger"
    ledger = Ledger(str(path), 4)
    ledger.skip(3, [10, 12, 15])
    assert rows(path) == [(3, 10, 2, 1, 0), (4, 12, 3, 1, 0)]
    started = time.process_time()
    ledger.skip(5, range(15, 15 + 2 * 10**6 + 1, 2))
    assert time.process_time() - started < 60
    assert rows(path, range(10**6, 10**6 + 1)) == [(10**6, 15 + 2 * (10**6 - 5), 2, 1, 0)]


def test_ranks_add_up(tmp_path):
    """The sum over ranks is that over the samples, modulo 2**64 and through floats."""
    hashes = [(MASK - 5 * n) & MASK for n in range(7)] + [1, 2**63, 2**32 - 1, 2**32]
    ledger = Ledger(str(tmp_path / "ledger"), 4)
    recorders = [Recorder(ledger, True), Recorder(None, True), Recorder(None, False)]
    for number, value in enumerate(hashes):
        recorders[number % 2].add(value)
        recorders[2].add(value)  # reads the same as another: must not count
    low, high = (
        sum(parts) for parts in zip(*(recorder.halves() for recorder in recorders), strict=True)
    )
    for recorder in recorders:
        recorder.record(1, 0, len(hashes), low, high)
    assert rows(tmp_path / "ledger") == [(1, 0, len(hashes), 0, sum(hashes) & MASK)]
    assert recorders[0].halves() == (0.0, 0.0)


def test_the_halves_are_exact_over_two_million_ranks():
    recorder = Recorder(None, True)
    recorder.add(MASK)
    low, high = recorder.halves()
    ranks = 2**21
    assert int(low * ranks) == (2**32 - 1) * ranks and int(high * ranks) == (2**32 - 1) * ranks


def test_files_that_are_no_ledger_of_this_run(tmp_path):
    path = tmp_path / "ledger"
    path.write_bytes(b'{"iteration": 1}\n' * 10)
    before = path.read_bytes()
    with problems.raises(ValueError, "ledger-malformed"):
        Ledger(str(path), 4)
    assert path.read_bytes() == before
    path.unlink()
    Ledger(str(path), 4)
    with problems.raises(ValueError, "ledger-of-another-sequence-length", "--seq-length"):
        Ledger(str(path), 8)
    with problems.raises(ValueError, "path-not-writable", os.strerror(errno.ENOENT)):
        Ledger(str(tmp_path / "gone" / "ledger"), 4)
    with problems.raises(ValueError, "file-not-readable", os.strerror(errno.ENOENT)):
        read_ledger(str(tmp_path / "gone"))
    path.write_bytes(path.read_bytes()[:20])
    with problems.raises(ValueError, "ledger-malformed"):
        read_ledger(str(path))


def test_a_full_disk_is_one_message(tmp_path, monkeypatch):
    ledger = Ledger(str(tmp_path / "ledger"), 4)
    monkeypatch.setattr(os, "pwrite", lambda *_: 3)
    with problems.raises(ValueError, "path-not-writable"):
        ledger.record(1, 0, 2, 5)
