"""A folder in Hugging Face's layout: its safetensors shards, index, config.json and tokenizer
files. One in an object store (s3://bucket/path) is read and written by way of a local copy."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.filesystem import DISK
from megatron.checkpoint.object_store import Remote
from megatron.checkpoint.safetensors_file import DTYPES, Entry, SafetensorsFile, write_file
from megatron.config.checkpoint import is_url
from tools.convert.config_keys import read_json
from tools.convert.links import ConversionError, Header, Shape
from tools.shared.progress import Progress, counted

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# All files of a model other than weights and code: copied on import and on export.
SIDE_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors")
_WANTED = (CONFIG, INDEX, *SIDE_FILES)


class HFFolder:
    """An open folder of weights: headers by tensor name, and the tensors, read one at a time. A
    context manager."""

    def __init__(self, path: Path | str):
        self.path = Path(path)
        if not (self.path / CONFIG).is_file():
            raise ConversionError(
                f"{self.path}: there is no {CONFIG}; give a folder that save_pretrained wrote"
            )
        self.config = read_json(self.path / CONFIG)
        self._files: dict[str, SafetensorsFile] = {}
        self._home: dict[str, str] = {}
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        """Open every shard; the index, where there is one, must name exactly what is in them."""
        index = self.path / INDEX
        if index.is_file():
            weight_map = read_json(index).get("weight_map")
            if (
                not isinstance(weight_map, dict)
                or not weight_map
                or not all(
                    isinstance(file, str) and _PLAIN.fullmatch(file) for file in weight_map.values()
                )
            ):
                raise ConversionError(
                    f"{index}: weight_map must name a .safetensors file of this folder for each "
                    "tensor"
                )
            names = sorted(set(weight_map.values()))
        elif (self.path / SINGLE).is_file():
            weight_map = None
            names = [SINGLE]
        else:
            raise ConversionError(self._no_weights())
        for name in names:
            self._files[name] = SafetensorsFile(self.path / name)
            for key in self._files[name].places:
                if key in self._home:
                    raise ConversionError(
                        f"{self.path}: {key} is both in {self._home[key]} and in {name}"
                    )
                self._home[key] = name
        if weight_map is not None and weight_map != self._home:
            wrong = sorted(
                key
                for key in weight_map.keys() | self._home.keys()
                if weight_map.get(key) != self._home.get(key)
            )
            raise ConversionError(
                f"{index}: says otherwise than the shards do about {', '.join(wrong[:5])}"
                + (f" and {len(wrong) - 5} more" if len(wrong) > 5 else "")
            )

    def _no_weights(self) -> str:
        pickled = sorted(file.name for file in self.path.glob("*.bin"))
        if pickled:
            return (
                f"{self.path}: {pickled[0]} is a pickle, which may run code when it is read, and "
                f"there is no {SINGLE}; give the model as safetensors (in transformers: "
                "model.save_pretrained(DIR))"
            )
        return f"{self.path}: neither {SINGLE} nor {INDEX} is there"

    @property
    def largest_shard(self) -> int:
        """Bytes of the largest file of weights."""
        return max(file.bytes for file in self._files.values())

    def headers(self) -> dict[str, Header]:
        """Number format and shape of every tensor."""
        return {
            key: (DTYPES[place.dtype], place.shape)
            for key, place in (
                (key, self._files[name].places[key]) for key, name in self._home.items()
            )
        }

    def read(self, name: str) -> torch.Tensor:
        """One tensor, on the CPU."""
        return self._files[self._home[name]].read(name)

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()

    def __enter__(self) -> HFFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class Outgoing:
    """A tensor to write: its name, format and shape, and a function that makes it when its turn
    comes."""

    name: str
    dtype: torch.dtype
    shape: Shape
    make: Callable[[], torch.Tensor]

    @property
    def bytes(self) -> int:
        """Length of its data."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def shards_of(tensors: Sequence[Outgoing], limit: int) -> list[list[Outgoing]]:
    """The tensors in their order, cut into shards of at most `limit` bytes (a larger tensor has one
    of its own)."""
    shards: list[list[Outgoing]] = [[]]
    filled = 0
    for tensor in tensors:
        if shards[-1] and filled + tensor.bytes > limit:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.bytes
    return shards


def new_folder(path: Path) -> None:
    """Raise ConversionError unless `path` can become a new folder: it must not be there yet."""
    if path.exists():
        raise ConversionError(
            f"{path}: is there already; nothing is overwritten, give another place"
        )
    if not path.parent.is_dir():
        raise ConversionError(f"{path}: there is no directory {path.parent}; make it first")


@contextmanager
def work_folder(target: Path, purpose: str) -> Iterator[Path]:
    """An empty folder next to `target`, which is removed at the end unless it was renamed; what a
    killed conversion to `target` left is removed first."""
    folder = target.with_name(f".{target.name}.{purpose}")
    shutil.rmtree(folder, ignore_errors=True)
    DISK.make_directory(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_folder(
    path: Path,
    config: dict[str, Any],
    tensors: Sequence[Outgoing],
    files: Mapping[str, Path],
    limit: int,
) -> list[str]:
    """Write the folder, whole or not at all: under a name of its own, then renamed. `files` are
    copied into it under these names. Returns the names of the shards."""
    new_folder(path)
    with work_folder(path, "partial") as partial:
        shards = shards_of(tensors, limit)
        count = len(shards)
        names = (
            [SINGLE]
            if count == 1
            else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
        )
        progress = Progress(sum(one.bytes for one in tensors))
        for name, shard in zip(names, shards, strict=True):
            write_file(
                partial / name,
                [
                    Entry(one.name, one.dtype, one.shape, counted(one.make, one.bytes, progress))
                    for one in shard
                ],
            )
        progress.clear()
        if count > 1:
            weight_map = {
                one.name: name for name, shard in zip(names, shards, strict=True) for one in shard
            }
            total = sum(one.bytes for one in tensors)
            _write_json(
                partial / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map}
            )
        _write_json(partial / CONFIG, config)
        for name, file in files.items():
            DISK.write_file(partial / name, file.read_bytes())
        DISK.fsync_directory(partial)
        DISK.rename(partial, path)
        DISK.fsync_directory(path.parent)
    return names


def _write_json(path: Path, table: dict[str, Any]) -> None:
    DISK.write_file(path, (json.dumps(table, indent=2, sort_keys=True) + "\n").encode())


def side_files(folder: Path) -> list[Path]:
    """The tokenizer and generation files of a folder. Raises ConversionError for one that cannot be
    read."""
    found = [folder / name for name in SIDE_FILES if os.path.lexists(folder / name)]
    for file in found:
        if not file.is_file() or not os.access(file, os.R_OK):
            raise ConversionError(
                f"{file}: not a readable file; repair it, or remove it if it is not wanted"
            )
    return found


@contextmanager
def local_source(place: Path | str, target: Path) -> Iterator[Path]:
    """The folder `place`; of a URL a copy next to `target`, removed at the end. Raises
    ConversionError, ValueError for a URL that cannot be used, CheckpointError where the store
    refuses."""
    if not is_url(str(place)):
        yield Path(place)
        return
    new_folder(target)
    remote = Remote(str(place))
    names = [n for n in remote.names() if n.endswith(".safetensors") or n in _WANTED]
    if CONFIG not in names:
        raise ConversionError(f"{place}: there is no {CONFIG}; give the URL of a whole folder")
    with work_folder(target, "fetched") as folder:
        for name in names:
            remote.get(name, folder / name)
        yield folder


@contextmanager
def local_target(place: Path | str) -> Iterator[Path]:
    """Where to write the folder `place`; of a URL a temporary one, which is uploaded at the end:
    config.json last, so that what is not whole does not look so. Raises as `local_source`."""
    if not is_url(str(place)):
        yield Path(place)
        return
    remote = Remote(str(place))
    if CONFIG in remote.names():
        raise ConversionError(
            f"{place}: is there already; nothing is overwritten, give another place"
        )
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "hf"
        yield folder
        for path in sorted(folder.iterdir(), key=lambda path: (path.name == CONFIG, path.name)):
            remote.send(path)
