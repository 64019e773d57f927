"""What tools/preprocess_data.py makes of other inputs than .jsonl, of sentences, of special tokens
and of hard texts."""

from __future__ import annotations

import gzip
import json
import lzma
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.preprocess import readers as inputs
from megatron.data.tokenizers import gigatoken
from megatron.data.tokenizers.bpe import GPT2BPETokenizer
from tests.core.data.vocabularies import ADVERSARIAL, gpt2_files, write_bpe
from tests.problems import assert_reported
from tests.tools.tokenizers.plain_bpe import PlainBPE
from tools import preprocess_data


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setattr(inputs, "BLOCK_BYTES", 1 << 12)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


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


TEXTS = [text for text in ADVERSARIAL if text] * 3


@pytest.mark.peers
def test_every_kind_of_file_in_one_run(tmp_path: Path, flags: list[str]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    zstandard = pytest.importorskip("zstandard")
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
    plain = "\n".join(text for text in TEXTS if text.isprintable())
    (tmp_path / "in").mkdir()
    for name, content in {
        "a.jsonl": lines,
        "b.jsonl.gz": gzip.compress(lines),
        "c.jsonl.xz": lzma.compress(lines),
        "d.jsonl.zst": zstandard.compress(lines),
        "f.txt": plain.encode(),
        "g.txt.gz": gzip.compress(plain.encode()),
    }.items():
        (tmp_path / "in" / name).write_bytes(content)
    parquet.write_table(
        pyarrow.table({"text": TEXTS, "n": list(range(len(TEXTS)))}), tmp_path / "in" / "e.parquet"
    )
    for workers in ("1", "2"):
        assert run("--input", f"{tmp_path}/in/*", "--workers", workers, *flags) == 0
        found = texts_in(f"{tmp_path}/out/x_text_document", flags[5:8:2])
        assert found == [[text] for text in TEXTS] * 5 + [[plain]] * 2


def test_lines_of_text_files(tmp_path: Path, flags: list[str]) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\r\n\n two \n" + "drei é".encode() + b"\n\xff\nend")
    assert run("--input", f"{tmp_path}/a.txt", "--txt-lines", "--max-bad-records", "1", *flags) == 0
    assert texts_in(f"{tmp_path}/out/x_text_document", flags[5:8:2]) == [
        ["one"],
        [" two "],
        ["drei é"],
        ["end"],
    ]
    (bad,) = (tmp_path / "out" / "x.bad_records.jsonl").read_text().splitlines()
    assert json.loads(bad) == {
        "file": f"{tmp_path}/a.txt",
        "line": 5,
        "what": "is not UTF-8 (byte 1 is 0xff)",
    }
    assert run("--input", f"{tmp_path}/a.txt", *flags) == 1


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


def test_special_tokens_are_text_unless_asked_for(tmp_path: Path, flags: list[str]) -> None:
    texts = ["<|endoftext|>", "a<|endoftext|>b<|endoftext|><|endoftext|>", "<|endoftext|", "c"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for more, count in (([], 0), (["--allow-special-tokens"], 4)):
        assert run("--input", f"{tmp_path}/a.jsonl", *more, *flags) == 0
        data = IndexedDataset(f"{tmp_path}/out/x_text_document")
        tokenizer = GPT2BPETokenizer(*flags[5:8:2])
        assert sum(int((data[i] == tokenizer.eod).sum()) for i in range(4)) == count
        assert [tokenizer.detokenize(data[i]) for i in range(4)] == texts


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
def test_hard_texts_are_as_in_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    vocab, merges = gpt2_files()
    oracle = transformers.GPT2TokenizerFast(vocab=vocab, merges=merges)
    book = "".join(text for text in ADVERSARIAL if not tokenizer_probe_skips(text))
    # cut in pieces
    large = (
        (book.replace(" " * 100, " ") * 2000)[:2_500_000] + "\n" * 50 + "x  \n y\n\nz \n" * 40_000
    )
    texts = [*ADVERSARIAL, " " * 3000, "a\n" * 3000, "🙂" * 500, "\x00\x01\x1f" * 99, large]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    flags = ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", vocab, "--merge-file", merges]
    flags += [
        "--input",
        f"{tmp_path}/a.jsonl",
        "--output-prefix",
        f"{tmp_path}/x",
        "--workers",
        "2",
    ]
    assert run(*flags, "--allow-special-tokens") == 0  # there it is always the special token
    data = IndexedDataset(f"{tmp_path}/x_text_document")
    starts = data.document_indices.tolist()
    found = [data[a].tolist() if a < b else [] for a, b in zip(starts, starts[1:], strict=False)]
    differ = [
        text[:40] for text, ids in zip(texts, found, strict=True) if oracle(text).input_ids != ids
    ]
    assert differ == [] and len(found) == len(texts)


def tokenizer_probe_skips(text: str) -> bool:
    """Characters newer than most tables: which are letters is answered by age there."""
    return text.startswith("new letters") or "<|" in text


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
