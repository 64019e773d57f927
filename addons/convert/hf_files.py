"""A folder in Hugging Face's layout: its safetensors shards, index, config.json and tokenizer
files. One in an object store (s3://bucket/path) is read by ranges, and written file by file."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron.checkpoint.filesystem import DISK
from megatron.checkpoint.safetensors_file import DTYPES, Entry, row_major, write_file
from megatron.checkpoint.safetensors_reader import SafetensorsFile
from megatron.config.checkpoint import is_url
from megatron.small_files import path_inside, read_bytes, safe_name

from .block_scales import SCALE, block_of, dequantized, dtype_of, full_precision
from .config_keys import CONFIG, read_json
from .links import ConversionError, Header
from .stores.kept_shards import KeptShards
from .stores.remote_folder import RemoteFolder, opened, remote_of

if TYPE_CHECKING:
    from ..object_storage.run_directories import Remote

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
WANTED = (CONFIG, INDEX, *SIDE_FILES)


class HFFolder(ExitStack):
    """An open folder of weights: headers by tensor name, and the tensors, read one at a time. A
    context manager."""

    def __init__(self, source: Path | str | RemoteFolder):
        super().__init__()
        self._remote = source if isinstance(source, RemoteFolder) else None
        # config.json and the other small files are there
        self.path = source.path if isinstance(source, RemoteFolder) else Path(source)
        if not (self.path / CONFIG).is_file():
            remedy = "give a folder that save_pretrained wrote"
            if (self.path / "adapter_config.json").is_file():
                remedy = "it has a LoRA; merge that (peft: merge_and_unload().save_pretrained(DIR))"
            raise ConversionError(f"{self.path}: there is no {CONFIG}; {remedy}")
        self.config = read_json(path_inside(self.path, CONFIG))
        self._files: dict[str, SafetensorsFile] = {}
        self._file_of: dict[str, str] = {}
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        """Open every shard; the index, where there is one, must name exactly what is in them."""
        index = self.path / INDEX
        if index.is_file():
            weight_map = read_json(path_inside(self.path, INDEX)).get("weight_map")
            if (
                not isinstance(weight_map, dict)
                or not weight_map
                or not all(str(file).endswith(".safetensors") for file in weight_map.values())
            ):
                raise ConversionError(
                    f"{index}: weight_map must name a .safetensors file of this folder for each "
                    "tensor"
                )
            names = sorted({safe_name(file, index) for file in weight_map.values()})
        elif SINGLE in self._names():
            weight_map = None
            names = [SINGLE]
        else:
            pickled = [name for name in self._names() if name.endswith(".bin")]
            raise ConversionError(
                f"{self.path}: {pickled[0]} is a pickle, which may run code when it is read, and "
                f"there is no {SINGLE}; give the model as safetensors (in transformers: "
                "model.save_pretrained(DIR))"
                if pickled
                else f"{self.path}: neither {SINGLE} nor {INDEX} is there; download the weights too"
            )
        for name in names:
            self._files[name] = self.enter_context(
                self._remote.open(name)
                if self._remote
                else SafetensorsFile(path_inside(self.path, name))
            )
            for key in self._files[name].locations:
                if key in self._file_of:
                    raise ConversionError(
                        f"{self.path}: {key} is both in {self._file_of[key]} and in {name}"
                    )
                self._file_of[key] = name
        if weight_map is not None and weight_map != self._file_of:
            wrong = sorted(
                key
                for key in weight_map.keys() | self._file_of.keys()
                if weight_map.get(key) != self._file_of.get(key)
            )
            raise ConversionError(
                f"{index}: says otherwise than the shards do about {', '.join(wrong[:5])}"
                + (f" and {len(wrong) - 5} more" if len(wrong) > 5 else "")
            )

    def _names(self) -> list[str]:
        """Names of its files, those of weights too."""
        if self._remote:
            return self._remote.names
        return sorted(path.name for path in self.path.iterdir() if path.is_file())

    def check_unchanged(self) -> None:
        """Raise ConversionError if a file in an object store is not the one that was opened."""
        if self._remote:
            self._remote.check_unchanged()

    @property
    def largest_shard(self) -> int:
        """Bytes of the largest file of weights."""
        return max(file.bytes for file in self._files.values())

    def headers(self) -> dict[str, Header]:
        """Number format and shape of every tensor; of FP8 weights with scales of blocks those in
        full precision. Raises ConversionError for scales that do not fit."""
        stored = {
            key: (DTYPES[location.dtype], location.shape)
            for file in self._files.values()
            for key, location in file.locations.items()
        }
        return full_precision(stored, self.config)

    def read(self, name: str) -> torch.Tensor:
        """One tensor, on the CPU."""
        tensor = self._files[self._file_of[name]].read(name)
        block = block_of(self.config)
        if block is None or name + SCALE not in self._file_of:
            return tensor
        scales = self._files[self._file_of[name + SCALE]].read(name + SCALE)
        return dequantized(tensor, scales, block, dtype_of(self.config))


def shards_of(tensors: Sequence[Entry], limit: int) -> list[list[Entry]]:
    """The tensors in their order, cut into shards of at most `limit` bytes (a larger tensor has one
    of its own)."""
    shards: list[list[Entry]] = [[]]
    filled = 0
    for tensor in tensors:
        if shards[-1] and filled + tensor.bytes > limit:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.bytes
    return shards


def new_folder(path: Path) -> None:
    """Raise ConversionError unless `path` can become a new folder: it must not be there yet, and
    nothing above it may be a file."""
    if path.exists():
        raise ConversionError(
            f"{path}: is there already; nothing is overwritten, give another place [output-exists]"
        )
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not above.is_dir():
        raise ConversionError(
            f"{path}: {above} is no directory; give another place [path-not-a-directory]"
        )


@contextmanager
def work_folder(target: Path, purpose: str, empty: bool = True) -> Iterator[Path]:
    """A folder next to `target`, which is removed at the end unless it was renamed; what a killed
    conversion to `target` left is removed first, if it shall be `empty`."""
    folder = target.with_name(f".{target.name}.{purpose}")
    target.parent.mkdir(parents=True, exist_ok=True)
    if empty or not folder.is_dir() or folder.is_symlink():
        shutil.rmtree(folder, ignore_errors=True)
        DISK.make_directory(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def new_target(target: Path | Remote) -> None:
    """Raise ConversionError unless `target` can become a new folder."""
    if isinstance(target, Path):
        new_folder(target)
    elif CONFIG in target.names():
        raise ConversionError(
            f"{target}: is there already; nothing is overwritten, give another place "
            "[output-exists]"
        )


def write_folder(
    target: Path | Remote,
    config: dict[str, Any],
    tensors: Sequence[Entry],
    files: Mapping[str, Path | bytes],
    limit: int,
    source: str,
    check: Callable[[Path, KeptShards], None] | None = None,
) -> list[str]:
    """Write the folder atomically; `files` are written into it under these names. A local one has a
    temporary name until it is complete; complete shards of a killed export of the same `source` are
    kept. In a store config.json comes last, and one shard at a time is on the disk. Returns the
    names of the shards.

    `check` is called with a local one before it gets its name, and raises what is wrong; then it
    takes the place of a folder that is there already."""
    if check is None:
        new_target(target)
    shards = shards_of(tensors, limit)
    count = len(shards)
    names = (
        [SINGLE]
        if count == 1
        else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    )
    plan = dict(zip(names, shards, strict=True))
    if isinstance(target, Path):
        with work_folder(target, "partial", empty=False) as partial:
            kept_shards = KeptShards(partial, _purpose(source, config, plan))
            list(_written(partial, config, plan, files, kept_shards, check is None))
            if check is not None:
                check(partial, kept_shards)
            kept_shards.close()
            DISK.fsync_directory(partial)
            _give_name(partial, target)
        return names
    _check_strays(target, [*names, *[INDEX] * (count > 1)])
    with tempfile.TemporaryDirectory() as scratch:
        for path in _written(Path(scratch), config, plan, files):
            target.send(path)
            path.unlink()
    return names


def _give_name(partial: Path, target: Path) -> None:
    """Rename a complete folder, durably. One that has the name already is removed after it; where
    the system cannot exchange two names it is renamed first."""
    if not target.exists():
        DISK.rename(partial, target)
    elif not DISK.exchange(partial, target):
        old = target.with_name(f".{target.name}.old")
        DISK.rename(target, old)
        DISK.rename(partial, target)
        DISK.rename(old, partial)
    DISK.fsync_directory(target.parent)


def _purpose(source: str, config: Mapping[str, Any], plan: Mapping[str, Sequence[Entry]]) -> str:
    """What decides every byte of the shards."""
    table = {
        name: [(tensor.key, str(tensor.dtype), list(tensor.shape)) for tensor in shard]
        for name, shard in plan.items()
    }
    digest = hashlib.sha256(json.dumps([source, config, table], sort_keys=True).encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):  # another version may convert otherwise
        digest.update(read_bytes(path))
    return digest.hexdigest()


def _check_strays(target: Remote, names: Sequence[str]) -> None:
    """Raise ConversionError if the place in a store has weights of something else, which would be
    read in place of those with these `names`, or with them."""
    strays = [
        name
        for name in target.names()
        if (name.endswith((".safetensors", ".bin")) or name == INDEX) and name not in names
    ]
    if strays:
        raise ConversionError(
            f"{target}: has {', '.join(strays[:5])}, which this export does not write; remove what "
            "is there, or give another place "
            "[output-exists]"
        )


def _written(
    folder: Path,
    config: dict[str, Any],
    plan: Mapping[str, Sequence[Entry]],
    files: Mapping[str, Path | bytes],
    kept_shards: KeptShards | None = None,
    shows: bool = True,
) -> Iterator[Path]:
    """Write the files of a folder: the shards of `plan` that are not `kept`, copies of `files`, the
    index, config.json. Each is given when it is there. `shows`: with lines of progress."""
    missing = {
        name: shard for name, shard in plan.items() if not (kept_shards and kept_shards.has(name))
    }
    with _progress(missing) if shows else nullcontext(missing) as shards:
        for name, shard in shards.items():
            written = write_file(folder / name, shard)
            if kept_shards:
                kept_shards.add(name, written)
            yield folder / name
    for name, file in files.items():
        DISK.write_file(folder / name, file if isinstance(file, bytes) else read_bytes(file))
        yield folder / name
    if len(plan) > 1:
        weight_map = {tensor.key: name for name, shard in plan.items() for tensor in shard}
        total = sum(tensor.bytes for shard in plan.values() for tensor in shard)
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
        yield folder / INDEX
    _write_json(folder / CONFIG, config)
    yield folder / CONFIG


@contextmanager
def _progress(plan: Mapping[str, Sequence[Entry]]) -> Iterator[dict[str, list[Entry]]]:
    """The shards, whose tensors are counted when they are made; lines say how far that is."""
    from tools.shared.progress import Progress, counted

    progress = Progress(sum(tensor.bytes for shard in plan.values() for tensor in shard))
    yield {
        name: [
            replace(tensor, data=counted(partial(row_major, tensor), tensor.bytes, progress))
            for tensor in shard
        ]
        for name, shard in plan.items()
    }
    progress.clear()


def remove_folder(target: Path | Remote) -> None:
    """Remove what `write_folder` wrote; in a store first the files that make it look complete, then
    the weights."""
    if isinstance(target, Path):
        shutil.rmtree(target)
        return
    weights = [name for name in target.names() if name.endswith(".safetensors")]
    target.delete([CONFIG, INDEX, *weights])


def _write_json(path: Path, table: dict[str, Any]) -> None:
    DISK.write_file(path, (json.dumps(table, indent=2, sort_keys=True) + "\n").encode())


def side_files(folder: Path) -> list[Path]:
    """The tokenizer and generation files of a folder. Raises ConversionError for one that cannot be
    read, UnsafeName for a link out of the folder: a file of this machine would be taken, and
    perhaps published, for one of the model."""
    paths = [path_inside(folder, name) for name in SIDE_FILES if os.path.lexists(folder / name)]
    for file in paths:
        if not file.is_file() or not os.access(file, os.R_OK):
            raise ConversionError(
                f"{file}: not a readable file; repair it, or remove it if it is not wanted"
            )
    return paths


@contextmanager
def opened_folder(path_or_url: Path | str) -> Iterator[Path | RemoteFolder]:
    """The folder `path_or_url`, of a URL with its small files on the disk. Raises ConversionError,
    ValueError for a URL that cannot be used, CheckpointError where the store refuses."""
    if not is_url(str(path_or_url)):
        yield Path(path_or_url)
        return
    with opened(str(path_or_url), lambda name: name in WANTED) as folder:
        if CONFIG not in folder.names:
            raise ConversionError(
                f"{path_or_url}: there is no {CONFIG}; give the URL of a whole folder"
            )
        yield folder


def target_of(path_or_url: Path | str) -> Path | Remote:
    """Where to write the folder `path_or_url`. Raises ValueError for a URL that cannot be used."""
    return remote_of(str(path_or_url)) if is_url(str(path_or_url)) else Path(path_or_url)
