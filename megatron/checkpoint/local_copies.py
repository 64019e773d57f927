"""Local copies: each rank's part of the state of a run, on a disk of its own node.

`DIR/RUN/iter_0000012-SAVE/00003-on-00001/` is the part of rank 3 that rank 1 wrote: its own where
the two are equal, else a mirror. A part has the form of a checkpoint that holds only what one rank
has. `local_copies.json` in the run directory names the one save that counts. It is written when the
parts of all ranks are on their disks, and forgets them when the run continues from another
iteration, so what a killed, fenced or abandoned attempt wrote is never loaded.
"""

import json
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from megatron.checkpoint import reading
from megatron.checkpoint.filesystem import (
    DISK,
    CheckpointError,
    Disk,
    explained,
)
from megatron.checkpoint.manifest import Manifest, TensorRecord
from megatron.checkpoint.sharded_reader import Reader
from megatron.checkpoint.tensor_slices import Box, volume
from megatron.config.run_directory import (
    entries,
    read_small_file,
)
from megatron.small_files import parse_json, path_inside

NEWEST = "local_copies.json"
_NAME = re.compile(r"[0-9a-f]{16}")
_SAVE = re.compile(r"iter_\d{7,}-[0-9a-f]{16}")
_PART = re.compile(r"(\d{5,})-on-(\d{5,})")


@dataclass(frozen=True)
class LocalSave:
    """The newest save of a run: of `iteration`, in directories named by `run` and `save`, both
    hexadecimal; no save yet with save "". `ranks`: the text of how many wrote it along each
    axis."""

    run: str
    save: str = ""
    iteration: int = 0
    ranks: str = ""

    def folder(self, node: Path) -> Path:
        """The directory of its parts, below --non-persistent-local-ckpt-dir of a node."""
        with explained("use", node):
            name = f"{self.run}/iter_{self.iteration:07d}-{self.save}"
            return path_inside(node, name, below=True)


def read_newest(root: Path) -> LocalSave | None:
    """What the file in a run directory says, None without one. Raises CheckpointError."""
    path = root / NEWEST
    if not path.exists():
        return None
    try:
        newest = LocalSave(**parse_json(read_small_file(path)))
        if [type(value) for value in asdict(newest).values()] != [str, str, int, str]:
            raise TypeError("a value of another type")
        if not _NAME.fullmatch(newest.run) or newest.save and not _NAME.fullmatch(newest.save):
            raise ValueError("a name of another form")
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path}: {error}; remove it (local copies are then not used) "
            "[local-copies-file-damaged]"
        ) from None
    return newest


def write_newest(root: Path, newest: LocalSave, disk: Disk = DISK) -> None:
    """Replace that file, in a run directory that this job holds."""
    disk.replace_file(root / NEWEST, json.dumps(asdict(newest)).encode())


# --- parts


def part_folder(folder: Path, rank: int, holder: int) -> Path:
    """The directory of the part of `rank` that `holder` writes."""
    return folder / f"{rank:05d}-on-{holder:05d}"


def parts_in(folder: Path) -> list[tuple[int, int, str]]:
    """(rank, holder, path) of each part in the directory of a save."""
    matches = [(_PART.fullmatch(path.name), path) for path in entries(folder)]
    return [(int(match[1]), int(match[2]), str(path)) for match, path in matches if match]


class PartReader(Reader):
    """Reads what one rank held, in the boxes in which it held it."""

    of_one_rank = True

    def __init__(self, directory: Path, manifest: Manifest):
        super().__init__(directory, manifest)
        self._covered = set(manifest.tensors)  # a part covers no tensor

    def read_later(self, name: str, box: Box | None, into: torch.Tensor) -> None:
        boxes = [chunk.box for chunk in self._record(name).chunks]
        if box is None or volume(box) and box not in boxes:
            raise CheckpointError(
                f"{self.directory}, tensor {name}: the flags divide it in another way than those "
                "it was saved with [checkpoint-damaged]"
            )
        super().read_later(name, box, into)


@dataclass(frozen=True)
class RankCheckpoint(reading.Checkpoint):
    """The part of one rank, as a checkpoint."""

    def reader(self) -> PartReader:
        return PartReader(self.directory, self.manifest)


def verify(path: Path) -> str | None:
    """Read every byte of a part; returns what is wrong with it."""
    try:
        metadata = reading.read_metadata(path)
        with PartReader(path, metadata.manifest) as reader:
            reader.verify()
    except CheckpointError as error:
        return str(error)
    return None


def open_part(path: Path, save: str) -> RankCheckpoint:
    """The part in a directory; its manifest has the name of the save, which all ranks have in
    common, in the place of its checksum. Raises CheckpointError."""
    metadata = reading.read_metadata(path)
    # a rank may own none of the optimizer's tensors, and be no part of a run without one
    tensors = {**metadata.manifest.tensors, "optimizer.": TensorRecord((0,), "F32", ())}
    table = replace(metadata.manifest, tensors=tensors, crc32=save)
    return RankCheckpoint(metadata.directory, table, metadata.state, metadata.args)


def remove_superseded(run: Path, current: Path, disk: Disk = DISK) -> None:
    """Remove the saves of a run on this node other than `current`."""
    for path in entries(run):
        if path != current and _SAVE.fullmatch(path.name):
            disk.remove_tree(path)
