"""Metrics file, TensorBoard and log where a disk is full or fails, or the reader has gone: one
warning; training goes on."""

import errno
import io
import json
import os
import sys
from pathlib import Path

import pytest

from megatron.training.logging import output
from megatron.training.logging.output import OutputFile, OutputStream
from tests.campaigns.e2e.programs import fork_program
from tests.forkrun import run_ranks
from tests.runs import SMALL

ARGV = [*SMALL, "--mock-data", "--train-iters", "4", "--eval-iters", "0"]
full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")


def program(
    rank: int, world: int, folder: Path, extra: list[str], stdout: str | None
) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of the run whose stdout is `stdout`: a path, a pipe that nobody
    reads, or closed, and stderr too."""

    def redirect() -> None:
        if stdout == "closed":
            os.closerange(1, 3)
            sys.stdout = sys.stderr = None  # as the interpreter starts
            return
        reader, writer = os.pipe()
        os.close(reader)
        os.dup2(writer if stdout == "pipe" else os.open(stdout, os.O_WRONLY), 1)

    done = fork_program([*ARGV, *extra], folder, before=redirect if stdout else None)
    return done.end(), done.out, done.err


def run(folder: Path, *extra: str, stdout: str | None = None) -> tuple[int, str, list[str]]:
    code, out, err = run_ranks(1, program, folder, list(extra), stdout)[0]
    return code, out, err.splitlines()


@full
@pytest.mark.parametrize("stdout", ["/dev/full", "pipe", "closed"])
def test_a_log_that_cannot_be_written(tmp_path, stdout):
    """The run trains to its end, with exit code 0, and no other file gets the numbers of closed
    streams."""
    metrics = tmp_path / "metrics"
    code, out, warnings = run(tmp_path, "--metrics-file", str(metrics), stdout=stdout)
    assert code == 0 and not out
    assert ["stdout" in line for line in warnings] == [True] * (stdout != "closed")
    iterations = [json.loads(row)["iteration"] for row in metrics.read_text().splitlines()]
    assert iterations == [1, 2, 3, 4]


@full
def test_metrics_on_a_full_disk(tmp_path):
    code, out, (warning,) = run(tmp_path, "--metrics-file", "/dev/full")
    assert code == 0 and "\n iter 4/4 " in out
    assert "--metrics-file /dev/full: " in warning and "No space left on device" in warning


@pytest.fixture
def failing(monkeypatch) -> list[int]:
    """While the list holds an error number, os.write writes three bytes and then fails with it."""
    numbers: list[int] = []
    right = os.write
    begun = []

    def write(file: int, data: bytes) -> int:
        if numbers and begun:
            begun.clear()
            raise OSError(numbers[0], os.strerror(numbers[0]))
        begun.extend(numbers)
        return right(file, data[:3] if numbers else data)

    monkeypatch.setattr(output.os, "write", write)
    return numbers


def test_a_piece_is_there_as_a_whole_or_not_at_all(tmp_path, failing, capsys):
    """A failure within a piece leaves no part of it; when there is space again the next ones are
    written."""
    file = OutputFile(str(tmp_path / "rows"), "--metrics-file")
    file.write("one\n")
    failing.append(errno.ENOSPC)
    file.write("second\n")
    file.write("third\n")
    failing.clear()
    file.write("four\n")
    file.close()
    assert (tmp_path / "rows").read_text() == "one\nfour\n"
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and f"--metrics-file {tmp_path}/rows" in err


def test_a_path_that_cannot_be_is_an_error_and_a_full_disk_at_the_start_is_not(
    tmp_path, monkeypatch, capsys
):
    with pytest.raises(OSError):
        OutputFile(str(tmp_path), "--metrics-file")
    right = os.open

    def no_space(*args: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(output.os, "open", no_space)
    file = OutputFile(str(tmp_path / "rows"), "--metrics-file")
    file.write("one\n")
    monkeypatch.setattr(output.os, "open", right)
    file.write("two\n")
    assert (tmp_path / "rows").read_text() == "two\n" and capsys.readouterr().err.count("\n") == 1


def test_a_stream_is_otherwise_the_one_it_wraps(capsys):
    inner = io.StringIO()
    stream = OutputStream(inner, "log")
    print("text", file=stream, flush=True)
    assert inner.getvalue() == "text\n" and not stream.isatty()
    inner.flush = lambda: (_ for _ in ()).throw(BrokenPipeError(errno.EPIPE, "Broken pipe"))
    stream.flush()
    stream.flush()
    assert capsys.readouterr().err.count("\n") == 1
