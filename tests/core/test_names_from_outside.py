"""Every place where a name that a store, a file or another machine gives becomes a path, each with
hostile names: nothing outside of the folder is opened or changed, and one error with a code comes."""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from megatron import remote_files, small_files
from megatron.checkpoint import file_transfer, local_copies, skip_log, store
from megatron.checkpoint.file_transfer import HEAD, Route
from megatron.checkpoint.local_copies import LocalSave
from megatron.checkpoint.manifest import FileRecord, Manifest
from megatron.checkpoint.object_store import Remote
from megatron.checkpoint.safetensors_file import Entry, write_file
from megatron.checkpoint.state import RunState
from megatron.config import checkpoint_args
from megatron.config.architecture import FromCheckpoint
from megatron.config.run_directory import vouched_file
from megatron.config.tree import Config
from megatron.data.chat.templates import template_in_folder
from megatron.data.object_storage import mirror
from megatron.data.object_storage.block_cache import StoredFile, block_cache
from megatron.data.object_storage.remote_tokens import RemoteTokens, note_path, write_note
from megatron.data.tokenizers.bpe import HuggingFaceTokenizer
from megatron.features.registry import RunConfig
from tests.core.data.corpora import build_datasets, data_flags, write_corpus
from tests.forkrun import run_ranks
from tests.problems import code_of
from tests.tools.in_process import use_it
from tools.convert import megatron_layout
from tools.convert.deepspeed_files.checkpoint import checkpoint_folder
from tools.convert.hf_files import INDEX, SIDE_FILES, HFFolder, side_files
from tools.convert.stores.remote_folder import opened
from tools.convert.torch_dist_tensor import read_index
from tools.convert.torch_files import read_file
from tools.shared.program import said

NAMES = {
    "parent": "../outside/x",
    "parent further in": "a/../../outside/x",
    "parent alone": "..",
    "absolute": "/OUTSIDE/x",  # the test's own folder
    "empty": "",
    "dot": ".",
    "empty part": "a//b",
    "trailing slash": "a/",
    "backslashes": "..\\outside\\x",
    "terminal escape": "a\x1b[2Jb",
    "newline": "a\nb",
    "NUL": "a\0b",
    "C1 control": "a\x9bb",
    "line separator": "a\u2028b",
    "300 characters": "n" * 300,
    "not UTF-8": os.fsdecode(b"a\xff"),
    "half a pair": "a\ud800",
}
# names that look like a path and are none
ORDINARY = (
    "\u2024\u2024\u2044outside\u2044x",
    "\u2025",
    "a b'c\"d",
    "na\u00efve \U0001f469",
    "...",
)
QUICK = ("parent", "absolute", "empty", "NUL", "not UTF-8")  # the others are campaigns
KINDS = [pytest.param(kind, marks=[pytest.mark.campaign] * (kind not in QUICK)) for kind in NAMES]
SAFE = ("name-not-safe", "link-out-of-folder")
_opened: list[str] = []


@pytest.fixture(scope="module", autouse=True)
def _audit() -> None:
    sys.addaudithook(
        lambda event, args: (
            _opened.append(args[0]) if event == "open" and isinstance(args[0], str) else None
        )
    )


class Store:
    """An object store whose listings have one name as it is; every file has four bytes."""

    async_impl = False

    def __init__(self, folder: str, *names: str):
        self.folder = folder
        self.keys = [f"{folder}/{name}" for name in names]

    def _strip_protocol(self, url: str) -> str:
        return url.partition("://")[2]

    def invalidate_cache(self) -> None:
        """There is none."""

    def find(self, folder: str, detail: bool, prefix: str) -> dict[str, dict]:
        return {key: self.info(key) for key in self.keys}

    def ls(self, path: str, detail: bool) -> list[dict]:
        return [self.info(key) if detail else key for key in self.keys]

    def info(self, path: str) -> dict[str, Any]:
        return {"name": path, "type": "file", "size": 4, "ETag": "1"}

    def cat_file(self, path: str, start: int = 0, end: int = 4) -> bytes:
        return b"evil"[start:end]

    def get_file(self, source: str, target: str) -> None:
        Path(target).write_bytes(b"evil")


def key_of_data(root: Path, name: str, patch: pytest.MonkeyPatch) -> None:
    files = Store("bucket/data", f"{name}/a.idx", f"{name}/a.bin")
    patch.setattr(remote_files, "client", lambda url: files)
    mirror.local_word.__wrapped__("s3://bucket/data", str(root / "cache"), 1 << 20)


def url_of_data(root: Path, name: str, patch: pytest.MonkeyPatch) -> None:
    files = Store("bucket", f"{name}/a.idx")
    patch.setattr(remote_files, "client", lambda url: files)
    mirror.local_word.__wrapped__(f"s3://bucket/{name}/a", str(root / "cache"), 1 << 20)


def file_of_a_stored_checkpoint(root: Path, name: str, patch: pytest.MonkeyPatch) -> None:
    files = Store("bucket/run/iter_0000005", name)
    patch.setattr(remote_files, "open_store", lambda url: (files, "bucket/run"))
    Remote("s3://bucket/run").fetch(5, root / "run", as_newest=False)


def file_of_a_stored_model(root: Path, name: str, patch: pytest.MonkeyPatch) -> None:
    files = Store("bucket/hf", name)
    patch.setattr(remote_files, "open_store", lambda url: (files, "bucket/hf"))
    with opened("s3://bucket/hf", lambda each: True):
        pass


def files_of_a_manifest(root: Path, name: str, patch: pytest.MonkeyPatch) -> None:
    store.save(root, 5, [], RunState(iteration=5), "--seed 5\n")
    files = {name: FileRecord(4, "00000000")}
    folder = root / "iter_0000005"
    (folder / "manifest.json").write_bytes(Manifest(5, files, {}).dump())
    store.load(root)


def weight_map(root: Path, name: str, patch: pytest.MonkeyPatch) -> None:
    (root / "config.json").write_text("{}")
    (root / INDEX).write_text(json.dumps({"weight_map": {"w": f"{name}.safetensors"}}))
    HFFolder(root)


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


def local_copies_of(root: Path, name: str, patch: pytest.MonkeyPatch) -> None:
    text = json.dumps({"run": name, "save": "", "iteration": 5, "ranks": ""})
    (root / local_copies.NEWEST).write_text(text)
    local_copies.read_newest(root)


def local_copies_folder(root: Path, name: str, patch: pytest.MonkeyPatch) -> None:
    LocalSave(name, "0" * 16, 5).folder(root)


def place_in_metadata(root: Path, name: str, patch: pytest.MonkeyPatch) -> None:
    dcp.save({"w": torch.ones(2)}, checkpoint_id=root)
    metadata = pickle.loads((root / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = name
    (root / ".metadata").write_bytes(pickle.dumps(metadata))
    use_it(patch)
    read_index(root)


def latest_of_deepspeed(root: Path, name: str, patch: pytest.MonkeyPatch) -> None:
    (root / "latest").write_bytes(name.encode(errors="surrogatepass"))
    checkpoint_folder(root)


def tracker_of_megatron(root: Path, name: str, patch: pytest.MonkeyPatch) -> None:
    (root / store.TRACKER).write_bytes(name.encode(errors="surrogatepass"))
    megatron_layout.checkpoint_folder(root)


def tracker(root: Path, name: str, patch: pytest.MonkeyPatch) -> None:
    (root / store.TRACKER).write_bytes(name.encode(errors="surrogatepass"))
    store.load(root)


# by each place the codes of its error, and the names that are harmless there
PLACES: dict[str, tuple[Callable, tuple[str, ...], tuple[str, ...]]] = {
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
    "files of a manifest": (files_of_a_manifest, SAFE, ()),
    "weight_map": (weight_map, SAFE, ("empty", "dot", "parent alone")),  # with .safetensors behind
    "cache of a note": (cache_of_a_note, (*SAFE, "data-file-damaged"), ("empty", "dot")),
    "key of a note": (key_of_a_note, SAFE, ()),
    "local_copies.json": (local_copies_of, ("local-copies-file-damaged",), ()),
    "folder of local copies": (local_copies_folder, SAFE, ()),
    "relative_path in .metadata": (place_in_metadata, SAFE, ()),
    "latest of DeepSpeed": (latest_of_deepspeed, SAFE, ("not UTF-8", "half a pair")),  # replaced
    "tracker of Megatron-LM": (tracker_of_megatron, ("not-converted",), ()),
    "tracker": (tracker, ("checkpoint-tracker-malformed",), ()),
}


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """(a folder to read in, one that nobody may touch)."""
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in ("x", "x.safetensors"):
        (outside / name).write_text("{}")
    (tmp_path / "root").mkdir()
    before = _tree(tmp_path)
    _opened.clear()
    yield tmp_path / "root", outside
    touched = [path for path in map(os.path.realpath, _opened) if path.startswith(f"{outside}")]
    assert not touched
    assert _tree(tmp_path) == before


def _tree(folder: Path) -> dict[str, bytes | None]:
    """What is in a folder, but for its root/."""
    return {
        str(path): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
        if not path.is_relative_to(folder / "root")
    }


def one_code(error: Exception) -> str:
    lines = said(error)
    assert len(lines) == 1 and "\n" not in lines[0], lines
    return code_of(lines[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_a_hostile_name(place, kind, folders, monkeypatch):
    root, outside = folders
    use, codes, harmless = PLACES[place]
    name = NAMES[kind].replace("/OUTSIDE", str(outside))
    try:
        use(root, name, monkeypatch)
    except Exception as error:
        _opened[:] = [path for path in _opened if "\0" not in path]
        if kind not in harmless:
            assert one_code(error) in codes, error
    else:
        assert kind in harmless


@pytest.mark.parametrize("name", ORDINARY)
def test_an_ordinary_name(name, tmp_path):
    assert small_files.path_inside(tmp_path, name) == tmp_path / name
    assert small_files.path_inside(tmp_path, f"{name}/x", below=True) == tmp_path / name / "x"
    with pytest.raises(small_files.UnsafeName):
        small_files.path_inside(tmp_path, f"{name}/x")
    (tmp_path / name).write_text("x")
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("value", [None, 7, [], {}, b"x", True])
def test_what_is_no_text_is_no_name(value, tmp_path):
    with pytest.raises(small_files.UnsafeName):
        small_files.path_inside(tmp_path, value)


# --- links


def _linked(root: Path, outside: Path, name: str) -> None:
    (root / name).unlink(missing_ok=True)
    (root / name).symlink_to(outside / "x")


def _checkpoint(root: Path, outside: Path, name: str) -> Path:
    store.save(root, 5, [], RunState(iteration=5), "--seed 5\n")
    folder = root / "iter_0000005"
    if name in ("manifest.json", "args", "state.json"):
        (outside / "x").write_bytes((folder / name).read_bytes())
    _linked(folder, outside, name)
    return folder


def checkpoint_file(name: str) -> Callable[[Path, Path], object]:
    return lambda root, outside: store.read_metadata(_checkpoint(root, outside, name))


def _model(root: Path, outside: Path, name: str) -> Path:
    weight = torch.ones(2)
    write_file(root / "model.safetensors", [Entry("w", torch.float32, (2,), weight)])
    (root / "config.json").write_text("{}")
    (root / INDEX).write_text('{"weight_map": {"w": "model.safetensors"}}')
    _linked(root, outside, name)
    return root


def saved_args(root: Path, outside: Path) -> None:
    _checkpoint(root, outside, "args")
    found = FromCheckpoint()
    checkpoint_args.take({"load": str(root)}, found, Config)
    if found.problems:
        raise ValueError("\n".join(found.problems))


def link_of_a_rank(root: Path, outside: Path) -> None:
    (root / "mp_rank_00").symlink_to(outside)
    megatron_layout.find_ranks(root)


def linked_shard(root: Path, outside: Path) -> None:
    _linked(root, outside, "a.pt")
    read_file(root / "a.pt")


def link_in_place_of(name: str, use: Callable[[Path], object]) -> Callable[[Path, Path], object]:
    def run(root: Path, outside: Path) -> None:
        _linked(root, outside, name)
        use(root)

    return run


def index_cache(root: Path, outside: Path) -> None:
    prefix = write_corpus(root / "c", [40, 30])
    (root / "c").symlink_to(outside)
    build_datasets(data_flags(data_path=(prefix,)), sizes=(2, 0, 0), sequence_length=8)


LINKS: dict[str, Callable[[Path, Path], object]] = {
    **{
        f"{name} of a checkpoint": checkpoint_file(name)
        for name in ("manifest.json", "args", "state.json")
    },
    "args of --use-checkpoint-args": saved_args,
    **{
        f"{name} of a model": lambda root, outside, name=name: HFFolder(_model(root, outside, name))
        for name in ("config.json", "model.safetensors", INDEX)
    },
    **{f"{name} of a model": link_in_place_of(name, side_files) for name in SIDE_FILES},
    "tokenizer.json of a folder": link_in_place_of(
        "tokenizer.json", lambda root: HuggingFaceTokenizer(str(root))
    ),
    "vocab.json of a folder": link_in_place_of(
        "vocab.json", lambda root: HuggingFaceTokenizer(str(root))
    ),
    "chat_template.jinja of a folder": link_in_place_of("chat_template.jinja", template_in_folder),
    "tokenizer_config.json of a folder": link_in_place_of(
        "tokenizer_config.json", template_in_folder
    ),
    "index cache of data": index_cache,
    "rank of Megatron-LM": link_of_a_rank,
    "tracker of Megatron-LM": link_in_place_of(store.TRACKER, megatron_layout.checkpoint_folder),
    "latest of DeepSpeed": link_in_place_of("latest", checkpoint_folder),
    "file of PyTorch": linked_shard,
    "tracker": link_in_place_of(store.TRACKER, store.latest),
    "skips.jsonl": link_in_place_of(skip_log.FILE_NAME, lambda root: skip_log.append(root, ["{}"])),
    "skips.jsonl that is read": link_in_place_of(skip_log.FILE_NAME, skip_log.read),
    "local_copies.json": link_in_place_of(local_copies.NEWEST, local_copies.read_newest),
    "folder of local copies": link_in_place_of(
        "run", lambda root: LocalSave("run", "0" * 16, 5).folder(root)
    ),
}


@pytest.mark.parametrize("place", LINKS)
def test_a_link_out_of_the_folder(place, folders):
    root, outside = folders
    before = (outside / "x").read_bytes()
    try:
        with pytest.raises(Exception) as caught:
            LINKS[place](root, outside)
    finally:
        (outside / "x").write_bytes(before)
        _opened.clear()
    assert one_code(caught.value) == "link-out-of-folder", caught.value


def test_a_linked_file_is_not_vouched_for(tmp_path):
    folder = _checkpoint(tmp_path, tmp_path, "args")
    assert vouched_file(folder, "args") is None
    assert vouched_file(folder, "state.json") is not None


# --- between ranks


def _send(rank: int, world: int, folder: str, names: list[str]) -> list[str]:
    """Rank 0 sends a file of each name, though it has none of them."""
    errors = []
    for number, name in enumerate(names):
        into = Path(folder) / f"root/{number}"
        if rank == 0:
            head = bytearray(json.dumps({name: 4}).encode().ljust(HEAD))
            dist.send(torch.frombuffer(head, dtype=torch.uint8), 1)
            dist.send(torch.zeros(4, dtype=torch.uint8), 1)
            continue
        into.mkdir()
        try:
            file_transfer.exchange(None, Route(into, 0, dist.group.WORLD))
        except file_transfer.CheckpointError as error:
            errors.append(str(error))
        assert not list(into.iterdir())
    return errors


def test_names_of_files_that_another_rank_sends(folders):
    root, outside = folders
    names = [name.replace("/OUTSIDE", str(outside)) for name in NAMES.values()]
    errors = run_ranks(2, _send, str(root.parent), names)[1]
    assert [code_of(error) for error in errors] == ["name-not-safe"] * len(names)


@pytest.mark.parametrize("name", ["../../x", "a/../../../x", "b\n/x", "n" * 300])
@pytest.mark.parametrize("flag", ["--save", "--load", "--snapshot-dir"])
def test_a_url_does_not_leave_the_staging_directory(flag, name):
    from megatron.config import command_line

    problems = command_line.judge([flag, f"s3://bucket/{name}", "--mock-data"], 1, RunConfig)[1]
    assert [code_of(line) for line in problems if line.startswith(flag)].count("name-not-safe") == 1
