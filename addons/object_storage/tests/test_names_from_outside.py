"""Names in object stores that become paths: tests/hostile_names.py."""

import json
from pathlib import Path

import pytest

from megatron.addons.convert.stores.remote_folder import opened
from megatron.addons.object_storage import mirror, object_stores
from megatron.addons.object_storage.block_cache import StoredFile, block_cache
from megatron.addons.object_storage.remote_tokens import RemoteTokens, write_note
from megatron.addons.object_storage.run_directories import Remote
from megatron.data.token_bytes import note_path
from tests.hostile_names import (  # noqa: F401
    KINDS,
    SAFE,
    Places,
    Store,
    audit,
    check_name,
    folders,
)


def key_of_data(root: Path, name: str, patch: pytest.MonkeyPatch) -> None:
    files = Store("bucket/data", f"{name}/a.idx", f"{name}/a.bin")
    patch.setattr(object_stores, "client", lambda url: files)
    mirror.local_word.__wrapped__("s3://bucket/data", str(root / "cache"), 1 << 20)


def url_of_data(root: Path, name: str, patch: pytest.MonkeyPatch) -> None:
    files = Store("bucket", f"{name}/a.idx")
    patch.setattr(object_stores, "client", lambda url: files)
    mirror.local_word.__wrapped__(f"s3://bucket/{name}/a", str(root / "cache"), 1 << 20)


def file_of_a_stored_checkpoint(root: Path, name: str, patch: pytest.MonkeyPatch) -> None:
    files = Store("bucket/run/iter_0000005", name)
    patch.setattr(object_stores, "open_store", lambda url: (files, "bucket/run"))
    Remote("s3://bucket/run").fetch(5, root / "run", as_newest=False)


def cache_of_a_note(root: Path, name: str, patch: pytest.MonkeyPatch) -> None:
    """A note below a cache leads to another directory."""
    _note(root, cache=f"../../..{'/' * (name[:1] != '/')}{name}")


def key_of_a_note(root: Path, name: str, patch: pytest.MonkeyPatch) -> None:
    _note(root, key=name)


def _note(root: Path, **changed: str) -> None:
    path = root / "cache/files/0123456789abcdef/s3:bucket/d.bin"
    path.parent.mkdir(parents=True)
    block_cache(str(root / "cache")).set_bound(1 << 20)
    write_note(str(path), StoredFile("s3://bucket/d.bin", 4, "k", "1"), str(root / "cache"))
    RemoteTokens(str(path))
    table = json.loads(Path(note_path(str(path))).read_text())
    Path(note_path(str(path))).write_text(json.dumps({**table, **changed}))
    RemoteTokens(str(path))


def file_of_a_stored_model(root: Path, name: str, patch: pytest.MonkeyPatch) -> None:
    files = Store("bucket/hf", name)
    patch.setattr(object_stores, "open_store", lambda url: (files, "bucket/hf"))
    with opened("s3://bucket/hf", lambda each: True):
        pass


PLACES: Places = {
    "key of data": (key_of_data, SAFE, ()),
    "URL of data": (url_of_data, SAFE, ()),
    "file of a checkpoint in a store": (
        file_of_a_stored_checkpoint,
        SAFE,
        # of a key what is behind its last slash
        ("parent", "parent further in", "absolute", "empty", "empty part", "trailing slash"),
    ),
    "file of a model in a store": (
        file_of_a_stored_model,
        SAFE,
        ("parent", "parent further in", "absolute", "empty", "empty part", "trailing slash"),
    ),
    "cache of a note": (cache_of_a_note, (*SAFE, "data-file-damaged"), ("empty", "dot")),
    "key of a note": (key_of_a_note, SAFE, ()),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_a_hostile_name(place, kind, folders, monkeypatch):  # noqa: F811
    check_name(PLACES[place], kind, folders, monkeypatch)
