"""A run directory as its readers see it, without torch: its checkpoints, what its tracker names,
what led to what, and the files of a checkpoint for which its manifest vouches."""

import errno
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

from megatron.config import history
from megatron.config.history import History
from megatron.small_files import UnsafeName, path_inside, read_bytes, read_json

TRACKER = "latest_checkpointed_iteration.txt"
MANIFEST = "manifest.json"  # in each whole checkpoint; checkpoint/manifest.py reads and writes it
FINAL = re.compile(r"iter_(\d{7,})")  # directory of a complete checkpoint
STATE = "state.json"
ARGS = "args"
SLOTS = ("0", "1")  # of snapshots: run directories of one checkpoint each
_REMEDIES = {
    errno.ENOSPC: "free space there or point --save at another disk; the previous checkpoint is "
    "untouched",
    errno.EDQUOT: "the quota is used up: free space or point --save elsewhere; the previous "
    "checkpoint is untouched",
    errno.EFBIG: "raise the file size limit (ulimit -f); the previous checkpoint is untouched",
    errno.EROFS: "the file system is read-only: remount it or point --save elsewhere",
    errno.EACCES: "give this user permission there or point --save elsewhere",
    errno.EPERM: "give this user permission there or point --save elsewhere",
    errno.ENOENT: "a part of the path does not exist or was removed: check it",
    errno.ENOTDIR: "a part of the path is a file: choose another directory",
    errno.EEXIST: "it exists already: move it away",
    errno.EIO: "the disk reports an input/output error: check it (dmesg) and point --save at "
    "another one",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.EBUSY: "another process has it open: end that one",
    errno.ESTALE: "another host removed or replaced it: start again",
}
_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EIO, errno.ENXIO)


class CheckpointError(Exception):
    """A checkpoint could not be written, found or trusted; the text names the path and says what to
    do.

    `errno` is the operating system's number where that was the cause, else None.
    """

    def __init__(self, text: str, number: int | None = None):
        super().__init__(text)
        self.errno = number

    @property
    def is_damage(self) -> bool:
        """Whether an older checkpoint would help: not if permissions or a limit of the process are
        the cause."""
        return self.errno is None or self.errno in _DAMAGE


class ForeignCheckpoint(CheckpointError):
    """A valid checkpoint that is not for this program or this run: loading an older one is not the
    remedy."""

    @property
    def is_damage(self) -> bool:
        """It is not damaged."""
        return False


@contextmanager
def explained(action: str, path: Path | str) -> Iterator[None]:
    """Turn an OSError of the body into a CheckpointError `cannot {action} {path}: reason;
    remedy`, and an UnsafeName into one with its text."""
    try:
        yield
    except UnsafeName as error:
        raise CheckpointError(str(error)) from None
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "check the path and the disk")
        raise CheckpointError(
            f"cannot {action} {path}: {error.strerror or error}; {remedy} [file-operation-failed]",
            error.errno,
        ) from error


def read_small_file(path: Path, limit: int = 1 << 30) -> bytes:
    """All bytes of a plain file of at most `limit` bytes; no pipe or device is waited for, no link
    out of its folder followed. Raises CheckpointError."""
    with explained("read", path):
        try:
            return read_bytes(path_inside(path.parent, path.name), limit)
        except OSError as error:
            # not a plain file, or too large
            if error.errno not in (errno.EINVAL, errno.EFBIG):
                raise
            raise CheckpointError(
                f"{path}: {error.strerror}; the checkpoint is damaged: use another one "
                "[checkpoint-damaged]"
            ) from error


def entries(root: Path) -> Iterator[Path]:
    """What is in `root`, sorted; nothing when it is missing."""
    if root.is_dir():
        with explained("list", root):
            yield from sorted(root.iterdir())


def iterations(root: Path | str) -> list[int]:
    """Iterations of all complete checkpoints in `root`, ascending."""
    matches = [(path, FINAL.fullmatch(path.name)) for path in entries(Path(root))]
    return sorted(int(match[1]) for path, match in matches if match and (path / MANIFEST).is_file())


class RunDirectory:
    """The complete checkpoints of a run directory."""

    def __init__(self, path: str | Path):
        """Raises CheckpointError where it cannot be listed; a missing one is empty."""
        self.path = Path(path)
        self.iterations = iterations(path)

    def folder(self, iteration: int) -> Path:
        """The directory of a checkpoint."""
        return iteration_directory(self.path, iteration)

    @cached_property
    def histories(self) -> dict[int, History | None]:
        """Of its checkpoints by iteration; None where one cannot be read."""
        return {n: history_of(self.folder(n)) for n in self.iterations}

    def last_saved(self, up_to: int | None = None) -> int | None:
        """The checkpoint that was saved last, whatever the tracker says: the newest of the branch
        that began last, unless its state is damaged."""

        def place(n: int) -> tuple[int, int]:
            own = self.histories[n]
            return own.number if own else 0, n

        numbers = [n for n in self.iterations if up_to is None or n <= up_to]
        order = sorted(numbers, key=place, reverse=True)
        good = (n for n in order if vouched_file(self.folder(n), STATE) is not None)
        return next(good, order[0] if order else None)

    def foreign(self, own: History) -> list[int]:
        """Which checkpoints are of another history than a run that begins at `own`."""
        others = self.histories
        last = own.branches[0][1]
        if others.get(last) == History():
            others = {**others, last: identified(self.folder(last))}
        return history.foreign(own, others)


def history_of(folder: Path) -> History | None:
    """The history of a checkpoint, None where it cannot be read."""
    try:
        return History.parse(read_json(folder / STATE).get("history", {}))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return None


def identified(folder: Path) -> History | None:
    """As `history_of`; also of a checkpoint that names none."""
    own = history_of(folder)
    try:
        table = read_json(folder / MANIFEST) if own == History() else {}
        return history.without_branches(table["crc32"], table["iteration"]) if table else own
    except (OSError, ValueError, KeyError, TypeError):
        return None


def iteration_directory(root: str | Path, iteration: int) -> Path:
    """`root/iter_0000020` for iteration 20."""
    return Path(root) / f"iter_{iteration:07d}"


def latest(root: Path | str) -> int | None:
    """The iteration that the tracker names, or None where there is no tracker. Raises
    CheckpointError."""
    path = Path(root) / TRACKER
    try:
        text = read_small_file(path)[:100].decode(errors="replace").strip()
    except CheckpointError as error:
        if isinstance(error.__cause__, (FileNotFoundError, NotADirectoryError)):
            return None
        raise
    if text == "release" and (Path(root) / text).is_dir():
        raise ForeignCheckpoint(
            f"{root}: written by Megatron-LM; convert it: python tools/convert_checkpoint.py "
            f"megatron-import {root} DIRECTORY [checkpoint-of-another-suite]"
        )
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise CheckpointError(
            f"{path} holds {text!r}, not an iteration; write the number to resume from into it "
            f"({complete_here(root)}) [checkpoint-tracker-malformed]"
        )
    return int(text)


def complete_here(root: Path | str) -> str:
    """The complete checkpoints, for a message."""
    return "complete here: " + (", ".join(map(str, iterations(root))) or "none")


def is_checkpoint(path: Path) -> bool:
    """Is `path` one checkpoint, by its name or by what it holds, and not a run directory?"""
    return bool(FINAL.fullmatch(path.name)) or (path / MANIFEST).is_file()


def slots(directory: Path | str) -> list[Path]:
    """The run directories below a snapshot directory."""
    return [Path(directory) / name for name in SLOTS]


def vouched_file(folder: Path, name: str) -> bytes | None:
    """The bytes of a file of a checkpoint; None where the manifest does not vouch for them."""
    # nor a pipe, to wait for
    if not (folder / MANIFEST).is_file() or not (folder / name).is_file():
        return None
    try:
        crc32 = read_json(path_inside(folder, MANIFEST))["files"][name]["crc32"]
        content = read_bytes(path_inside(folder, name))
        return content if f"{zlib.crc32(content):08x}" == crc32 else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
