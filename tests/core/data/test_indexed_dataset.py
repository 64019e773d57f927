"""The .bin/.idx pair: golden bytes, reading, writing, merging, and every kind of damaged file."""

import errno
import os
import resource
from pathlib import Path

import numpy as np
import pytest

from megatron.data.indexed_dataset import CODES, IndexedDataset
from megatron.data.preprocess.dataset_writer import write_index
from tests import problems
from tests.core.data.corpora import write_corpus
from tests.forkrun import run_ranks
from tests.pairs import PairWriter

BIN = "0a000b000c00140015001e001f002000"
IDX = "4d4d4944494458000001000000000000000803000000000000000300000000000000030000000200000003000000000000000000000006000000000000000a00000000000000000000000000000001000000000000000300000000000000"


def write_golden(prefix: Path) -> str:
    with PairWriter(prefix, np.uint16) as builder:
        builder.add_document([10, 11, 12], [3])
        builder.add_document([20, 21, 30, 31, 32], [2, 3])
    return str(prefix)


def test_golden_bytes(tmp_path):
    prefix = write_golden(tmp_path / "golden")
    assert Path(prefix + ".bin").read_bytes().hex() == BIN
    assert Path(prefix + ".idx").read_bytes().hex() == IDX
    assert sorted(path.name for path in tmp_path.iterdir()) == ["golden.bin", "golden.idx"]


def test_read_items_and_parts(tmp_path):
    data = IndexedDataset(write_golden(tmp_path / "golden"))
    assert len(data) == 3 and data.num_documents == 2 and data.dtype == np.uint16
    assert [data[i].tolist() for i in range(3)] == [[10, 11, 12], [20, 21], [30, 31, 32]]
    assert data.get(2, 1).tolist() == [31, 32]
    assert data.get(2, offset=1, length=1).tolist() == [31]
    assert data.get(2, offset=3, length=0).tolist() == []
    for wrong in ((3,), (-1,), (0, 4), (0, 1, 3), (0, -1), (0, 0, -1)):
        with pytest.raises(IndexError):
            data.get(*wrong)


def test_an_empty_corpus_and_empty_sequences(tmp_path):
    with PairWriter(tmp_path / "none"):
        pass
    data = IndexedDataset(tmp_path / "none")
    data.check()
    assert len(data) == 0 and data.num_documents == 0 and data.identity["sequences"] == 0
    with PairWriter(tmp_path / "zero", np.int32) as builder:
        builder.add_document([], [0])
        builder.add_document([7], [1, 0])
    zero = IndexedDataset(tmp_path / "zero")
    zero.check()
    assert [zero[i].tolist() for i in range(3)] == [[], [7], []]


@pytest.mark.parametrize("dtype", CODES, ids=lambda dtype: dtype.name)
def test_every_dtype_comes_back(tmp_path, dtype):
    tokens = np.array([1, 2, 100, 3]).astype(dtype)
    with PairWriter(tmp_path / "d", dtype) as builder:
        builder.add_document(tokens, [3, 1])
    data = IndexedDataset(tmp_path / "d")
    assert data.dtype == dtype and data[0].tolist() == [1, 2, 100] and data[1].tolist() == [3]


def test_random_corpora_come_back(tmp_path):
    random = np.random.default_rng(0)
    for case in range(20):
        documents = [
            [
                random.integers(0, 60000, random.integers(0, 30))
                for _ in range(random.integers(0, 4))
            ]
            for _ in range(random.integers(0, 12))
        ]
        with PairWriter(tmp_path / f"{case}", np.uint16) as builder:
            for document in documents:
                tokens = np.concatenate([np.zeros(0, np.int64), *document])
                builder.add_document(tokens, [len(part) for part in document])
        data = IndexedDataset(tmp_path / f"{case}")
        data.check()
        flat = [part.tolist() for document in documents for part in document]
        assert [data[i].tolist() for i in range(len(data))] == flat
        assert (
            data.document_indices.tolist()
            == np.cumsum([0] + [len(document) for document in documents]).tolist()
        )


def test_pointers_are_64_bit(tmp_path):
    """Pointers past 2**31 bytes, without writing that much: lengths of a corpus whose tokens are
    never written."""
    lengths = np.array([2**28] * 3)
    idx = str(tmp_path / "big.idx")
    write_index(idx, np.dtype(np.int64), (3, 1), lambda: [lengths], [np.array([3])])
    with open(tmp_path / "big.bin", "wb") as file:
        file.truncate(3 * 2**31)
    data = IndexedDataset(tmp_path / "big")
    data.check()
    assert data.sequence_pointers.tolist() == [0, 2**31, 2**32]
    assert data.get(2, 2**28 - 2).tolist() == [0, 0]


def test_announcement(tmp_path, capsys):
    prefix = write_golden(tmp_path / "golden")
    IndexedDataset(prefix)
    assert capsys.readouterr().out == ""
    IndexedDataset(prefix, announce=True)
    head = "INFO:megatron.core.datasets.indexed_dataset:"
    assert capsys.readouterr().out.splitlines() == [
        f"{head}Load the _IndexReader from {prefix}.idx",
        f"{head}\tExtract the sequence lengths",
        f"{head}\tExtract the sequence pointers",
        f"{head}\tExtract the document indices",
        f"{head}> total number of sequences: 3",
        f"{head}> total number of documents: 2",
    ]


def test_identity_follows_contents_not_paths(tmp_path):
    first = IndexedDataset(write_corpus(tmp_path / "a", [4, 4, 9]))
    again = IndexedDataset(write_corpus(tmp_path / "b", [4, 4, 9]))
    lengths = IndexedDataset(write_corpus(tmp_path / "c", [4, 9, 4]))
    tokens = IndexedDataset(write_corpus(tmp_path / "d", [4, 4, 9], seed=1))
    dtype = IndexedDataset(write_corpus(tmp_path / "e", [4, 4, 9], np.int32))
    assert first.identity == again.identity
    assert first.identity["idx_sha256"] != lengths.identity["idx_sha256"]
    assert first.identity["bin_sha256"] != tokens.identity["bin_sha256"]
    assert first.identity["dtype"] != dtype.identity["dtype"]


def write_at(path: Path, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("golden.bin", "without .bin"),
        ("golden.idx", "without .idx"),
        ("gone", "gone.idx: .*tools/preprocess_data.py"),
        ("text", "text_text_document"),
        ("half", "half.bin: "),
    ],
)
def test_missing_files_name_the_likely_slip(tmp_path, given, words):
    write_golden(tmp_path / "golden")
    write_golden(tmp_path / "text_text_document")
    Path(write_golden(tmp_path / "half") + ".bin").unlink()
    with pytest.raises(FileNotFoundError, match=words):
        IndexedDataset(tmp_path / given)


def test_a_weight_in_the_wrong_place_is_named():
    with problems.raises(FileNotFoundError, "data-not-found", "0.3"):
        IndexedDataset("0.3")


def test_an_unreadable_file_is_one_message(tmp_path):
    (tmp_path / "d.idx").mkdir()
    (tmp_path / "d.bin").write_bytes(b"")
    with problems.raises(ValueError, "file-not-readable", "d.idx"):
        IndexedDataset(tmp_path / "d")


def test_halves_of_two_pairs_are_refused(tmp_path):
    """A .bin that is longer than its index uses, an index of another .bin, and one that says
    another dtype."""
    prefix = write_golden(tmp_path / "golden")
    other = write_corpus(tmp_path / "other", [4, 7, 0])
    with open(prefix + ".bin", "ab") as file:
        file.write(b"123")
    with problems.raises(ValueError, "data-file-damaged", "golden.bin", "19", "16"):
        IndexedDataset(prefix)
    Path(prefix + ".idx").write_bytes(Path(other + ".idx").read_bytes())
    with problems.raises(ValueError, "data-file-damaged", "golden.bin", "19", "22"):
        IndexedDataset(prefix)
    for code in (1, 4):
        write_at(Path(other + ".idx"), 17, bytes([code]))
        with problems.raises(ValueError, "data-file-damaged", "other.bin", "22"):
            IndexedDataset(other)


def test_a_bin_cut_short_while_it_is_read_is_one_message(tmp_path):
    """Mapped memory would end the process with SIGBUS."""
    prefix = write_corpus(tmp_path / "d", [9000, 9000])
    data = IndexedDataset(prefix)
    os.truncate(prefix + ".bin", 20000)
    assert data[0].tolist() == list(range(9000))
    with problems.raises(ValueError, "file-changed-while-read", "d.bin", "20000", "36000"):
        data[1]


def test_a_failing_disk_is_one_message(tmp_path, monkeypatch):
    data = IndexedDataset(write_golden(tmp_path / "golden"))

    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pread", fail)
    with problems.raises(ValueError, "file-not-readable", "golden.bin", "Input/output error"):
        data[0]


def open_many(rank: int, world: int, folder: str) -> int:
    """Open more data sets than a process may open files at first; the descriptors go with the data
    sets."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, hard))
    kept = [IndexedDataset(f"{folder}/golden") for _ in range(60)]
    assert all(data[2].tolist() == [30, 31, 32] for data in kept)
    before = len(os.listdir("/proc/self/fd"))
    del kept
    return before - len(os.listdir("/proc/self/fd"))


def test_more_data_sets_than_the_customary_limit_of_files(tmp_path):
    write_golden(tmp_path / "golden")
    assert run_ranks(1, open_many, str(tmp_path)) == [120]


def test_a_reader_keeps_the_old_pair_while_a_new_one_is_written(tmp_path):
    old = IndexedDataset(write_golden(tmp_path / "golden"))
    write_corpus(tmp_path / "golden", [2, 2])
    assert old[2].tolist() == [30, 31, 32]
    assert [IndexedDataset(tmp_path / "golden")[i].tolist() for i in range(2)] == [[0, 1], [2, 3]]
