"""Names in checkpoints of other programs that become paths: tests/hostile_names.py."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron.addons.convert import megatron_layout
from megatron.addons.convert.deepspeed_files.checkpoint import checkpoint_folder
from megatron.addons.convert.hf_files import INDEX, SIDE_FILES, HFFolder, side_files
from megatron.addons.convert.tests.in_process import use_it
from megatron.addons.convert.torch_dist_tensor import read_index
from megatron.addons.convert.torch_files import read_file
from megatron.checkpoint import store
from megatron.checkpoint.safetensors_file import Entry, write_file
from tests.hostile_names import (  # noqa: F401
    KINDS,
    SAFE,
    Places,
    audit,
    check_link,
    check_name,
    folders,
    link_in_place_of,
    linked,
)


def weight_map(root: Path, name: str, patch: pytest.MonkeyPatch) -> None:
    (root / "config.json").write_text("{}")
    (root / INDEX).write_text(json.dumps({"weight_map": {"w": f"{name}.safetensors"}}))
    HFFolder(root)


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


PLACES: Places = {
    "weight_map": (weight_map, SAFE, ("empty", "dot", "parent alone")),  # with .safetensors behind
    "relative_path in .metadata": (place_in_metadata, SAFE, ()),
    "latest of DeepSpeed": (latest_of_deepspeed, SAFE, ("not UTF-8", "half a pair")),  # replaced
    "tracker of Megatron-LM": (tracker_of_megatron, ("not-converted",), ()),
}


def _model(root: Path, outside: Path, name: str) -> Path:
    weight = torch.ones(2)
    write_file(root / "model.safetensors", [Entry("w", torch.float32, (2,), weight)])
    (root / "config.json").write_text("{}")
    (root / INDEX).write_text('{"weight_map": {"w": "model.safetensors"}}')
    linked(root, outside, name)
    return root


def link_of_a_rank(root: Path, outside: Path) -> None:
    (root / "mp_rank_00").symlink_to(outside)
    megatron_layout.find_ranks(root)


def linked_shard(root: Path, outside: Path) -> None:
    linked(root, outside, "a.pt")
    read_file(root / "a.pt")


LINKS: dict[str, Callable[[Path, Path], object]] = {
    **{
        f"{name} of a model": lambda root, outside, name=name: HFFolder(_model(root, outside, name))
        for name in ("config.json", "model.safetensors", INDEX)
    },
    **{f"{name} of a model": link_in_place_of(name, side_files) for name in SIDE_FILES},
    "rank of Megatron-LM": link_of_a_rank,
    "tracker of Megatron-LM": link_in_place_of(store.TRACKER, megatron_layout.checkpoint_folder),
    "latest of DeepSpeed": link_in_place_of("latest", checkpoint_folder),
    "file of PyTorch": linked_shard,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_a_hostile_name(place, kind, folders, monkeypatch):  # noqa: F811
    check_name(PLACES[place], kind, folders, monkeypatch)


@pytest.mark.parametrize("place", LINKS)
def test_a_link_out_of_the_folder(place, folders):  # noqa: F811
    check_link(LINKS[place], folders)
