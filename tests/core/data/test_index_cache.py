"""The index cache: whole entries or none, also with several builders at once, and directories
nobody can write to."""

import errno
import os
import pickle

import numpy as np

from megatron.data.index_cache import IndexCache
from tests import problems

ARRAYS = {"a": np.arange(5, dtype=np.int32), "b": np.zeros((2, 2), np.int64)}


def test_what_is_stored_is_loaded(tmp_path):
    cache = IndexCache(str(tmp_path / "new" / "cache"))
    assert cache.load("Kind", "text", ARRAYS) is None and cache.writable()
    stored = cache.store("Kind", "text", ARRAYS)
    loaded = cache.load("Kind", "text", ARRAYS)
    for name, array in ARRAYS.items():
        assert (
            (loaded[name] == array).all()
            and loaded[name].dtype == array.dtype
            and (stored[name] == array).all()
        )
    stem = "1cb251ec0d568de6a929b520c4aed8d1-Kind"  # md5 of "text"
    assert sorted(os.listdir(cache.folder)) == [
        f"{stem}-a.npy",
        f"{stem}-b.npy",
        f"{stem}-description.txt",
    ]


def test_an_entry_without_its_description_or_an_array_is_no_entry(tmp_path):
    cache = IndexCache(str(tmp_path))
    for victim in ("*description.txt", "*-a.npy", "*-b.npy"):
        cache.store("Kind", "text", ARRAYS)
        next(tmp_path.glob(victim)).unlink()
        assert cache.load("Kind", "text", ARRAYS) is None


def test_a_damaged_array_is_said_and_not_used(tmp_path, capsys):
    cache = IndexCache(str(tmp_path))
    for damage in (b"", b"no numpy file", None):
        cache.store("Kind", "text", ARRAYS)
        path = next(tmp_path.glob("*-a.npy"))
        path.write_bytes(path.read_bytes()[:-8] if damage is None else damage)
        assert cache.load("Kind", "text", ARRAYS) is None
    assert "WARNING" in capsys.readouterr().out


def test_another_description_under_the_same_name_is_no_hit(tmp_path):
    cache = IndexCache(str(tmp_path))
    cache.store("Kind", "text", ARRAYS)
    next(tmp_path.glob("*description.txt")).write_text("other text")
    assert cache.load("Kind", "text", ARRAYS) is None


def test_an_unwritable_directory_is_said_once(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    cache = IndexCache(str(tmp_path / "file" / "cache"))
    assert not cache.writable() and not cache.writable()
    text = capsys.readouterr().out
    assert text.count("in memory") == 1 and "--data-cache-path" in text


def test_an_unwritable_directory_the_user_asked_for_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with problems.raises(ValueError, "path-not-writable", "--data-cache-path"):
        IndexCache(str(tmp_path / "file" / "cache"), "--data-cache-path").writable()


def test_a_directory_without_permission(tmp_path, monkeypatch, capsys):
    # root may write anywhere, so chmod would not do
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert not IndexCache(str(tmp_path)).writable()
    assert "no permission" in capsys.readouterr().out


def test_a_full_disk_while_writing(tmp_path, monkeypatch, capsys):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    arrays = IndexCache(str(tmp_path)).store("Kind", "text", ARRAYS)
    assert (arrays["a"] == ARRAYS["a"]).all() and list(tmp_path.iterdir()) == []
    assert os.strerror(errno.ENOSPC) in capsys.readouterr().out
    with problems.raises(ValueError, "path-not-writable", "--data-cache-path"):
        IndexCache(str(tmp_path), "--data-cache-path").store("Kind", "text", ARRAYS)


def test_files_are_pickled_as_paths(tmp_path):
    cache = IndexCache(str(tmp_path))
    stored = cache.store("Kind", "text", {"big": np.arange(100_000)})
    sent = pickle.dumps(stored)
    assert len(sent) < 1000 and (pickle.loads(sent)["big"] == np.arange(100_000)).all()
