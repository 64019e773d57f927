"""Files that are read whole, and the directories they lie in: links, sizes, numbers that no float
holds, and file systems of networks. What is no regular file, in place of a file of every kind:
`tests.campaigns.hostile`."""

import errno
import json
import os
import signal
import time
import tracemalloc
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from megatron import small_files
from megatron.checkpoint import lock, store
from megatron.config import command_line, run_directory
from megatron.data.blend.blended_dataset import read_blend_file
from megatron.data.tokenizers.gpt2_bpe import read_merges
from tests import problems
from tests.runs import SMALL


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    """End a test that waits for a pipe."""

    def late(*_: object) -> None:
        raise AssertionError("hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(10)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("value", ["1e400", "-1e400", "[1, 1e999]"])
def test_numbers_that_no_float_holds_are_refused(value):
    with pytest.raises(json.JSONDecodeError):
        small_files.parse_json(f'{{"rope_theta": {value}}}')


def test_no_more_memory_is_reserved_than_a_file_has_bytes(tmp_path):
    """A limit on the memory of a process, below the limit on the size of a file, does no harm."""
    (tmp_path / "x").write_bytes(b"x" * 100_000)
    tracemalloc.start()
    assert len(small_files.read_bytes(tmp_path / "x")) == 100_000
    assert len(run_directory.read_small_file(tmp_path / "x")) == 100_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000
    with pytest.raises(OSError, match="more than 99999 bytes"):
        small_files.read_bytes(tmp_path / "x", 99_999)


def test_ranks_that_fit_a_huge_batch_are_found_at_once(tmp_path):
    words = [*SMALL, "--mock-data", "--vocab-size", "100", "--train-iters", "9"]
    huge = ["--micro-batch-size", "2", "--global-batch-size", "9223372036854775802"]
    assert command_line.judge([*words, *huge], 5)[1]


def test_long_lines_are_shortened_in_messages(tmp_path):
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "{" * 300_000 + "\n")
    with pytest.raises(ValueError) as error:
        read_merges(tmp_path / "merges.txt")
    assert len(str(error.value)) < 2000
    (tmp_path / "blend").write_text("{" * 300_000 + " a 0.5 b")
    with pytest.raises(ValueError) as error:
        read_blend_file(str(tmp_path / "blend"))
    assert len(str(error.value)) < 2000


def time_with(sleep: Callable[[float], object]) -> SimpleNamespace:
    """The module `time` with another sleep, for one module: other threads go on sleeping."""
    return SimpleNamespace(**{**vars(time), "sleep": sleep})


def test_a_save_directory_that_comes_back_is_still_this_jobs(tmp_path, monkeypatch):
    mine = lock.acquire(tmp_path)
    away = tmp_path / "away"
    os.rename(mine.path, away)
    monkeypatch.setattr(lock, "time", time_with(lambda seconds: os.rename(away, mine.path)))
    mine.check()
    os.rename(mine.path, away)
    monkeypatch.setattr(lock, "time", time_with(lambda seconds: None))
    monkeypatch.setattr(lock, "RETURNS_WITHIN", 0.05)
    with problems.raises(Exception, "save-directory-lost"):
        mine.check()
    os.rename(away, mine.path)
    mine.release()


def test_a_save_directory_that_was_lost_is_not_made_again(tmp_path, monkeypatch):
    """It was unmounted: there is only its mount point."""
    monkeypatch.setattr(lock, "RETURNS_WITHIN", 0.0)
    mine = lock.acquire(tmp_path / "mount/run")
    os.rename(tmp_path / "mount", tmp_path / "away")
    (tmp_path / "mount").mkdir()
    with problems.raises(Exception, "save-directory-lost"):
        store.begin(tmp_path / "mount/run", 5, fence=mine.check)
    assert not list((tmp_path / "mount").iterdir())
    mine.release()


def test_what_passes_on_network_file_systems_is_tried_again(monkeypatch):
    """And nothing else is; what stays is the last answer's error."""
    monkeypatch.setattr("time.sleep", lambda _: None)

    def answers(*numbers: int):
        left = list(numbers)

        def action() -> int:
            if left:
                raise OSError(left.pop(0), "")
            return 7

        return action, left

    action, left = answers(errno.ESTALE, errno.ESTALE)
    assert small_files.retried(action, errno.ESTALE) == 7
    action, left = answers(errno.EIO, errno.ESTALE)
    with pytest.raises(OSError):
        small_files.retried(action, errno.ESTALE)
    assert left == [errno.ESTALE]
    action, left = answers(*[errno.ESTALE] * 9)
    with pytest.raises(OSError):
        small_files.retried(action, errno.ESTALE)
    assert len(left) == 5


def test_a_directory_that_another_host_has_just_made_is_seen_a_moment_later(tmp_path, monkeypatch):
    """NFS: mkdir says that it exists, while lookups are still answered from the cache."""
    made = tmp_path / "made"
    made.mkdir()
    looks, exists, is_dir = [], os.path.lexists, os.path.isdir

    def late(path, look):
        if os.fspath(path) == str(made):
            looks.append(path)
            return len(looks) > 4 and look(path)
        return look(path)

    monkeypatch.setattr(os.path, "lexists", lambda path: late(path, exists))
    monkeypatch.setattr(os.path, "isdir", lambda path: late(path, is_dir))
    small_files.make_directories(made)
    assert len(looks) > 4
    looks.clear()
    with pytest.raises(FileExistsError):
        small_files.make_directories(made, seconds=0.0)


def test_a_file_in_the_way_of_a_directory_is_an_error_at_once(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(small_files, "time", time_with(pytest.fail))
    with pytest.raises(FileExistsError):
        small_files.make_directories(tmp_path / "file")
