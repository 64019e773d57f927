"""Local copies: each rank's part of the state of a run, on a disk of its own node.

`DIR/RUN/00003-on-00001/iter_0000012/` is the part of rank 3 that rank 1 wrote: its own where the
two are equal, else a mirror. A part has the form of a checkpoint that holds only what one rank
has, and `copy.json`, which says what it is a part of. Parts of one save have its token in common;
a state is whole where all of them are somewhere.

`local_copies.jsonl` in the run directory has a line for each start of the run, and each return to
an earlier iteration: copies of another run, and copies beyond the iteration from which a later
line began, are not used.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from megatron.checkpoint import store
from megatron.checkpoint.filesystem import (
    DISK,
    CheckpointError,
    Disk,
    entries,
    explained,
    read_small_file,
)
from megatron.checkpoint.manifest import FILE_NAME, FileRecord, Manifest, TensorRecord
from megatron.checkpoint.sharded import Reader
from megatron.checkpoint.tensor_slices import Box, volume
from megatron.checksums import crc32
from megatron.small_files import parse_json

LINES = "local_copies.jsonl"
COPY = "copy.json"
_ROOT = re.compile(r"(\d{5,})-on-(\d{5,})")


# --- the lines of a run


@dataclass(frozen=True)
class Line:
    """What a run writes from iteration `start` on, until its next start."""

    run: str
    line: str
    start: int


def read_lines(root: Path) -> list[Line]:
    """The lines of a run directory, the oldest first. Raises CheckpointError."""
    path = root / LINES
    if not path.exists():
        return []
    try:
        lines = [Line(**parse_json(text)) for text in read_small_file(path).splitlines()]
        if any([type(value) for value in asdict(one).values()] != [str, str, int] for one in lines):
            raise TypeError("a value of another type")
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path}: {error}; remove it (local copies are then not used) "
            "[local-copies-file-damaged]"
        ) from None
    return lines


def add_line(root: Path, start: int, disk: Disk = DISK) -> Line:
    """Begin a line at iteration `start`, in a run directory that this job holds."""
    try:
        lines = read_lines(root)
    except CheckpointError:
        lines = []  # a new run, which no copy belongs to
    run = lines[-1].run if lines else secrets.token_hex(8)
    new = Line(run, secrets.token_hex(8), start)
    path = root / LINES
    temporary = root / f".{LINES}.tmp"
    with explained("write", temporary):
        temporary.unlink(missing_ok=True)
    text = "".join(f"{json.dumps(asdict(one))}\n" for one in (*lines, new))
    disk.make_root(root)
    disk.write_file(temporary, text.encode())
    disk.rename(temporary, path)
    disk.fsync_directory(root)
    return new


def forget(root: Path, disk: Disk = DISK) -> None:
    """End all lines, since the current run makes no local copies."""
    if (root / LINES).exists():
        disk.remove(root / LINES)


def newest_of_lines(lines: Sequence[Line]) -> dict[str, float]:
    """The last iteration of each line that still counts."""
    found: dict[str, float] = {}
    limit = math.inf
    for one in reversed(lines):
        found[one.line] = limit
        limit = min(limit, one.start)
    return found


# --- parts


@dataclass(frozen=True)
class Copy:
    """What a part belongs to: line of the run, save, rank and layout."""

    line: str
    save: str
    iteration: int
    rank: int
    layout: dict[str, int]


@dataclass(frozen=True)
class Found:
    """A part in a directory, and the rank that wrote it there."""

    copy: Copy
    holder: int
    path: str


def part_root(folder: Path, rank: int, holder: int) -> Path:
    """The run directory of the parts of `rank` that `holder` writes, of the run directory `folder`
    below --non-persistent-local-ckpt-dir."""
    return folder / f"{rank:05d}-on-{holder:05d}"


def finish_part(
    temporary: Path, part: Manifest, state: bytes, args: str, copy: Copy, disk: Disk = DISK
) -> None:
    """After the tensors, which `part` lists: the small files, the manifest last."""
    small = {
        store.STATE: state,
        store.ARGS: args.encode(),
        COPY: json.dumps(asdict(copy)).encode(),
    }
    records = {name: FileRecord(len(data), crc32(data)) for name, data in small.items()}
    for name, data in small.items():
        disk.write_file(temporary / name, data)
    whole = replace(part, files={**part.files, **records})
    disk.write_file(temporary / FILE_NAME, whole.dump())
    disk.fsync_directory(temporary)


def taken_manifest(temporary: Path, rank: int, disk: Disk = DISK) -> Manifest:
    """Of the tensors that a process of --async-save wrote there, whose file it removes."""
    file = store.part_file(temporary, rank)
    part = store.read_manifest(file)
    disk.remove(file)
    return part


class PartReader(Reader):
    """Reads what one rank held, in the boxes in which it held it."""

    is_part = True

    def __init__(self, directory: Path, manifest: Manifest):
        super().__init__(directory, manifest)
        self._covered = set(manifest.tensors)  # a part covers no tensor

    def read_later(self, name: str, box: Box | None, into: torch.Tensor) -> None:
        record = self._record(name)
        boxes = [chunk.box for chunk in record.chunks]
        if box is None or volume(box) and box not in boxes:
            raise CheckpointError(
                f"{self.directory}, tensor {name}: the flags divide it in another way than those "
                "it was saved with [checkpoint-damaged]"
            )
        super().read_later(name, box, into)


@dataclass(frozen=True)
class Part(store.Checkpoint):
    """The part of one rank, as a checkpoint."""

    def reader(self) -> PartReader:
        return PartReader(self.directory, self.manifest)


def read_copy(path: Path) -> Copy:
    """What the part in a directory belongs to. Raises CheckpointError."""
    table = store.read_manifest(path / FILE_NAME)
    text = read_small_file(path / COPY)
    record = table.files.get(COPY)
    if record is None or record.crc32 != crc32(text):
        raise CheckpointError(
            f"{path / COPY}: its checksum is {crc32(text)}, which the manifest does not have "
            "[checkpoint-damaged]"
        )
    try:
        return Copy(**parse_json(text))
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path / COPY}: {error} [checkpoint-damaged]") from None


def verify(path: Path) -> str | None:
    """Read every byte of a part; returns what is wrong with it."""
    try:
        found = store.read_metadata(path)
        with PartReader(path, found.manifest) as reader:
            reader.verify()
    except CheckpointError as error:
        return str(error)
    return None


def open_part(path: Path, save: str) -> Part:
    """The part in a directory; its manifest has the token of the save, which all ranks have in
    common, in the place of its checksum. Raises CheckpointError."""
    found = store.read_metadata(path)
    # a rank may own none of the optimizer's tensors, and be no part of a run without one
    tensors = {**found.manifest.tensors, "optimizer.": TensorRecord((0,), "F32", ())}
    table = replace(found.manifest, tensors=tensors, crc32=save)
    return Part(found.directory, table, found.state, found.args)


def parts_in(folder: Path) -> tuple[list[Found], list[str]]:
    """The parts in the directory of a run, and what is wrong with others."""
    found = []
    problems = []
    try:
        for root, holder in _roots(folder):
            for iteration in store.iterations(root):
                path = store.iteration_directory(root, iteration)
                try:
                    found.append(Found(read_copy(path), holder, str(path)))
                except CheckpointError as error:
                    problems.append(str(error))
    except CheckpointError as error:
        problems.append(str(error))
    return found, problems


def _roots(folder: Path) -> Iterator[tuple[Path, int]]:
    """The directories of the parts of a rank, each with its holder."""
    for path in entries(folder):
        if match := _ROOT.fullmatch(path.name):
            yield path, int(match[2])


def remove_others(
    folder: Path, is_mine: Callable[[int], bool], iteration: int | None, disk: Disk = DISK
) -> None:
    """Remove the parts of other iterations than `iteration` whose holder is mine."""
    for root, holder in list(_roots(folder)):
        if not is_mine(holder):
            continue
        for one in store.iterations(root):
            if one != iteration:
                store.discard(store.iteration_directory(root, one), disk)
        if not store.iterations(root):
            disk.remove_tree(root)
