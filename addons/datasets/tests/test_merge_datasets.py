"""tools/merge_datasets.py: the documents of all inputs in their order, whatever their size, or one
clear message."""

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest

from megatron import checksums, file_sums
from megatron.data import pair_checksums
from megatron.data.indexed_dataset import HEADER, MAGIC, IndexedDataset
from tests.core.data.corpora import write_corpus
from tests.load_tool import exit_code, load_tool
from tests.pairs import PairWriter
from tests.problems import assert_problem, assert_reported

TOOL = load_tool("merge_datasets")


def said_of(note: Path) -> dict[str, object]:
    """What the .json of a pair says but its checksums."""
    said = json.loads(note.read_text())
    assert said.pop("checksum") and said.pop("files")
    return said


def documents(prefix) -> list[list[list[int]]]:
    """Every document as its sequences, every sequence as its tokens."""
    data = IndexedDataset(prefix)
    bounds = data.document_indices.tolist()
    return [
        [data[s].tolist() for s in range(low, high)]
        for low, high in zip(bounds[:-1], bounds[1:], strict=True)
    ]


def test_documents_follow_each_other(tmp_path, capsys):
    with PairWriter(tmp_path / "a", np.uint16) as builder:
        builder.add_document([10, 11, 12], [3])
        builder.add_document([], [])
        builder.add_document([20, 21, 30, 31, 32], [2, 3])
    write_corpus(tmp_path / "b", [4, 2])
    (tmp_path / "empty.bin").write_bytes(b"")
    with PairWriter(tmp_path / "empty", np.uint16):
        pass
    words = [str(tmp_path / name) for name in ("b", "a", "empty", "a")]
    TOOL.main(["--input", *words, "--output-prefix", str(tmp_path / "all")])
    assert documents(tmp_path / "all") == documents(words[0]) + documents(words[1]) * 2
    IndexedDataset(tmp_path / "all").check()
    joined = b"".join(Path(f"{word}.bin").read_bytes() for word in words)
    assert (tmp_path / "all.bin").read_bytes() == joined
    assert "4 data sets, 8 documents, 8 sequences, 22 tokens" in capsys.readouterr().out


def test_a_finished_pair_is_replaced_only_if_asked(tmp_path, capsys):
    one, two = (
        write_corpus(tmp_path / name, lengths) for name, lengths in (("a", [3, 4]), ("b", [5]))
    )
    words = ["--output-prefix", str(tmp_path / "all"), "--input"]
    assert exit_code(TOOL.main, *words, one, two) == 0
    before = documents(tmp_path / "all")
    assert exit_code(TOOL.main, *words, one) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"{tmp_path}/all.bin " in line and "--overwrite" in line
    assert documents(tmp_path / "all") == before
    assert exit_code(TOOL.main, *words, one, "--overwrite") == 0
    assert documents(tmp_path / "all") == documents(one)
    os.unlink(tmp_path / "all.idx")  # half a pair is nothing that could be used
    assert exit_code(TOOL.main, *words, one) == 0


def made_by(prefix, name: str, mark: str) -> None:
    Path(f"{prefix}.json").write_text(
        json.dumps({"tokenizer": {"class": name, "fingerprint": mark}, "tokens": 1})
    )


def test_the_tokenizer_goes_with_the_pair_and_two_are_refused(tmp_path, capsys):
    prefixes = [
        write_corpus(tmp_path / name, [5, 2], np.int32, seed) for seed, name in enumerate("abcd")
    ]
    output = tmp_path / "all"
    note = tmp_path / "all.json"
    words = ["--input", *map(str, prefixes), "--output-prefix", str(output), "--overwrite"]
    made_by(prefixes[1], "NullTokenizer", "0" * 64)
    made_by(prefixes[2], "GPT2BPETokenizer", "1" * 64)
    TOOL.main(words)
    assert said_of(note) == {"tokenizer": {"class": "GPT2BPETokenizer", "fingerprint": "1" * 64}}
    before = [path.read_bytes() for path in (output.with_suffix(".idx"), note)]
    made_by(prefixes[3], "GPT2BPETokenizer", "2" * 64)
    assert TOOL.main(words) == 1
    error = capsys.readouterr().err
    assert_reported(error, "data-of-another-tokenizer", *prefixes[2:], "1" * 12, "2" * 12)
    assert [path.read_bytes() for path in (output.with_suffix(".idx"), note)] == before
    for prefix in prefixes[1:]:
        Path(f"{prefix}.json").unlink()
    TOOL.main(words)
    assert said_of(note) == {}  # what it said was of other data


def test_the_bytes_of_text_are_added_up(tmp_path):
    prefixes = [
        write_corpus(tmp_path / name, [5, 2], np.int32, seed) for seed, name in enumerate("ab")
    ]
    for prefix, text_bytes in zip(prefixes, (30, 12), strict=True):
        said = {
            "tokenizer": {"class": "ByteTokenizer", "fingerprint": "1" * 64},
            "tokens": 7,
            "text_bytes": text_bytes,
        }
        Path(f"{prefix}.json").write_text(json.dumps(said))
    TOOL.main(["--input", *map(str, prefixes), "--output-prefix", str(tmp_path / "all")])
    assert said_of(tmp_path / "all.json") == said | {
        "tokens": 14,
        "text_bytes": 42,
    }
    made_by(prefixes[1], "ByteTokenizer", "1" * 64)  # as an older version wrote it
    TOOL.main(["--input", *map(str, prefixes), "--output-prefix", str(tmp_path / "old")])
    assert said_of(tmp_path / "old.json") == {"tokenizer": said["tokenizer"]}


@pytest.mark.peers
def test_the_bytes_are_those_of_megatron_core(tmp_path):
    peer = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    prefixes = [
        write_corpus(tmp_path / name, [5, 1, 9, 2], np.int32, seed)
        for seed, name in enumerate("abc")
    ]
    builder = peer.IndexedDatasetBuilder(str(tmp_path / "peer.bin"), dtype=np.int32)
    for prefix in prefixes:
        builder.add_index(prefix)
    builder.finalize(str(tmp_path / "peer.idx"))
    TOOL.main(["--input", str(tmp_path / "[abc]"), "--output-prefix", str(tmp_path / "ours")])
    for suffix in (".idx", ".bin"):
        assert (tmp_path / f"ours{suffix}").read_bytes() == (
            tmp_path / f"peer{suffix}"
        ).read_bytes()


def test_sequences_out_of_order_and_with_gaps(tmp_path):
    """Legal in the format, never written by us: the result is in order and without gaps."""
    lengths = [3, 2, 4, 1]
    pointers = [8, 0, 14, 24]
    with open(tmp_path / "a.idx", "wb") as file:
        file.write(HEADER.pack(MAGIC, 1, 8, 4, 5))
        for values, dtype in ((lengths, "<i4"), (pointers, "<i8"), (range(5), "<i8")):
            file.write(np.array(values, dtype).tobytes())
    np.arange(13, dtype=np.uint16).tofile(tmp_path / "a.bin")
    TOOL.main(["--input", str(tmp_path / "a"), "--output-prefix", str(tmp_path / "b")])
    assert (
        documents(tmp_path / "b")
        == documents(tmp_path / "a")
        == [[[4, 5, 6]], [[0, 1]], [[7, 8, 9, 10]], [[12]]]
    )
    assert np.fromfile(tmp_path / "b.bin", np.uint16).tolist() == [4, 5, 6, 0, 1, 7, 8, 9, 10, 12]


@pytest.mark.parametrize(
    ("words", "code", "named"),
    [
        (["a", "c"], "data-dtype-differs", ["c: ", "int32", "uint16"]),
        (["a", "out"], "output-is-an-input", ["--output-prefix "]),
        (["none"], "data-not-found", ["none.idx"]),
        (["cut"], "data-file-damaged", ["cut.idx: "]),
        (["d*"], "data-not-found", ["d*"]),
    ],
)
def test_what_cannot_be_merged(tmp_path, capsys, words, code, named):
    write_corpus(tmp_path / "a", [3, 4])
    write_corpus(tmp_path / "out", [3, 4])
    write_corpus(tmp_path / "c", [3, 4], np.int32)
    write_corpus(tmp_path / "cut", [3, 4])
    (tmp_path / "cut.idx").write_bytes((tmp_path / "cut.idx").read_bytes()[:-1])
    before = (tmp_path / "out.bin").read_bytes()
    paths = [str(tmp_path / word) for word in words]
    assert (
        TOOL.main(["--input", *paths, "--output-prefix", str(tmp_path / "out"), "--overwrite"]) == 1
    )
    assert_problem(capsys.readouterr().err.strip(), code, *named)
    assert (tmp_path / "out.bin").read_bytes() == before and not list(tmp_path.glob("*partial*"))


def test_a_full_disk_and_no_directory(tmp_path, capsys, monkeypatch):
    prefix = write_corpus(tmp_path / "a", [3, 4])
    assert TOOL.main(["--input", prefix, "--output-prefix", str(tmp_path / "no" / "b")]) == 1
    assert_reported(
        capsys.readouterr().err, "directory-missing", f"--output-prefix {tmp_path}/no/b: "
    )
    monkeypatch.setattr(
        os, "statvfs", lambda path: type("Disk", (), {"f_bavail": 1, "f_frsize": 8})()
    )
    assert TOOL.main(["--input", prefix, "--output-prefix", str(tmp_path / "b")]) == 1
    assert_reported(capsys.readouterr().err, "disk-too-small", " 8 bytes ")
    monkeypatch.undo()

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert TOOL.main(["--input", prefix, "--output-prefix", str(tmp_path / "b")]) == 1
    monkeypatch.undo()
    assert_reported(capsys.readouterr().err, "file-operation-failed", os.strerror(errno.ENOSPC))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.bin", "a.idx"]


@pytest.mark.parametrize("threads", ["1", "3"])
def test_the_bytes_do_not_depend_on_threads(tmp_path, monkeypatch, threads):
    monkeypatch.setattr(TOOL, "CHUNK", 300_001)
    prefixes = [
        write_corpus(tmp_path / name, [400_000, 0, size], np.int32, seed)
        for seed, (name, size) in enumerate((("a", 900_003), ("b", 0), ("c", 77)))
    ]
    words = ["--input", *prefixes, "--output-prefix", str(tmp_path / "all")]
    assert TOOL.main([*words, "--threads", threads]) == 0
    joined = b"".join(Path(f"{prefix}.bin").read_bytes() for prefix in prefixes)
    assert (tmp_path / "all.bin").read_bytes() == joined
    assert (
        file_sums.sum_of_file(str(tmp_path / "all.bin"))
        == pair_checksums.recorded(str(tmp_path / "all"))["bin"]["sum"]
    )
    assert file_sums.sum_of_file(str(tmp_path / "all.bin"), threads=5) == file_sums.file_sum(
        checksums.block_sums(joined)
    )
