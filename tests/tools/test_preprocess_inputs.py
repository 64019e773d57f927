"""What tools/preprocess_data.py makes of other inputs than .jsonl, of sentences, of special tokens
and of hard texts."""

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.preprocess import readers as inputs
from megatron.data.tokenizers import gigatoken
from megatron.data.tokenizers.bpe import GPT2BPETokenizer
from tests.core.data.vocabularies import ADVERSARIAL, write_bpe
from tests.problems import assert_reported
from tests.tools.tokenizers.plain_bpe import PlainBPE
from tools import preprocess_data


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "BLOCK_BYTES", 1 << 12)


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    (tmp_path / "bpe").mkdir()
    (tmp_path / "out").mkdir()
    vocab, merges = write_bpe(tmp_path / "bpe")
    return [
        "--output-prefix",
        f"{tmp_path}/out/x",
        "--tokenizer-type",
        "GPT2BPETokenizer",
        "--vocab-file",
        vocab,
        "--merge-file",
        merges,
        "--overwrite",
    ]


def run(*argv: str) -> int:
    return preprocess_data.main(argv)


def texts_in(prefix: str, files: list[str]) -> list[list[str]]:
    """For each document its sequences as text."""
    data = IndexedDataset(prefix)
    tokenizer = GPT2BPETokenizer(*files)
    data.check()
    starts = data.document_indices.tolist()
    return [
        [tokenizer.detokenize(data[i]) for i in range(a, b)]
        for a, b in zip(starts, starts[1:], strict=False)
    ]


def test_a_text_that_is_one_document_is_said(
    tmp_path: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Training could not take validation data of it."""
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    (tmp_path / "b.txt").write_text("three\n")
    (tmp_path / "c.jsonl").write_text('{"text": "four"}\n')
    for files, more, said in (
        (["a.txt"], [], True),
        (["a.txt"], ["--txt-lines"], False),
        (["a.txt", "b.txt"], [], False),
        (["c.jsonl"], [], False),
    ):
        paths = [str(tmp_path / file) for file in files]
        assert run("--input", *paths, *more, "--overwrite", *flags) == 0
        err = capsys.readouterr().err
        assert ("--txt-lines" in err) == ("--valid-data-path" in err) == said


def test_several_keys_are_not_in_a_text(
    tmp_path: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("x")
    assert run("--input", f"{tmp_path}/a.txt", "--json-keys", "a", "b", *flags) == 2
    error = capsys.readouterr().err
    assert_reported(error, "json-keys-malformed", "--json-keys a b: ", f"{tmp_path}/a.txt")


@pytest.mark.peers
def test_rows_without_text_are_bad(
    tmp_path: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(
        pyarrow.table({"a": ["x", None, "y"], "b": [["p", "q"], ["r"], []]}), tmp_path / "e.parquet"
    )
    some = ["--input", f"{tmp_path}/e.parquet", "--json-keys", "b", "a", *flags]
    assert run(*some) == 1
    error = capsys.readouterr().err
    assert_reported(error, "bad-record", f"{tmp_path}/e.parquet, line 2: ", '"a" is null')
    assert run(*some, "--max-bad-records", "1") == 0
    assert texts_in(f"{tmp_path}/out/x_a_document", flags[5:8:2]) == [["x"], ["y"]]
    assert texts_in(f"{tmp_path}/out/x_b_document", flags[5:8:2]) == [["p", "q"], []]


SPEECH = (
    'Dr. Smith arrived at 5 p.m. on Monday.  He said: "It works!"\nMrs. Jones, of Acme Inc., '
    "did not agree. Why?"
)
SENTENCES = [
    "Dr. Smith arrived at 5 p.m. on Monday.",
    'He said: "It works!"',
    "Mrs. Jones, of Acme Inc., did not agree.",
    "Why?",
]


@pytest.mark.peers
def test_sentences(tmp_path: Path, flags: list[str]) -> None:
    pytest.importorskip("punkt")
    (tmp_path / "a.jsonl").write_text(
        json.dumps({"text": SPEECH}) + '\n{"text": ""}\n{"text": ["A b", "One. Two."]}\n'
    )
    some = ["--input", f"{tmp_path}/a.jsonl", "--split-sentences", *flags]
    assert run(*some) == 0
    found = texts_in(f"{tmp_path}/out/x_text_sentence", flags[5:8:2])
    assert found == [SENTENCES, [], ["A b", "One.", "Two."]]
    assert run(*some, "--keep-newlines", "--append-eod") == 0
    kept = texts_in(f"{tmp_path}/out/x_text_sentence", flags[5:8:2])
    assert (
        "".join(kept[0]) == SPEECH + "<|endoftext|>"
        and len(kept[0]) == 4
        and kept[0][0].endswith("Monday.  ")
    )


@pytest.mark.peers
def test_a_language_has_its_own_sentences(tmp_path: Path, flags: list[str]) -> None:
    pytest.importorskip("punkt")
    (tmp_path / "a.jsonl").write_text(
        json.dumps({"text": "Das ist z.B. ein Satz. Und noch einer."}) + "\n"
    )
    assert (
        run("--input", f"{tmp_path}/a.jsonl", "--split-sentences", "--lang", "german", *flags) == 0
    )
    found = texts_in(f"{tmp_path}/out/x_text_sentence", flags[5:8:2])
    assert found == [["Das ist z.B. ein Satz.", "Und noch einer."]]


def test_no_special_tokens_to_tell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "1"}\n')
    null = [
        "--tokenizer-type",
        "NullTokenizer",
        "--vocab-size",
        "9",
        "--output-prefix",
        f"{tmp_path}/x",
    ]
    assert run("--input", f"{tmp_path}/a.jsonl", "--allow-special-tokens", *null) == 1
    error = capsys.readouterr().err
    assert_reported(error, "flag-not-with-tokenizer", "--allow-special-tokens", "NullTokenizer")


@pytest.mark.peers
def test_pieces_are_cut_where_the_pattern_cuts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gigatoken")
    monkeypatch.setattr(gigatoken, "CHUNK", 7)
    files = write_bpe(tmp_path)
    fast = GPT2BPETokenizer(*files, engine="gigatoken")
    plain = PlainBPE(*files)
    lines = "ab\nc\n\nd \ne\n f\ng\r\nh'll\n's\n" * 40
    texts = [*ADVERSARIAL, *(lines[start : start + 53] for start in range(0, len(lines), 41))]
    assert [list(fast.encode(text)) for text in texts] == [plain.encode(text) for text in texts]
    assert len(list(gigatoken.chunks("abcd\nefghijkl\nm"))) == 2
    assert "".join(gigatoken.chunks(ADVERSARIAL[19])) == ADVERSARIAL[19]


def test_a_directory_as_people_have_it(
    tmp_path: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Text of several suffixes, an empty file, UTF-16, a broken line, a subfolder, other files."""
    folder = tmp_path / "in"
    (folder / "sub" / ".git").mkdir(parents=True)
    for name, content in {
        "a.txt": b"one",
        "b.md": b"# two",
        "c.jsonl": b'{"text": "three"}\nbroken\n{"text": "four"}\n',
        "empty.txt": b"",
        "empty.jsonl": b"",
        "u16.txt": "five".encode("utf-16"),
        "sub/d.rst.gz": gzip.compress(b"six"),
        "sub/picture.png": b"\x89PNG",
        ".hidden.txt": b"no",
        "sub/.git/e.txt": b"no",
    }.items():
        (folder / name).write_bytes(content)
    for workers in ("1", "2"):
        words = ["--input", str(folder), "--workers", workers, "--max-bad-records", "2", *flags]
        assert run(*words) == 0
        out, err = capsys.readouterr()
        found = texts_in(f"{tmp_path}/out/x_text_document", flags[5:8:2])
        assert found == [["one"], ["# two"], ["three"], ["four"], ["six"]]
        data = IndexedDataset(f"{tmp_path}/out/x_text_document")
        counted = {
            Path(line.partition(": ")[0]).name: [int(n) for n in re.findall(r"(\d+) ", line)[-2:]]
            for line in out.splitlines()
            if line.endswith(" ids")
        }
        assert {name: count[0] for name, count in counted.items()} == {
            **{"a.txt": 1, "b.md": 1, "c.jsonl": 2, "empty.jsonl": 0, "empty.txt": 0},
            **{"u16.txt": 0, "d.rst.gz": 1},
        }
        assert counted["a.txt"][1] == len(data[0]) and counted["c.jsonl"][1] == len(data[2]) + len(
            data[3]
        )
        assert sum(ids for _, ids in counted.values()) == sum(map(len, data))
        assert "1 .png" in err and "u16.txt, line 1" in err and "c.jsonl, line 2" in err
    description = json.loads(Path(f"{tmp_path}/out/x_text_document.json").read_text())
    assert description["blank_lines"] == 2 and description["bad_records"] == 2
    assert run("--input", str(folder), *flags) == 1
    assert_reported(capsys.readouterr().err, "bad-record", "c.jsonl", "line 2")


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("t.csv", b'text,n\n"a, b",1\nc,2\n', "t.jsonl"),
        ("t.tsv", b"text\tn\na, b\t1\nc\t2\n", "t.jsonl"),
        ("t.json", b' [{"text": "a, b"},\n {"text": "c"}]\n', "t.jsonl"),
    ],
)
def test_the_command_that_is_named_makes_json_lines(
    name: str,
    content: bytes,
    named: str,
    tmp_path: Path,
    flags: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / name).write_bytes(content)
    assert run("--input", f"{tmp_path}/{name}", *flags) == 2
    err = capsys.readouterr().err
    assert_reported(err, "input-format-not-read", name)
    command = err[err.index("python -c") : err.index(named) + len(named)]
    command = command.replace("python -c", f"{sys.executable} -c", 1)
    subprocess.run(command, shell=True, check=True)
    assert run("--input", f"{tmp_path}/t.jsonl", *flags) == 0
    found = texts_in(f"{tmp_path}/out/x_text_document", flags[5:8:2])
    assert found == [["a, b"], ["c"]]


@pytest.mark.parametrize(
    ("name", "content", "code", "says"),
    [
        ("README", b"plain\n", "input-format-not-read", ".txt"),
        ("scan.pdf", b"%PDF-1.4\n", "input-format-not-read", "pdftotext"),
        ("x.docx", b"PK\3\4\0", "input-format-not-read", "pandoc"),
        ("folder", None, "input-without-text", ".md"),
        ("org/name", None, "file-not-readable", "--repo-type"),
    ],
)
def test_what_is_no_input_is_named_with_its_remedy(
    name: str,
    content: bytes | None,
    code: str,
    says: str,
    tmp_path: Path,
    flags: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path(name).write_bytes(content)
    elif "/" not in name:
        Path(name).mkdir()
    assert run("--input", name, *flags) == 2
    assert_reported(capsys.readouterr().err, code, name, says)
