"""tools/shared/progress.py: what a terminal and a file see of long work, by an injected clock."""

import io
import sys

import pytest

from tools.shared import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_file_gets_a_line_every_few_seconds(clock, monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    work = progress.Progress(10_000_000)
    for done in range(1, 11):
        clock[0] += 2
        work.update(done * 1_000_000, f"{done} documents")
    work.clear()
    assert sys.stderr.getvalue() == (
        " 30.0%, 3 documents, 0.5 MB/s, ETA 0:00:14\n"
        " 60.0%, 6 documents, 0.5 MB/s, ETA 0:00:08\n"
        " 90.0%, 9 documents, 0.5 MB/s, ETA 0:00:02\n"
    )


def test_a_terminal_has_one_line_that_is_updated_and_removed(clock, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    work = progress.Progress(7_300_000_000)
    for seconds, done in ((0.1, 50_000), (0.9, 1_000_000), (0.1, 1_100_000)):
        clock[0] += seconds
        work.update(done)
    work.clear()
    assert sys.stderr.getvalue() == "\r  0.0%, 1.0 MB/s, ETA 2:01:39\x1b[K\r\x1b[K"


def test_resumed_work_counts_its_own_rate(clock, monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    work = progress.Progress(100_000_000, resumed=True)
    work.update(50_000_000)
    clock[0] += 10
    work.update(60_000_000)
    assert sys.stderr.getvalue() == " 60.0%, 1.0 MB/s, ETA 0:00:40\n"
    work.shift = 30_000_000
    clock[0] += 10
    work.update(60_000_000)
    assert sys.stderr.getvalue().splitlines()[-1] == " 90.0%, 2.0 MB/s, ETA 0:00:05"


def test_of_a_pipe_only_the_details_are_known(clock, monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    work = progress.Progress(0)
    clock[0] += 6
    work.update(0, "12 documents")
    assert sys.stderr.getvalue() == "12 documents\n"


def test_files_that_are_made_piece_by_piece_count_their_bytes(clock, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    work = progress.Progress(4_000_000_000)
    clock[0] += 1
    assert progress.counted(lambda: "made", 1_000_000_000, work)() == "made"
    clock[0] += 1
    work.update(0, "x" * 200)
    first, second = sys.stderr.getvalue().split("\x1b[K")[:2]
    assert first == "\r 25.0%, 1.00 of 4.00 GB, 1000.0 MB/s, ETA 0:00:03"
    assert len(second) <= 1 + 100
