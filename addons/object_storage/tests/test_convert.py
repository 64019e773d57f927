"""tools/convert_checkpoint.py hf-import from an object store by ranges, and hf-export to one shard by
shard: fsspec's store in memory, and S3."""

import json
import tempfile
from pathlib import Path

import pytest

from megatron.addons.convert.stores import remote_folder
from megatron.addons.convert.tests.llama_files import make_model
from megatron.addons.object_storage import run_directories
from megatron.addons.object_storage.tests.s3_server import serving
from megatron.checkpoint.filesystem import Disk
from tests.load_tool import load_tool
from tests.problems import assert_problem

LAYER = "model-00001.safetensors"  # make_model writes a file for each layer


@pytest.fixture
def files(monkeypatch):
    """The store, empty."""
    memory = pytest.importorskip("fsspec.implementations.memory")
    monkeypatch.setattr(run_directories, "WAITS", 0.0)
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


@pytest.fixture
def on_disk(tmp_path, monkeypatch):
    """The files of weights that a command opens to write, and where temporary files are."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    return scratch


IMPORT = ["hf-import", "memory://bucket/hf"]


def names(files, folder: str) -> list[str]:
    return sorted(name.rpartition("/")[2] for name in files.ls(folder, False))


def test_there_and_back(source, tmp_path, files, capfd):
    ours = str(tmp_path / "ours")
    assert source([*IMPORT, ours, "--no-verify"]) == 0
    plain = str(tmp_path / "plain")
    assert source(["hf-import", str(tmp_path / "hf"), plain, "--no-verify"]) == 0
    assert source(["diff", ours, plain]) == 0
    assert source(["diff", "memory://bucket/hf", plain]) == 0
    words = ["hf-export", ours, "memory://bucket/back", "--no-verify", "--max-shard-size", "200KB"]
    assert source(words) == 0
    assert "memory://bucket/back" in capfd.readouterr().out
    assert sum(name.endswith(".safetensors") for name in names(files, "/bucket/back")) > 2
    again = str(tmp_path / "again")
    assert source(["hf-import", "memory://bucket/back", again, "--no-verify"]) == 0
    assert source(["diff", ours, again]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "hf", "ours", "plain"]
    assert source(words) == 1, "it is there already"


def test_an_import_brings_no_weights_to_the_disk(source, on_disk, tmp_path, files, monkeypatch):
    fetched = []
    get = files.__class__.get_file

    def noted(self, there, path, *args, **more):
        fetched.append(Path(path).name)
        return get(self, there, path, *args, **more)

    monkeypatch.setattr(files.__class__, "get_file", noted)
    monkeypatch.setattr(remote_folder, "AHEAD", 1000)
    monkeypatch.setattr(remote_folder, "BLOCK_BYTES", 3000)
    assert source([*IMPORT, str(tmp_path / "ours"), "--no-verify"]) == 0
    assert sorted(fetched) == ["config.json", "model.safetensors.index.json"]
    assert not list(on_disk.iterdir())
    assert source(["diff", str(tmp_path / "hf"), str(tmp_path / "ours")]) == 0


def test_an_export_has_one_file_on_the_disk_and_config_json_is_last(
    source, on_disk, tmp_path, files, monkeypatch
):
    assert source([*IMPORT, str(tmp_path / "ours"), "--no-verify"]) == 0
    put = files.__class__.put_file
    sent = []

    def noted(self, path, there, *args, **more):
        held = [one for one in on_disk.rglob("*") if one.is_file()]
        assert held == [Path(path)]
        sent.append(Path(path).name)
        return put(self, path, there, *args, **more)

    monkeypatch.setattr(files.__class__, "put_file", noted)
    url = "memory://bucket/back"
    words = ["hf-export", str(tmp_path / "ours"), url, "--no-verify", "--max-shard-size", "200KB"]
    assert source(words) == 0
    assert sent[-2:] == ["model.safetensors.index.json", "config.json"]
    shards = [name for name in sent if name.endswith(".safetensors")]
    assert len(shards) > 2 and sent[: len(shards)] == shards
    assert not list(on_disk.iterdir())


def test_an_upload_that_was_cut_off_is_not_whole_and_is_completed(
    source, tmp_path, files, monkeypatch
):
    ours = str(tmp_path / "ours")
    assert source(["hf-import", str(tmp_path / "hf"), ours, "--no-verify"]) == 0
    words = ["hf-export", ours, "memory://bucket/back", "--no-verify", "--max-shard-size", "200KB"]
    put = files.__class__.put_file
    sent = []

    def broken(self, path, there, *args, **more):
        if "model-00003" in there and len(sent) < 5:
            raise OSError("cut off")
        sent.append(Path(there).name)
        return put(self, path, there, *args, **more)

    monkeypatch.setattr(files.__class__, "put_file", broken)
    assert source(words) == 1
    first = list(sent)
    assert len(first) == 2 and names(files, "/bucket/back") == sorted(first)
    new = ["hf-import", "memory://bucket/back", str(tmp_path / "new"), "--no-verify"]
    assert source(new) == 1
    assert not (tmp_path / "new").exists()
    sent += [""] * 5
    assert source(words) == 0
    assert not set(first) & set(sent[7:]), "what was there already is compared only"
    assert source(new) == 0
    assert source(["diff", ours, str(tmp_path / "new")]) == 0


def test_weights_of_another_export_are_not_mixed_with_these(source, tmp_path, files, capfd):
    """transformers would read the older model.safetensors in place of the shards."""
    ours = str(tmp_path / "ours")
    assert source(["hf-import", str(tmp_path / "hf"), ours, "--no-verify"]) == 0
    files.pipe_file("/bucket/back/model.safetensors", b"of a cut-off export with larger shards")
    words = ["hf-export", ours, "memory://bucket/back", "--no-verify", "--max-shard-size", "200KB"]
    assert source(words) == 1
    assert "model.safetensors" in capfd.readouterr().err
    assert names(files, "/bucket/back") == ["model.safetensors"]


@pytest.mark.parametrize("url", ["memory://bucket/none", "nosuchstore://bucket/hf"])
def test_what_is_not_there_is_one_message(url, source, tmp_path, capfd):
    assert source(["hf-import", url, str(tmp_path / "new")]) == 1
    said = capfd.readouterr().err
    assert said.startswith("error: ") and "Traceback" not in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def test_only_hugging_face_folders_are_read_from_a_store(source, tmp_path, capfd):
    with pytest.raises(SystemExit) as end:
        source(["megatron-import", "memory://bucket/hf", str(tmp_path / "new")])
    assert end.value.code == 2
    assert "memory://bucket/hf" in capfd.readouterr().err


# --- stores that fail


def fails(self, path, start=None, end=None, **more):
    raise OSError("connection reset")


def ends_early(self, path, start=None, end=None, **more):
    return bytes(self.store[path].getbuffer()[start:end])[:-1]


def ignores_ranges(self, path, start=None, end=None, **more):
    return bytes(self.store[path].getbuffer())


def assert_refused(source, tmp_path, capfd, *words: str) -> None:
    """An import ends with one message that has these words, and leaves nothing."""
    assert source([*IMPORT, str(tmp_path / "new"), "--no-verify"]) == 1
    assert_problem(capfd.readouterr().err.rstrip("\n"), *words)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


@pytest.mark.parametrize("answer", [fails, ends_early, ignores_ranges])
def test_a_store_that_fails_or_gives_other_lengths(
    answer, source, tmp_path, files, monkeypatch, capfd
):
    monkeypatch.setattr(files.__class__, "cat_file", answer)
    assert_refused(source, tmp_path, capfd, "object-store-failed", "memory://bucket/hf")


def test_a_store_that_fails_twice_is_asked_again(source, tmp_path, files, monkeypatch):
    cat = files.__class__.cat_file
    asked = []

    def unsteady(self, path, start=None, end=None, **more):
        asked.append(path)
        if len(asked) % 3:
            raise OSError("slow down")
        return cat(self, path, start, end, **more)

    monkeypatch.setattr(files.__class__, "cat_file", unsteady)
    assert source([*IMPORT, str(tmp_path / "ours"), "--no-verify"]) == 0
    assert source(["diff", str(tmp_path / "hf"), str(tmp_path / "ours")]) == 0


@pytest.mark.parametrize("change", [-1, 1])
def test_a_shard_of_another_length_than_its_header_says(change, source, tmp_path, files, capfd):
    data = files.cat_file(f"/bucket/hf/{LAYER}")
    files.pipe_file(f"/bucket/hf/{LAYER}", data[:-1] if change < 0 else data + b"x")
    assert_refused(source, tmp_path, capfd, "checkpoint-damaged", f"memory://bucket/hf/{LAYER}")


def test_a_shard_that_the_index_names_and_that_is_missing(source, tmp_path, files, capfd):
    files.rm_file(f"/bucket/hf/{LAYER}")
    assert source([*IMPORT, str(tmp_path / "new"), "--no-verify"]) == 1
    said = capfd.readouterr().err
    assert LAYER in said and "memory://bucket/hf" in said and "Traceback" not in said


@pytest.mark.parametrize("action", ["replace", "remove"])
def test_a_shard_that_changes_while_it_is_read(action, source, tmp_path, files, monkeypatch, capfd):
    """Other weights of the same length come into the store when the first tensors are written."""
    write = Disk.write
    place = f"/bucket/hf/{LAYER}"
    data = files.cat_file(place)

    def and_change(self, *args, **more):
        if files.exists(place):
            files.rm_file(place)
            if action == "replace":
                files.pipe_file(place, data[:-2] + b"\0\0")
        return write(self, *args, **more)

    monkeypatch.setattr(Disk, "write", and_change)
    assert_refused(source, tmp_path, capfd, "object-store-changed", f"memory://bucket/hf/{LAYER}")


def test_a_store_that_keeps_other_bytes_than_it_was_given(
    source, tmp_path, files, monkeypatch, capfd
):
    assert source([*IMPORT, str(tmp_path / "ours"), "--no-verify"]) == 0
    put = files.__class__.put_file

    def other(self, path, there, *args, **more):
        put(self, path, there, *args, **more)
        data = bytearray(self.cat_file(there))
        data[-1] ^= 1
        self.pipe_file(there, bytes(data))

    monkeypatch.setattr(files.__class__, "put_file", other)
    words = ["hf-export", str(tmp_path / "ours"), "memory://bucket/back", "--no-verify"]
    capfd.readouterr()
    assert source(words) == 1
    said = capfd.readouterr().err.rstrip("\n")
    assert_problem(said, "object-store-failed", "memory://bucket/back")
    assert "config.json" not in names(files, "/bucket/back")


# --- verification, and S3


@pytest.mark.peers
@pytest.mark.campaign
def test_both_ways_are_verified_by_what_is_in_the_store(source, tmp_path, files, capfd):
    pytest.importorskip("transformers")
    ours = str(tmp_path / "ours")
    assert source([*IMPORT, ours]) == 0
    assert "\nverified: " in capfd.readouterr().out
    assert source(["hf-export", ours, "memory://bucket/back"]) == 0
    assert "\nverified: " in capfd.readouterr().out
    # with another epsilon the two models differ, and the weights do not stay
    config = json.loads((tmp_path / "ours/huggingface/config.json").read_text())
    files.pipe_file("/bucket/hf/config.json", json.dumps(config | {"rope_theta": 99.0}).encode())
    assert source(["verify", ours, "memory://bucket/hf"]) == 1


@pytest.mark.peers
@pytest.mark.campaign
def test_s3(source, tmp_path, tmp_path_factory):
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    with serving(tmp_path_factory.mktemp("moto")) as bucket:
        ours = str(tmp_path / "ours")
        assert source(["hf-import", str(tmp_path / "hf"), ours, "--no-verify"]) == 0
        words = ["hf-export", ours, f"{bucket}/hf", "--no-verify", "--max-shard-size", "200KB"]
        assert source(words) == 0
        again = str(tmp_path / "again")
        assert source(["hf-import", f"{bucket}/hf/", again, "--no-verify"]) == 0
        assert source(["diff", ours, again]) == 0
        assert source(["diff", f"{bucket}/hf", str(tmp_path / "hf")]) == 0
