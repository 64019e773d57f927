"""tools/convert_checkpoint.py hf-import from an object store and hf-export to one (fsspec's store in
memory; that S3 is spoken is shown by the tests of --save)."""

from __future__ import annotations

import pytest

from megatron.checkpoint import object_store
from tests.load_tool import load_tool
from tools.benchmarks.convert import make_model


@pytest.fixture
def files(monkeypatch):
    """The store, empty."""
    memory = pytest.importorskip("fsspec.implementations.memory")
    monkeypatch.setattr(object_store, "WAITS", 0.0)
    store = memory.MemoryFileSystem()
    monkeypatch.setattr(memory.MemoryFileSystem, "store", {})
    monkeypatch.setattr(memory.MemoryFileSystem, "pseudo_dirs", [""])
    return store


@pytest.fixture
def source(tmp_path, files):
    """A model in the store at memory://bucket/hf, and the tool."""
    make_model(tmp_path / "hf", 1e6, width=64, vocab=64)
    for path in (tmp_path / "hf").iterdir():
        files.pipe_file(f"/bucket/hf/{path.name}", path.read_bytes())
    files.pipe_file("/bucket/hf/pytorch_model.bin", b"a pickle")
    return load_tool("convert_checkpoint").main


def test_there_and_back(source, tmp_path, files, capfd):
    ours = str(tmp_path / "ours")
    assert source(["hf-import", "memory://bucket/hf", ours, "--no-verify"]) == 0
    plain = str(tmp_path / "plain")
    assert source(["hf-import", str(tmp_path / "hf"), plain, "--no-verify"]) == 0
    assert source(["diff", ours, plain]) == 0
    words = ["hf-export", ours, "memory://bucket/back", "--no-verify", "--max-shard-size", "200KB"]
    assert source(words) == 0
    assert "memory://bucket/back" in capfd.readouterr().out
    assert sum(name.endswith(".safetensors") for name in files.ls("/bucket/back", False)) > 2
    again = str(tmp_path / "again")
    assert source(["hf-import", "memory://bucket/back", again, "--no-verify"]) == 0
    assert source(["diff", ours, again]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "hf", "ours", "plain"]
    assert source(words) == 1, "it is there already"


def test_an_upload_that_was_cut_off_is_not_whole_and_is_completed(source, tmp_path, files, capfd):
    ours = str(tmp_path / "ours")
    assert source(["hf-import", str(tmp_path / "hf"), ours, "--no-verify"]) == 0
    words = ["hf-export", ours, "memory://bucket/back", "--no-verify"]
    put = files.__class__.put_file

    def broken(self, path, there, *args, **more):
        if there.endswith("config.json"):
            raise OSError("cut off")
        return put(self, path, there, *args, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files.__class__, "put_file", broken)
        assert source(words) == 1
    assert files.ls("/bucket/back", False)
    new = ["hf-import", "memory://bucket/back", str(tmp_path / "new"), "--no-verify"]
    assert source(new) == 1
    assert not (tmp_path / "new").exists()
    assert source(words) == 0
    assert source(new) == 0


@pytest.mark.parametrize("url", ["memory://bucket/none", "nosuchstore://bucket/hf"])
def test_what_is_not_there_is_one_message(url, source, tmp_path, capfd):
    assert source(["hf-import", url, str(tmp_path / "new")]) == 1
    said = capfd.readouterr().err
    assert said.startswith("error: ") and "Traceback" not in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]
