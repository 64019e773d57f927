"""The steps that change the disk: durable, counted, and one clear error whatever the operating
system says."""

import errno
import os
from pathlib import Path

import pytest

from megatron.checkpoint import filesystem as disk_module
from megatron.checkpoint.filesystem import DISK, CheckpointError, Disk
from tests import problems


class Noting(Disk):
    """A disk that remembers its steps."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, str]] = []

    def step(self, action: str, path: Path) -> None:
        self.steps.append((action, path.name))


def test_write_file_writes_all_and_syncs_before_it_returns(tmp_path, monkeypatch):
    real = os.pwrite
    monkeypatch.setattr(
        os, "pwrite", lambda descriptor, view, offset: real(descriptor, view[:7], offset)
    )
    noting = Noting()
    noting.write_file(tmp_path / "x", b"0123456789" * 5)
    assert (tmp_path / "x").read_bytes() == b"0123456789" * 5
    assert [action for action, _ in noting.steps] == ["create", "write", "fsync"]
    with problems.raises(CheckpointError, "file-operation-failed", "File exists"):
        noting.write_file(tmp_path / "x", b"again")
    assert (tmp_path / "x").read_bytes() == b"0123456789" * 5


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "free space"),
        (errno.EDQUOT, "quota"),
        (errno.EROFS, "read-only"),
        (errno.EACCES, "permission"),
        (errno.EIO, "dmesg"),
        (errno.EBADF, "the path"),
    ],
)
def test_every_refusal_names_path_reason_and_remedy(tmp_path, number, words):
    class Refusing(Disk):
        def step(self, action: str, path: Path) -> None:
            raise OSError(number, os.strerror(number))

    path = tmp_path / "x"
    calls = [
        lambda d: d.make_directory(path),
        lambda d: d.make_root(path),
        lambda d: d.create(path),
        lambda d: d.reserve(0, path, 1),
        lambda d: d.write(0, path, b"1", 0),
        lambda d: d.fsync(0, path),
        lambda d: d.fsync_directory(tmp_path),
        lambda d: d.rename(path, tmp_path / "y"),
        lambda d: d.exchange(path, tmp_path),
        lambda d: d.remove(path),
        lambda d: d.remove_tree(path),
    ]
    for call in calls:
        with pytest.raises(CheckpointError) as caught:
            call(Refusing())
        assert str(tmp_path) in str(caught.value) and os.strerror(number) in str(caught.value)
        assert words in str(caught.value) and caught.value.errno == number
    assert not list(tmp_path.iterdir())


def test_make_root_makes_parents_and_syncs_each(tmp_path):
    noting = Noting()
    noting.make_root(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    assert noting.steps == [
        ("mkdir", "a"),
        ("fsync_directory", tmp_path.name),
        ("mkdir", "b"),
        ("fsync_directory", "a"),
    ]
    noting.make_root(tmp_path / "a" / "b")
    assert len(noting.steps) == 4
    (tmp_path / "file").write_text("")
    with problems.raises(CheckpointError, "file-operation-failed", "File exists"):
        noting.make_root(tmp_path / "file" / "c")


def test_exchange_swaps_two_directories_or_says_it_cannot(tmp_path, monkeypatch):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "who").write_text(name)
    swapped = DISK.exchange(tmp_path / "a", tmp_path / "b")
    assert (
        swapped
        and (tmp_path / "a" / "who").read_text() == "b"
        and (tmp_path / "b" / "who").read_text() == "a"
    )
    with problems.raises(CheckpointError, "file-operation-failed", os.strerror(errno.ENOENT)):
        DISK.exchange(tmp_path / "a", tmp_path / "c")

    class Library:
        def __init__(self, *_: object, **__: object) -> None:
            pass

    monkeypatch.setattr(disk_module.ctypes, "CDLL", Library)
    assert DISK.exchange(tmp_path / "a", tmp_path / "b") is False
    Library.renameat2 = staticmethod(lambda *_: -1)
    monkeypatch.setattr(disk_module.ctypes, "get_errno", lambda: errno.EINVAL)
    assert DISK.exchange(tmp_path / "a", tmp_path / "b") is False


def test_reserve_notices_a_full_disk_and_bears_a_file_system_without_it(tmp_path):
    descriptor = DISK.create(tmp_path / "x")
    DISK.reserve(descriptor, tmp_path / "x", 1000)
    assert os.fstat(descriptor).st_size == 1000

    with pytest.raises(CheckpointError) as refused:
        DISK.reserve(descriptor, tmp_path / "x", 1 << 60)
    assert refused.value.errno in (errno.ENOSPC, errno.EFBIG)
    with open("/dev/null", "wb") as nothing:  # ENODEV
        DISK.reserve(nothing.fileno(), tmp_path / "x", 1000)
    DISK.close(descriptor, tmp_path / "x")


def test_remove_tree_of_nothing_is_no_error(tmp_path):
    DISK.remove_tree(tmp_path / "gone")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "f").write_text("")
    DISK.remove_tree(tmp_path / "d")
    assert not list(tmp_path.iterdir())
