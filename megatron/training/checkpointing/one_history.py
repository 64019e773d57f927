"""A run directory has one history: checkpoints of others in --save are refused, or renamed
(--overwrite-newer-checkpoints). Loads no torch."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron import launcher, log, object_stores
from megatron.checkpoint.filesystem import DISK
from megatron.config import command_line
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.command_line import CommandLine
from megatron.config.history import History
from megatron.config.run_directory import FINAL, TRACKER, RunDirectory, identified
from megatron.config.skip_ranges import FILE_NAME

SUFFIX = "other-history"
LOCAL_COPIES = "local_copies.json"


def is_same_directory(c: CheckpointConfig) -> bool:
    """Whether --load is the directory of --save, or a checkpoint in it."""
    if c.load is None or c.save is None:
        return False
    load = Path(os.path.realpath(c.load))
    is_final = FINAL.fullmatch(load.name) is not None
    return os.path.realpath(c.save) in (str(load), str(load.parent) if is_final else "")


def others(c: CheckpointConfig, own: History | None) -> list[Path]:
    """What --save holds of other histories than that of a run which begins at the checkpoint of
    `own`, or, with None, at iteration 0: checkpoints and snapshots.

    In the directory of --load all is of one history, and what an interrupted rollback left of its
    snapshots too."""
    assert c.save is not None, "the run saves"
    resumes = own is not None and not c.finetune and is_same_directory(c)
    folders: list[Path] = []
    for path in (Path(c.save), *c.slots_of(c.save)):
        root = RunDirectory(path)
        if own is None:
            wrong = [n for n in root.iterations if n]
        elif not resumes:
            wrong = root.foreign(own)
        elif path == Path(c.save):
            wrong = []
        else:
            wrong = [
                n
                for n, other in root.histories.items()
                # where both are known, they begin alike
                if other and own.branches and other.branches
                if own.branches[0][0] != other.branches[0][0]
            ]
        folders += map(root.folder, wrong)
    return folders


def last_number(c: CheckpointConfig, save: str) -> int:
    """Of the branch that began last of those in a run directory."""
    roots = map(RunDirectory, (save, *map(str, c.slots_of(save))))
    known = (own for root in roots for own in root.histories.values())
    return max((own.number for own in known if own), default=0)


def may_rename(c: CheckpointConfig, own: History | None) -> bool:
    """Whether what is found is renamed; not where the run begins anew from one of them."""
    return c.overwrite_newer_checkpoints and not (own is None and is_same_directory(c))


def problem(
    c: CheckpointConfig, save: str, load: str | None, own: History | None, found: Sequence[str]
) -> str:
    """The line about checkpoints of other histories in `save`: `found`."""
    last = max(found, key=lambda name: int(name.rpartition("_")[2]))
    start = "iteration 0" if own is None else f"iteration {own.iteration} of --load {load}"
    remedies = [
        f"give --load {save}{' and no --finetune' * c.finetune} to resume from the newest",
        *["--overwrite-newer-checkpoints to rename them"] * (not is_same_directory(c)),
        "or another --save",
    ]
    return (
        f"--save {save}: holds checkpoints of another history, the last is {last}, and this run "
        f"would start at {start} and overwrite them; {', '.join(remedies)} [save-holds-checkpoints]"
    )


def begins_at(line: CommandLine) -> tuple[bool, History | None]:
    """(Whether it is known before the load where this run begins; the history of that checkpoint,
    None at iteration 0)."""
    c = line.config.checkpoint
    if c.load is None or c.finetune:
        return True, None
    from megatron.config.load_order import newest_with_good_args

    folder = newest_with_good_args(c.load, c.ckpt_step, c.slots_of(c.load))
    if folder is not None:
        own = identified(folder)
        if own and not own.iteration and not is_same_directory(c):
            return True, None
        return own is not None, own
    elsewhere = line.load_url or line.snapshot_url or c.non_persistent_ckpt_type == "local"
    return not (elsewhere or is_same_directory(c)), None


def problems(line: CommandLine) -> Iterator[str]:
    """The problem of a run that saves where there are checkpoints of another history, as far as can
    be seen on this disk."""
    c = line.config.checkpoint
    if c.save is None or line.config.training.skip_train or line.load_url:
        return
    known, own = begins_at(line)
    if known and not may_rename(c, own) and (found := others(c, own)):
        yield problem(c, line.save_url or c.save, c.load, own, [str(path) for path in found])


def make_room(line: CommandLine) -> None:
    """As the holder of --save, before training: rename what it holds of other histories, on the
    disk and in an object store, with --overwrite-newer-checkpoints; without, exit with code 2.
    Raises CheckpointError."""
    c = line.config.checkpoint
    known, own = begins_at(line)
    if c.save is None or not known:
        return
    found = others(c, own)
    stored: list[tuple[Any, Sequence[int]]] = []  # run directories, what is wrong there
    if (line.save_url or line.snapshot_url) and not (own and is_same_directory(c)):
        stored = list(object_stores.part("run_directories").foreign(line, own))
    names = [str(path) for path in found]
    names += [f"{remote.url}/iter_{n:07d}" for remote, wrong in stored for n in wrong]
    if names and not may_rename(c, own):
        places = line.save_url or c.save, line.load_url or c.load
        command_line.refuse([problem(c, *places, own, names)], launcher.info())
    set_aside(Path(c.save), found)
    for remote, wrong in stored:
        for name in remote.set_aside(wrong, SUFFIX):
            _say(f"{remote.url}/{name}", f"{name}.{SUFFIX}")


def set_aside(save: Path, found: Sequence[Path]) -> None:
    """Rename checkpoints so that nothing loads or removes them, and with those of `save` what else
    is of their history. Raises CheckpointError."""
    for path in found:
        tracker = path.parent / TRACKER
        if path.parent != save and tracker.exists():  # as where a slot is emptied
            DISK.remove(tracker)
        _rename(path)
    if any(path.parent == save for path in found):
        for path in (save / FILE_NAME, save / LOCAL_COPIES):
            if path.exists():
                _rename(path)


def _rename(path: Path) -> None:
    number = 1
    target = path.with_name(f"{path.name}.{SUFFIX}")
    while target.exists():
        number += 1
        target = path.with_name(f"{path.name}.{SUFFIX}-{number}")
    DISK.rename(path, target)
    DISK.fsync_directory(path.parent)
    _say(str(path), target.name)


def _say(path: str, name: str) -> None:
    log.print_rank_0(f"  {path} is of another history: renamed to {name}")
