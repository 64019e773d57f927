"""tools/preprocess_data.py killed and run again: it goes on with what is done, and every byte is as
if it had run once."""

import gzip
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.data.preprocess import readers, resumable_writer
from tests.core.data.vocabularies import ADVERSARIAL, write_bpe
from tools import preprocess_data


class Killed(BaseException):
    """What a test raises where a kill would end the process."""


@pytest.fixture(autouse=True)
def quick_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "BLOCK_BYTES", 1 << 14)
    monkeypatch.setattr(resumable_writer, "SECONDS", 0.0)


@pytest.fixture
def corpus(tmp_path: Path) -> list[str]:
    """The tool's flags for a plain file and a packed one with two keys, bad lines and empty texts
    in them."""
    (tmp_path / "bpe").mkdir()
    vocab, merges = write_bpe(tmp_path / "bpe")
    (tmp_path / "out").mkdir()
    draw = random.Random(5)
    for name in ("a.jsonl", "b.jsonl.gz"):
        lines = []
        for number in range(200):
            texts = {
                key: "".join(draw.choices(ADVERSARIAL, k=2))[:300] * draw.randint(0, 2)
                for key in ("text", "more")
            }
            lines.append("no JSON" if number % 130 == 7 else json.dumps(texts))
        (gzip.open if name.endswith("gz") else open)(tmp_path / name, "wb").write(
            "\n".join(lines).encode()
        )
    return [
        "--input",
        str(tmp_path / "*.jsonl*"),
        "--json-keys",
        "text",
        "more",
        "--append-eod",
        "--max-bad-records",
        "9",
        "--tokenizer-type",
        "GPT2BPETokenizer",
        "--vocab-file",
        vocab,
        "--merge-file",
        merges,
    ]


def contents(folder: Path, prefix: str) -> dict[str, bytes]:
    """The files of a prefix by what comes behind it."""
    return {
        path.name.removeprefix(prefix): path.read_bytes()
        for path in folder.iterdir()
        if path.name.startswith(prefix)
    }


def run(*argv: str) -> int:
    return preprocess_data.main(argv)


ENDS = {f"_{key}_document.{end}" for key in ("text", "more") for end in ("bin", "idx", "json")} | {
    ".bad_records.jsonl"
}


@pytest.fixture
def unfinished(corpus: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run that was killed when it had encoded everything."""

    def stop(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(resumable_writer.Unfinished, "finish", stop)
        with pytest.raises(Killed):
            run(*corpus, "--workers", "1", "--output-prefix", f"{tmp_path}/out/x")
    assert (tmp_path / "out/x.unfinished/state.json").exists()
    return tmp_path / "out/x.unfinished"


def test_other_work_is_not_gone_on_with(
    corpus: list[str], unfinished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [flag for flag in corpus if flag != "--append-eod"]
    assert run(*flags, "--workers", "1", "--output-prefix", f"{tmp_path}/out/x") == 0
    assert "--append-eod differed" in capsys.readouterr().err
    assert run(*flags, "--workers", "1", "--output-prefix", f"{tmp_path}/out/once") == 0
    assert contents(tmp_path / "out", "x") == contents(tmp_path / "out", "once")


def _replace(path: Path, data: bytes) -> None:
    path.unlink()
    path.write_bytes(data)


def _link(path: Path) -> None:
    other = path.parents[1] / "not ours"
    path.rename(other)
    path.symlink_to(other)


DAMAGE = {
    "another number": lambda work: _replace(
        work / "state.json", (work / "state.json").read_bytes().replace(b"1", b"2", 1)
    ),
    "cut": lambda work: os.truncate(work / "state.json", 30),
    "a list": lambda work: _replace(work / "state.json", b"[1]"),
    "depth": lambda work: _replace(work / "job.json", b"[" * 100_000),
    "job is a list": lambda work: _replace(work / "job.json", b"[]"),
    "ids cut": lambda work: os.truncate(work / "0.0.bin", 8),
    "lengths missing": lambda work: (work / "1.0.lengths").unlink(),
    "ids are a link": lambda work: _link(work / "0.0.bin"),
    "state is a pipe": lambda work: (
        (work / "state.json").unlink(),
        os.mkfifo(work / "state.json"),
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_work_begins_again(
    damage: str,
    corpus: list[str],
    unfinished: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    DAMAGE[damage](unfinished)
    other = tmp_path / "out" / "not ours"
    before = other.read_bytes() if other.exists() else None
    assert run(*corpus, "--workers", "1", "--output-prefix", f"{tmp_path}/out/x") == 0
    said = capsys.readouterr()
    assert "discarded" in said.err and "Resuming" not in said.out
    assert before is None or other.read_bytes() == before
    assert run(*corpus, "--workers", "1", "--output-prefix", f"{tmp_path}/out/once") == 0
    assert contents(tmp_path / "out", "x_") == contents(tmp_path / "out", "once_")


def test_a_lock_that_is_a_link_is_not_followed_and_a_pipe_is_not_waited_for(
    corpus: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = tmp_path / "out/x.unfinished/lock"
    lock.parent.mkdir()
    precious = tmp_path / "precious"
    precious.write_text("precious")
    lock.symlink_to(precious)
    assert run(*corpus, "--workers", "1", "--output-prefix", f"{tmp_path}/out/x") == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert precious.read_text() == "precious"
    lock.unlink()
    os.mkfifo(lock)
    assert run(*corpus, "--workers", "1", "--output-prefix", f"{tmp_path}/out/x") == 0


def test_two_runs_do_not_write_one_prefix(
    corpus: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out" / "x.unfinished"
    folder.mkdir()
    code = (
        "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); "
        "print(1, flush=True); input()"
    )
    command = [sys.executable, "-c", code, str(folder / "lock")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as other:
        other.stdout.readline()
        assert run(*corpus, "--output-prefix", f"{tmp_path}/out/x") == 1
        assert str(folder) in capsys.readouterr().err
        other.communicate(b"\n")
    assert run(*corpus, "--workers", "1", "--output-prefix", f"{tmp_path}/out/x") == 0
    assert contents(tmp_path / "out", "x").keys() == ENDS
