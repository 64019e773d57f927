"""Every place where a name that a store, a file or another machine gives becomes a path, each with
hostile names: nothing outside of the folder is opened or changed, and one error with a code comes."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron import small_files
from megatron.checkpoint import file_transfer, local_copies, reading, skip_log, store
from megatron.checkpoint.file_transfer import HEAD, Route
from megatron.checkpoint.local_copies import LocalSave
from megatron.checkpoint.manifest import FileRecord, Manifest
from megatron.checkpoint.state import RunState
from megatron.config import checkpoint_args
from megatron.config.checkpoint import FromCheckpoint
from megatron.config.run_directory import vouched_file
from megatron.config.tree import Config
from megatron.data.tokenizers.bpe import HuggingFaceTokenizer
from megatron.features.registry import RunConfig
from tests.core.data.corpora import build_datasets, data_flags, write_corpus
from tests.forkrun import run_ranks
from tests.hostile_names import (  # noqa: F401
    KINDS,
    NAMES,
    SAFE,
    Places,
    audit,
    check_link,
    check_name,
    folders,
    link_in_place_of,
    linked,
)
from tests.problems import code_of


def files_of_a_manifest(root: Path, name: str, patch: pytest.MonkeyPatch) -> None:
    store.save(root, 5, [], RunState(iteration=5), "--seed 5\n")
    files = {name: FileRecord(4, "00000000")}
    folder = root / "iter_0000005"
    (folder / "manifest.json").write_bytes(Manifest(5, files, {}).dump())
    reading.load(root)


def local_copies_of(root: Path, name: str, patch: pytest.MonkeyPatch) -> None:
    text = json.dumps({"run": name, "save": "", "iteration": 5, "ranks": ""})
    (root / local_copies.NEWEST).write_text(text)
    local_copies.read_newest(root)


def local_copies_folder(root: Path, name: str, patch: pytest.MonkeyPatch) -> None:
    LocalSave(name, "0" * 16, 5).folder(root)


def tracker(root: Path, name: str, patch: pytest.MonkeyPatch) -> None:
    (root / store.TRACKER).write_bytes(name.encode(errors="surrogatepass"))
    reading.load(root)


# names that look like a path and are none
ORDINARY = (
    "\u2024\u2024\u2044outside\u2044x",
    "\u2025",
    "a b'c\"d",
    "na\u00efve \U0001f469",
    "...",
)
PLACES: Places = {
    "files of a manifest": (files_of_a_manifest, SAFE, ()),
    "local_copies.json": (local_copies_of, ("local-copies-file-damaged",), ()),
    "folder of local copies": (local_copies_folder, SAFE, ()),
    "tracker": (tracker, ("checkpoint-tracker-malformed",), ()),
}


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


def _checkpoint(root: Path, outside: Path, name: str) -> Path:
    store.save(root, 5, [], RunState(iteration=5), "--seed 5\n")
    folder = root / "iter_0000005"
    if name in ("manifest.json", "args", "state.json"):
        (outside / "x").write_bytes((folder / name).read_bytes())
    linked(folder, outside, name)
    return folder


def checkpoint_file(name: str) -> Callable[[Path, Path], object]:
    return lambda root, outside: reading.read_metadata(_checkpoint(root, outside, name))


def saved_args(root: Path, outside: Path) -> None:
    _checkpoint(root, outside, "args")
    found = FromCheckpoint()
    checkpoint_args.take({"load": str(root)}, found, Config)
    if found.problems:
        raise ValueError("\n".join(found.problems))


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
    "tokenizer.json of a folder": link_in_place_of(
        "tokenizer.json", lambda root: HuggingFaceTokenizer(str(root))
    ),
    "vocab.json of a folder": link_in_place_of(
        "vocab.json", lambda root: HuggingFaceTokenizer(str(root))
    ),
    "index cache of data": index_cache,
    "tracker": link_in_place_of(store.TRACKER, reading.latest),
    "skips.jsonl": link_in_place_of(skip_log.FILE_NAME, lambda root: skip_log.record(root, [])),
    "skips.jsonl that is read": link_in_place_of(skip_log.FILE_NAME, skip_log.read),
    "local_copies.json": link_in_place_of(local_copies.NEWEST, local_copies.read_newest),
    "folder of local copies": link_in_place_of(
        "run", lambda root: LocalSave("run", "0" * 16, 5).folder(root)
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_a_hostile_name(place, kind, folders, monkeypatch):  # noqa: F811
    check_name(PLACES[place], kind, folders, monkeypatch)


@pytest.mark.parametrize("place", LINKS)
def test_a_link_out_of_the_folder(place, folders):  # noqa: F811
    check_link(LINKS[place], folders)


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


def test_names_of_files_that_another_rank_sends(folders):  # noqa: F811
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
