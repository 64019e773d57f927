"""preprocess_data.py --metadata-keys and inspect_data.py source: from a document to its line, and
from an id to its documents."""

from __future__ import annotations

import codecs
import functools
import gzip
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data import document_sources
from megatron.data.document_sources import DocumentSources
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.parts import part_set
from megatron.data.preprocess import readers, resumable_writer
from megatron.data.preprocess.original import original_record
from tests import problems
from tests.load_tool import exit_code, load_tool
from tests.tools.kills import status_of_killed

PREPROCESS = load_tool("preprocess_data")
INSPECT = load_tool("inspect_data")
MERGE = load_tool("merge_datasets")
BYTES = ["--tokenizer-type", "ByteTokenizer", "--workers", "1"]
KEEP = ["--metadata-keys", "id", "url", "licence"]
# composed and decomposed are two ids; half a surrogate pair is one, too
ODD = ["é", "e\u0301", "\ud83d", "😀", "a\u0000b", "\u202e x", "", '"q"\n', 17, 1.5, [1, "é"], True]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setattr(readers, "BLOCK_BYTES", 700)
    monkeypatch.setattr(resumable_writer, "SECONDS", 0.0)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


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


def kept(record: dict[str, Any]) -> dict[str, Any]:
    return {key: record[key] for key in KEEP[1:] if record.get(key) is not None}


def as_typed(value: Any) -> str:
    """An id as it stands on a command line."""
    return (
        value if isinstance(value, str) else json.dumps(value, ensure_ascii=False).replace(" ", "")
    )


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    return tmp_path


def test_each_document_of_json_lines_has_its_line_and_each_id_its_documents(corpus: Path) -> None:
    expected = write_jsonl(corpus / "in")
    assert preprocess(corpus, "x", *KEEP) == 0
    made = {tasks: in_tasks(corpus, f"x{tasks}", tasks) for tasks in (1, 2, 7)}
    assert made[1] == made[2] == made[7]
    assert sum(name.endswith(".sources") for name in made[1]) > 4
    alone = str(corpus / "out" / "x_text_document")
    for prefix in (alone, str(corpus / "out" / "x7_text_document")):
        sources = DocumentSources(prefix)
        assert len(sources) == len(expected) == IndexedDataset(prefix).num_documents
        lines_known = 0
        for number, (path, offset, line, record) in enumerate(expected):
            found = sources.document(number)
            assert (found["input"], found["offset"]) == (path, offset)
            assert found["line"] in ((line,) if prefix == alone else (line, None))
            lines_known += found["line"] is not None
            assert found["fields"] == kept(record)
            assert json.loads(original_record(found)) == record
        assert lines_known
        for name in {as_typed(record["id"]) for *_, record in expected if "id" in record}:
            wanted = [
                number
                for number, (*_, record) in enumerate(expected)
                if "id" in record and as_typed(record["id"]) == name
            ]
            assert sources.with_id(name) == wanted
        assert sources.with_id("None") == sources.with_id("a-") == []
        assert len(sources.with_id("twice")) == 3
        assert exit_code(INSPECT.main, "check", prefix) == 0


def test_a_merge_joins_them(corpus: Path) -> None:
    """Of a set it is what one machine writes, except for lines that a part does not know."""
    write_jsonl(corpus / "in")
    assert preprocess(corpus, "x", *KEEP) == 0
    in_tasks(corpus, "x2", 2)
    out = corpus / "out"
    alone = f"{out}/x_text_document"
    assert (
        exit_code(MERGE.main, "--input", f"{out}/x2_text_document", "--output-prefix", f"{out}/m")
        == 0
    )
    once, merged = DocumentSources(alone), DocumentSources(f"{out}/m")
    assert len(once) == len(merged)
    for number in range(len(once)):
        expected, found = once.document(number), merged.document(number)
        assert found == {**expected, "line": found["line"]}
        assert found["line"] in (expected["line"], None)
    assert merged.with_id("twice") == once.with_id("twice") and len(once.with_id("twice")) == 3
    assert exit_code(INSPECT.main, "check", f"{out}/m") == 0
    # the same input twice is one input
    twice = ("--input", alone, alone, "--output-prefix", f"{out}/m", "--overwrite")
    assert exit_code(MERGE.main, *twice) == 0
    merged = DocumentSources(f"{out}/m")
    assert merged.document(len(once) + 7) == {**once.document(7), "document": len(once) + 7}
    assert len(merged.with_id("twice")) == 6
    # a pair without them
    assert preprocess(corpus, "y") == 0
    mixed = ("--input", alone, f"{out}/y_text_document", "--output-prefix", f"{out}/m")
    assert exit_code(MERGE.main, *mixed, "--overwrite") == 0
    assert not os.path.exists(f"{out}/m.sources")
    assert exit_code(INSPECT.main, "check", f"{out}/m") == 0


@pytest.mark.parametrize("kind", ["gz", "txt", "txt-lines", "chat"])
def test_other_inputs(corpus: Path, kind: str) -> None:
    """Compressed, text and conversations: the record that is shown is the one that was read."""
    flags: list[str] = []
    pair = "x_text_document"
    if kind == "gz":
        texts = [json.dumps(record) for record in records("a")]
        (corpus / "in" / "a.jsonl.gz").write_bytes(gzip.compress("\n".join(texts).encode()))
    elif kind == "chat":
        turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
        texts = [json.dumps({"messages": turns, "id": str(number)}) for number in range(50)]
        texts.insert(3, json.dumps(turns))  # without an object, so without an id
        (corpus / "in" / "a.jsonl").write_text("\n".join(texts))
        flags = ["--chat", "--chat-template", "zephyr"]
        pair = "x_chat_document"
    else:
        texts = [f"text {number} é" for number in range(70)]
        flags = ["--txt-lines"] if kind == "txt-lines" else []
        joined = "\n".join(texts)
        (corpus / "in" / "a.txt").write_bytes(codecs.BOM_UTF8 + joined.encode())
        texts = texts if flags else [joined]
    assert preprocess(corpus, "x", *KEEP, *flags) == 0
    sources = DocumentSources(str(corpus / "out" / pair))
    shown = [original_record(sources.document(number)) for number in range(len(sources))]
    assert shown == texts
    if kind == "chat":
        assert sources.with_id("3") == [4]


@pytest.mark.peers
def test_rows_of_parquet(corpus: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    expected = []
    for name in "ab":
        rows = [
            {**record, "id": as_typed(record["id"]) if "id" in record else None}
            for record in records(name)
            if record.get("id") != "\ud83d"
        ]
        table = pyarrow.table(
            {key: [row.get(key) for row in rows] for key in ("text", "id", "url")}
        )
        path = corpus / "in" / f"{name}.parquet"
        parquet.write_table(table, path, row_group_size=11)
        expected += [(str(path), number, row) for number, row in enumerate(rows)]
    assert preprocess(corpus, "x", *KEEP) == 0  # no column licence
    assert preprocess(corpus, "bare") == 0
    for end in ("bin", "idx"):
        paths = [corpus / "out" / f"{name}_text_document.{end}" for name in ("x", "bare")]
        assert paths[0].read_bytes() == paths[1].read_bytes()
    note, bare = (
        json.loads((corpus / "out" / f"{name}_text_document.json").read_text())
        for name in ("x", "bare")
    )
    assert note["input_bytes"] == bare["input_bytes"]
    made = {
        tasks: in_tasks(corpus, f"x{tasks}", tasks, "--part-bytes", 1000) for tasks in (1, 2, 7)
    }
    assert made[1] == made[2] == made[7]
    for prefix in ("x_text_document", "x7_text_document"):
        sources = DocumentSources(str(corpus / "out" / prefix))
        assert len(sources) == len(expected)
        for number, (path, row, record) in enumerate(expected):
            found = sources.document(number)
            assert (found["input"], found["row"]) == (path, row)
            assert found["fields"] == {
                key: record[key] for key in ("id", "url") if record.get(key) is not None
            }
            shown = json.loads(original_record(found))
            assert (shown["text"], shown["url"]) == (record["text"], record["url"])
        assert sources.with_id("b-1") == [
            number for number, (_, _, r) in enumerate(expected) if r["id"] == "b-1"
        ]


@pytest.mark.parametrize(
    ("call", "tasks", "step"),
    [
        ("replace", False, 12),
        ("replace", True, 12),
        *(
            pytest.param(call, tasks, 4, marks=pytest.mark.campaign)
            for call in ("replace", "fsync")
            for tasks in (False, True)
        ),
    ],
)
def test_a_run_that_is_killed_goes_on_to_the_same_bytes(
    corpus: Path, call: str, tasks: bool, step: int
) -> None:
    """The process ends, without any tidying up, at one of its calls."""
    write_jsonl(corpus / "in")
    flags = [*KEEP, "--json-keys", "text", "url"]
    flags += ["--part-bytes", "9000", "--task", "0/1"] if tasks else []
    assert preprocess(corpus, "once", *flags) == 0

    def content(prefix: str) -> dict[str, bytes]:
        return {
            str(path).partition(f"/{prefix}_")[2]: path.read_bytes()
            for path in (corpus / "out").rglob("*")
            if path.is_file() and f"/{prefix}_" in str(path) and path.suffix != ".tmp"
        }

    once = content("once")
    assert sum(name.endswith(".sources") for name in once) >= 2
    for calls in range(1, 30, step):
        status_of_killed(call, calls, functools.partial(preprocess, corpus, f"x{calls}", *flags))
        for name, data in content(f"x{calls}").items():  # whole parts are right
            if tasks and name.endswith(".json") and name.replace(".json", ".sources") in once:
                assert data == once[name]
        code = preprocess(corpus, f"x{calls}", *flags)
        assert code == 0 or (not tasks and code == 2)  # 2: it had been whole
        assert content(f"x{calls}") == once


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
    monkeypatch.setattr(document_sources, "_hash", lambda name: 5)
    expected = write_jsonl(corpus / "in")
    assert preprocess(corpus, "x", *KEEP) == 0
    sources = DocumentSources(str(corpus / "out" / "x_text_document"))
    assert [expected[number][3]["id"] for number in sources.with_id("b-5")] == ["b-5"]
    assert sources.with_id("no") == []


def test_the_tool_shows_the_line_and_says_when_the_input_has_changed(
    corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = write_jsonl(corpus / "in")
    assert preprocess(corpus, "x", *KEEP) == 0
    prefix = corpus / "out" / "x_text_document"
    capsys.readouterr()
    assert exit_code(INSPECT.main, "source", prefix, "--id", "twice", "--json") == 0
    documents = json.loads(capsys.readouterr().out)["documents"]
    assert [json.loads(document["record"])["id"] for document in documents] == ["twice"] * 3
    assert [document["document"] for document in documents] == [10, 70, 130]
    for odd, code in (("\ud83d", 2), ("\u202e x", 0), ("", 0)):
        assert exit_code(INSPECT.main, "source", prefix, f"--id={odd}") == code
    path, offset, line, _ = expected[70]
    capsys.readouterr()
    assert exit_code(INSPECT.main, "source", prefix, "--document", 70) == 0
    shown = capsys.readouterr().out
    assert path in shown and f"line {line}, bytes {offset} .." in shown and "twice" in shown
    content = Path(path).read_bytes()
    for changed in (content.replace(b"twice", b"twins"), content + b"\n", None):
        Path(path).unlink()
        if changed is not None:
            Path(path).write_bytes(changed)
        assert exit_code(INSPECT.main, "source", prefix, "--document", 70) == 1
        out, err = capsys.readouterr()
        assert f"bytes {offset} .." in out and path in err
        if changed is not None:
            problems.assert_problem(err.strip(), "source-changed", path)


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
    prefix = corpus / "out" / "x_text_document"
    for words, exit_with, code in (
        ((prefix,), 2, "flag-missing"),
        ((prefix, "--id", "x", "--document", 1), 2, "flag-missing"),
        ((prefix, "--id", "nobody"), 1, "document-not-found"),
        ((prefix, "--document", 180), 1, "document-not-found"),
    ):
        assert exit_code(INSPECT.main, "source", *words) == exit_with
        problems.assert_problem(capsys.readouterr().err.strip(), code)


def test_damage_is_found(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Any changed byte by `check`; by `source` no wrong answer without an error in what it reads of
    the file's frame."""
    write_jsonl(corpus / "in")
    assert preprocess(corpus, "x", *KEEP) == 0
    prefix = corpus / "out" / "x_text_document"
    path = Path(f"{prefix}.sources")
    content = path.read_bytes()
    draw = np.random.default_rng(1)
    for number in (0, 17, 20, 24, len(content) - 1, *draw.integers(64, len(content), 5).tolist()):
        damaged = bytearray(content)
        damaged[number] ^= 64
        path.write_bytes(damaged)
        capsys.readouterr()
        assert exit_code(INSPECT.main, "check", prefix) == 1
        problems.assert_problem(capsys.readouterr().err.strip(), "data-file-damaged", path)
        if number < 28 or number == len(content) - 1:
            with problems.raises(ValueError, "data-file-damaged", path):
                DocumentSources(str(prefix))
    path.write_bytes(content[:-3])
    with problems.raises(ValueError, "data-file-damaged", path):
        DocumentSources(str(prefix))


def card(prefix: object, keys: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> Any:
    """{values: (documents, tokens)} and the sums, of --json; the table has as many rows."""
    flags = ("--by", *keys) if keys else ()
    capsys.readouterr()
    assert exit_code(INSPECT.main, "card", prefix, *flags) == 0
    table = capsys.readouterr().out.splitlines()
    assert exit_code(INSPECT.main, "card", prefix, *flags, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    rows = {
        json.dumps(list(row["values"].values())): (row["documents"], row["tokens"])
        for row in found["rows"]
    }
    assert len(table) == len(rows) + 3 == len(found["rows"]) + 3
    assert sum(row["share"] for row in found["rows"]) == pytest.approx(1)
    return rows, (found["documents"], found["tokens"])


def test_a_card_has_every_document_and_token(
    corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a pair, of a set of parts and of what was merged, against a count of document for
    document. In blocks of 7, of which the odd ids take some to Python's json."""
    monkeypatch.setattr(document_sources, "BLOCK", 7)
    expected = write_jsonl(corpus / "in")
    assert preprocess(corpus, "x", *KEEP) == 0
    in_tasks(corpus, "x2", 2)
    out = corpus / "out"
    merge = ("--input", f"{out}/x2_text_document", "--output-prefix", f"{out}/m")
    assert exit_code(MERGE.main, *merge) == 0
    pair = IndexedDataset(out / "x_text_document")
    total = (len(expected), pair.bin_bytes // pair.dtype.itemsize)
    for keys in ((), ("licence",), ("licence", "url"), ("url", "id"), ("id",)):
        counts: dict[str, tuple[int, int]] = {}
        for number, (path, _, _, record) in enumerate(expected):
            values = json.dumps([record.get(key) for key in keys] or [path])
            tokens = sum(len(pair[n]) for n in pair.sequences_of(number))
            before = counts.get(values, (0, 0))
            counts[values] = (before[0] + 1, before[1] + tokens)
        assert len(counts) > 1 and any("null" in values for values in counts) == bool(keys)
        for prefix in ("x_text_document", "x2_text_document", "m"):
            assert card(out / prefix, keys, capsys) == (counts, total)


def test_a_card_is_not_misled_by_what_values_look_like(
    corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(document_sources, "BLOCK", 2)
    records: list[dict[str, Any]] = []
    for odd in (
        {"id": 'a","licence":"no', "licence": "yes 1"},
        {"id": '\\","licence":"no"}{', "licence": '"\\'},
        {"id": {"licence": "no"}, "licence": "yes 2"},
        {"id": {"id": {"licence": "no"}}},
        {"id": {"licence": "no"}},
        {"id": [{"licence": "no"}, "]"], "licence": ["a", "b|c"]},
        {"id": "}{", "url": "},{", "licence": "}"},
        {"id": "a", "licence": -1.5e-7},
        {"id": "a", "licence": 1},
        {"id": "a", "licence": "1"},
        {"id": "a", "licence": True},
        {"id": "a", "licence": ""},
        {"url": "a"},
        {},
    ):
        records += [{"id": "1", "licence": "cc0"}, odd]
    texts = [json.dumps({"text": "a" * number, **record}) for number, record in enumerate(records)]
    (corpus / "in" / "a.jsonl").write_text("\n".join(texts))
    assert preprocess(corpus, "x", *KEEP) == 0
    counts: dict[str, tuple[int, int]] = {}
    for number, record in enumerate(records):
        values = json.dumps([record.get("licence")])
        before = counts.get(values, (0, 0))
        counts[values] = (before[0] + 1, before[1] + number)
    rows, _ = card(corpus / "out" / "x_text_document", ("licence",), capsys)
    assert rows == counts and len(rows) > 8


def test_what_a_card_refuses(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_jsonl(corpus / "in")
    assert preprocess(corpus, "x", *KEEP) == preprocess(corpus, "bare") == 0
    out = corpus / "out"
    for prefix, keys, code in (
        ("x_text_document", ("licence", "lincense"), "document-sources-missing"),
        ("bare_text_document", (), "document-sources-missing"),
        ("nowhere", (), "document-sources-missing"),
    ):
        capsys.readouterr()
        flags = ("--by", *keys) if keys else ()
        assert exit_code(INSPECT.main, "card", out / prefix, *flags) == 1
        problems.assert_problem(capsys.readouterr().err.strip(), code, *keys[1:])


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
