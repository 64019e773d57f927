"""tools/convert_data.py: ids, samples, places and subsets stay what they are, both ways; what
cannot be is said first."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from megatron.addons.finetuning.tests.packed_files import write_pair
from megatron.addons.internlm import token_data as TOOL
from megatron.addons.internlm import token_files
from megatron.addons.internlm.tests.lines import write_lines
from megatron.addons.internlm.token_files import JsonlTokens
from megatron.data import pair_checksums
from megatron.data.indexed_dataset import IndexedDataset
from tests.pairs import PairWriter
from tests.problems import assert_reported
from tools.shared import progress

NAMES = ("en/a", "en/deep/b", "cn/a", "z_cn/a")


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def lines(tmp_path) -> Path:
    random = np.random.default_rng(6)
    for name in NAMES:
        samples = [random.integers(-9, 70_000, random.integers(0, 30)).tolist() for _ in range(50)]
        write_lines(tmp_path / "lines" / f"{name}.bin", samples)
    return tmp_path / "lines"


def run(capsys, *words: str | Path) -> str:
    code = TOOL.main([str(word) for word in words])
    out, error = capsys.readouterr()
    assert code == 0, error
    return out


def refused(capsys, *words: str | Path) -> str:
    assert TOOL.main([str(word) for word in words]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "Traceback" not in error and error.count("\n") == 1
    return error


def test_there_and_back_gives_the_same_bytes(lines, tmp_path, capsys):
    said = run(capsys, "to-megatron", lines, tmp_path / "pairs")
    assert sorted(content(tmp_path / "pairs")) == sorted(
        f"{name}.{end}" for name in NAMES for end in ("bin", "idx", "json")
    )
    for name in NAMES:
        assert pair_checksums.verify_tokens(f"{tmp_path}/pairs/{name}")
        samples = JsonlTokens(f"{lines}/{name}.bin")
        pair = IndexedDataset(f"{tmp_path}/pairs/{name}")
        assert pair.num_documents == 50 and pair.dtype == np.int32
        starts = pair.document_indices.tolist()
        for number in range(50):
            found = [pair[n].tolist() for n in range(starts[number], starts[number + 1])]
            assert [token for part in found for token in part] == samples.ids(number).tolist()
    tokens = sum(int(JsonlTokens(f"{lines}/{name}.bin").lengths.sum()) for name in NAMES)
    first, *_, last = said.splitlines()
    assert first.startswith("[1 of 4] ") and last == f"4 files, 200 samples, {tokens:,} tokens"
    run(capsys, "to-internlm", tmp_path / "pairs", tmp_path / "back")
    assert content(tmp_path / "back") == content(lines)


def test_pairs_there_and_back(tmp_path, capsys):
    """Of a document of several sequences the tokens stay; half-width ids on request."""
    write_pair(tmp_path / "pairs/code/x", [[5, 6, 65535], [], [7]])
    with PairWriter(tmp_path / "pairs/code/y", np.uint16) as builder:
        builder.add_document(np.array([1, 2, 3], np.uint16), [1, 2])
        builder.add_document(np.array([4], np.uint16), [1])
    run(capsys, "to-internlm", tmp_path / "pairs", tmp_path / "lines")
    y = JsonlTokens(f"{tmp_path}/lines/code/y.bin")
    assert [y.ids(n).tolist() for n in range(2)] == [[1, 2, 3], [4]]
    run(capsys, "to-megatron", tmp_path / "lines", tmp_path / "half", "--dtype", "uint16")
    assert IndexedDataset(f"{tmp_path}/half/code/x").dtype == np.uint16
    run(capsys, "to-megatron", tmp_path / "lines", tmp_path / "again")
    again = content(tmp_path / "again")
    before = content(tmp_path / "pairs")
    assert all(
        again[name] == before[name] for name in ("code/x.bin", "code/x.idx")
    ) and again.keys() == before.keys() | {"code/x.json", "code/y.json"}


def test_progress_within_a_long_file(lines, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    assert TOOL.main(["to-megatron", str(lines), str(tmp_path / "pairs")]) == 0
    told = capsys.readouterr().err.splitlines()
    assert (
        len(told) == 200
        and "file 1 of 4, 50 of 50 samples" in told[49]
        and told[-1].startswith("100.0%")
    )


def test_what_cannot_be_converted_is_said(lines, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    said = refused(capsys, "to-megatron", tmp_path / "empty", tmp_path / "out")
    assert_reported(said, "packed-folder-without-data", tmp_path / "empty")
    said = refused(capsys, "to-megatron", tmp_path / "none", tmp_path / "out")
    assert f"error: {tmp_path}/none: " in said
    assert f"error: {lines}: " in refused(capsys, "to-internlm", lines, tmp_path / "out")
    assert f"error: {lines}/out: " in refused(capsys, "to-megatron", lines, lines / "out")
    assert f"error: {lines}: " in refused(capsys, "to-megatron", lines, lines)
    write_lines(tmp_path / "one/en/a.bin", [[1, 2]])
    write_lines(tmp_path / "there/en/a.bin", [[3]])
    said = refused(capsys, "to-megatron", tmp_path / "one", tmp_path / "there")
    assert f"error: {tmp_path}/there/en/a.bin: " in said
    assert JsonlTokens(f"{tmp_path}/there/en/a.bin").ids(0).tolist() == [3]
    error = refused(capsys, "to-megatron", lines, tmp_path / "out", "--dtype", "uint16")
    assert_reported(error, "token-id-out-of-range", "cn/a.bin: sample ", "uint16")
    assert content(tmp_path / "out") == {}
    assert TOOL.main(["to-nowhere", "a", "b"]) == 2


def test_a_damaged_line_leaves_nothing_half_done(lines, tmp_path, capsys):
    path = lines / "en/a.bin"
    path.write_bytes(path.read_bytes().replace(b"]}", b"]]", 1))
    assert "en/a.bin: sample " in refused(capsys, "to-megatron", lines, tmp_path / "out")
    # whole, and the damaged one not at all
    assert sorted(content(tmp_path / "out")) == ["cn/a.bin", "cn/a.idx", "cn/a.json"]


def test_a_full_disk_leaves_nothing_half_done(tmp_path, capsys, monkeypatch):
    write_pair(tmp_path / "pairs/code/x", [[5, 6], [7]])

    def full(source, target):
        raise OSError(28, os.strerror(28), target)

    monkeypatch.setattr(token_files.os, "replace", full)
    said = refused(capsys, "to-internlm", tmp_path / "pairs", tmp_path / "out")
    assert os.strerror(28) in said
    assert content(tmp_path / "out") == {}
