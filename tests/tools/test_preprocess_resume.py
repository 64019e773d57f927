"""tools/preprocess_data.py killed and run again: it goes on with what is done, and every byte is as
if it had run once."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.data.preprocess import readers, resumable_writer
from tests.core.data.vocabularies import ADVERSARIAL, write_bpe
from tools import preprocess_data

# The tool with small blocks, that notes every 20 ms how far it is.
DRIVER = """
import sys
from megatron.data.preprocess import readers, resumable_writer
readers.BLOCK_BYTES, resumable_writer.SECONDS = 1 << 14, 0.02
from tools import preprocess_data
sys.exit(preprocess_data.main(sys.argv[1:]))
"""
ROOT = Path(preprocess_data.__file__).parents[1]


class Killed(BaseException):
    """What a test raises where a kill would end the process."""


@pytest.fixture(autouse=True)
def quick_notes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setattr(readers, "BLOCK_BYTES", 1 << 14)
    monkeypatch.setattr(resumable_writer, "SECONDS", 0.0)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


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
        for number in range(500):
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


@pytest.mark.parametrize("partitions", ["1", "3"])
def test_killed_after_any_note_it_goes_on(
    corpus: list[str],
    tmp_path: Path,
    partitions: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = [*corpus, "--workers", "1", "--partitions", partitions]
    assert run(*flags, "--output-prefix", f"{tmp_path}/out/once") == 0
    once = contents(tmp_path / "out", "once")
    assert once.keys() == ENDS
    replace = os.replace
    left = 0
    runs = 0

    def killing(source: str, target: str) -> None:
        nonlocal left
        left -= 1
        if not left:
            raise Killed
        replace(source, target)

    monkeypatch.setattr(resumable_writer.os, "replace", killing)
    # each run gets a little further, the last ones through the renames of the end
    while runs < 200:
        left = 2 + runs % 13
        runs = runs + 1
        try:
            assert run(*flags, "--output-prefix", f"{tmp_path}/out/x") == 0
            break
        except Killed:
            found = contents(tmp_path / "out", "x_")
            assert {
                name for name in found if f"_{name}" in ENDS and found[name] != once[f"_{name}"]
            } == set()
    assert runs > 2 and contents(tmp_path / "out", "x") == once
    assert capsys.readouterr().out.count("Resuming after ") == runs - 1


def wait_for_notes(process: subprocess.Popen, note: Path, notes: int) -> None:
    """Until a run has written `note` so many times (each is a new file), or has ended."""
    seen: set[int] = set()
    while len(seen) < notes and process.poll() is None:
        with contextlib.suppress(FileNotFoundError):
            seen.add(note.stat().st_mtime_ns)
        time.sleep(0.0005)


def killed_at_random(flags: list[str], out: Path, kills: int, seed: int) -> int:
    """Run, kill -9 (the workers are left alive) and run again to the end; how many of these runs
    went on.

    The moments are random times and, in turn, random numbers of notes of how far the run is: with
    times alone, a machine busier or idler than at the first run would kill all of them before the
    first note or after the last.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [
        sys.executable,
        "-c",
        DRIVER,
        *flags,
        "--overwrite",
        "--log-interval",
        "99999",
        "--output-prefix",
    ]
    start = time.monotonic()
    subprocess.run([*command, str(out / "once")], env=environment, check=True, capture_output=True)
    duration = time.monotonic() - start
    draw = random.Random(seed)
    went_on = 0
    for kill in range(kills):
        name = f"x{kill}"
        process = subprocess.Popen(
            [*command, str(out / name)], env=environment, stdout=subprocess.DEVNULL
        )
        if kill % 2:
            wait_for_notes(process, out / f"{name}.unfinished" / "state.json", draw.randint(1, 4))
        else:
            time.sleep(draw.uniform(0.1, 1.0) * duration)
        process.kill()
        process.wait()
        last = subprocess.run(
            [*command, str(out / name)], env=environment, check=True, capture_output=True, text=True
        )
        went_on += "Resuming after " in last.stdout
        assert contents(out, name) == contents(out, "once")
        for path in list(out.glob(f"{name}*")):
            path.unlink()
    return went_on


def test_kill_9_twice(corpus: list[str], tmp_path: Path) -> None:
    killed_at_random([*corpus, "--workers", "2"], tmp_path / "out", 2, seed=1)


@pytest.mark.sweep
@pytest.mark.parametrize("workers", ["1", "2", "3"])
def test_kill_9_at_twenty_random_moments(corpus: list[str], tmp_path: Path, workers: str) -> None:
    went_on = killed_at_random(
        [*corpus, "--workers", workers], tmp_path / "out", 20, seed=int(workers)
    )
    assert went_on > 2


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
