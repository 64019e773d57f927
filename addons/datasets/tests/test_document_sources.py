"""preprocess_data.py --metadata-keys: from an id to its documents."""

import codecs
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.addons.datasets import source_reader
from megatron.addons.datasets.source_reader import DocumentSources
from megatron.data import document_sources
from megatron.data.parts import part_set
from megatron.data.preprocess import readers, resumable_writer
from tests import problems
from tests.load_tool import exit_code, load_tool

PREPROCESS = load_tool("preprocess_data")
BYTES = ["--tokenizer-type", "ByteTokenizer", "--workers", "1"]
KEEP = ["--metadata-keys", "id", "url", "licence"]
# composed and decomposed are two ids; half a surrogate pair is one, too
ODD = ["é", "e\u0301", "\ud83d", "😀", "a\u0000b", "\u202e x", "", '"q"\n', 17, 1.5, [1, "é"], True]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "BLOCK_BYTES", 700)
    monkeypatch.setattr(resumable_writer, "SECONDS", 0.0)


def records(name: str, count: int = 60) -> list[dict[str, Any]]:
    """Some have no licence, some null for it, every seventh no id; id "twice" is in all files."""
    found: list[dict[str, Any]] = []
    for number in range(count):
        record: dict[str, Any] = {"text": f"{name} {number} " * (number % 9), "url": f"u{number}"}
        if number % 7:
            record["id"] = f"{name}-{number}"
        if number % 3:
            record["licence"] = "cc0" if number % 2 else None
        found.append(record)
    for record, odd in zip(found[20:], ODD, strict=False):
        record["id"] = odd
    found[10]["id"] = "twice"
    return found


def write_jsonl(folder: Path) -> list[tuple[str, int, int, dict[str, Any]]]:
    """Three files, the first with a byte order mark, the last without its last end of line, with
    blank lines and CR LF; (path, byte, line, record) of each document."""
    expected = []
    for number, name in enumerate("abc"):
        content = codecs.BOM_UTF8 if number == 0 else b""
        for line, record in enumerate(records(name), 1):
            content += b"\n" * (line % 2) if number == 1 else b""
            text = json.dumps(record, ensure_ascii=line % 2 == 0 or record.get("id") == "\ud83d")
            expected.append(
                (f"{folder}/{name}.jsonl", len(content), content.count(b"\n") + 1, record)
            )
            content += text.encode() + (b"\r\n" if number == 1 else b"\n")
        Path(f"{folder}/{name}.jsonl").write_bytes(content if number < 2 else content[:-1])
    return expected


def preprocess(folder: Path, prefix: str, *more: object) -> int:
    (folder / "out").mkdir(exist_ok=True)
    words = ["--input", folder / "in" / "*", "--output-prefix", folder / "out" / prefix]
    return exit_code(PREPROCESS.main, *words, *BYTES, *more)


def in_tasks(folder: Path, prefix: str, tasks: int, *more: object) -> dict[str, bytes]:
    """The files of the parts that these tasks make, without parts.json."""
    for task in reversed(range(tasks)):
        flags = ("--part-bytes", 2000, "--task", f"{task}/{tasks}")
        assert preprocess(folder, prefix, *KEEP, *flags, *more) == 0
    parts = folder / "out" / f"{prefix}_text_document.parts"
    return {path.name: path.read_bytes() for path in parts.iterdir() if path.name != "parts.json"}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    return tmp_path


def test_a_part_without_its_sources_is_made_again(corpus: Path) -> None:
    write_jsonl(corpus / "in")
    before = in_tasks(corpus, "x", 2)
    prefix = str(corpus / "out" / "x_text_document")
    os.truncate(f"{prefix}.parts/000001.sources", 100)
    Path(f"{prefix}.parts/000002.sources").unlink()
    with problems.raises(ValueError, "data-parts-missing", prefix):
        DocumentSources(prefix)
    assert in_tasks(corpus, "x", 3) == before
    # another list of keys is another command; without one the parts have no such file
    flags = ("--part-bytes", 2000, "--task", "0/1")
    assert preprocess(corpus, "x", *flags) == 1
    assert preprocess(corpus, "x", *KEEP[:2], *flags) == 1
    assert preprocess(corpus, "x", *flags, "--overwrite") == 0
    assert not list((corpus / "out").rglob("*.sources"))
    assert len(list(part_set.read_plan(prefix).records())) > 4


def test_a_pair_that_is_replaced_loses_its_sources(corpus: Path) -> None:
    write_jsonl(corpus / "in")
    assert preprocess(corpus, "x", *KEEP) == 0
    assert preprocess(corpus, "x", "--overwrite") == 0
    prefix = str(corpus / "out" / "x_text_document")
    assert not Path(f"{prefix}.sources").exists()
    with problems.raises(ValueError, "document-sources-missing", prefix):
        DocumentSources(prefix)


def test_two_ids_of_one_hash_are_told_apart(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_sources, "hash_of", lambda name: 5)
    monkeypatch.setattr(source_reader, "hash_of", lambda name: 5)
    expected = write_jsonl(corpus / "in")
    assert preprocess(corpus, "x", *KEEP) == 0
    sources = DocumentSources(str(corpus / "out" / "x_text_document"))
    assert [expected[number][3]["id"] for number in sources.with_id("b-5")] == ["b-5"]
    assert sources.with_id("no") == []


def test_what_is_refused(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_jsonl(corpus / "in")
    for flags, code in (
        (("--metadata-keys", "id", "id"), "json-keys-malformed"),
        ((*KEEP, "--partitions", 2), "flags-exclude-each-other"),
    ):
        assert preprocess(corpus, "x", *flags) == 2
        problems.assert_problem(capsys.readouterr().err.strip(), code)
    assert preprocess(corpus, "x", *KEEP, "--metadata-keys", "id", "lincense") == 0
    assert "lincense" in capsys.readouterr().err


def test_no_record_is_larger_than_its_size_in_the_sidecar(
    corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its size has 32 bits; what has more than RECORD_BYTES is a bad record, with keys or not."""
    assert readers.RECORD_BYTES + readers.BLOCK_BYTES < np.iinfo(document_sources.ROW["bytes"]).max
    monkeypatch.setattr(readers, "RECORD_BYTES", 5000)
    lines = [json.dumps({"id": str(n), "text": "a" * n}) for n in (10, 9000, 20)]
    (corpus / "in" / "a.jsonl").write_text("\n".join(lines))
    assert preprocess(corpus, "x", *KEEP) == 1
    problems.assert_reported(capsys.readouterr().err, "bad-record", "a.jsonl")
    assert preprocess(corpus, "x", *KEEP, "--max-bad-records", 1) == 0
    sources = DocumentSources(str(corpus / "out" / "x_text_document"))
    assert [sources.document(n)["fields"]["id"] for n in range(len(sources))] == ["10", "20"]
