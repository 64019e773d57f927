"""The run directory: writes iter_XXXXXXX directories atomically; `reading` finds them again.

A save is written into a hidden sibling, fsynced, renamed, and only then named by the tracker file.
A process may be killed at any step: what the tracker names is always a complete checkpoint. Knows
no tensors' meaning and no process group: several ranks are brought together by a `gather` function
of the caller.
"""

import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

from megatron import log
from megatron.checkpoint import manifest, sharded
from megatron.checkpoint.filesystem import (
    DISK,
    CheckpointError,
    Disk,
    explained,
)
from megatron.checkpoint.manifest import FileRecord
from megatron.checkpoint.sharded import TensorSlice
from megatron.checkpoint.state import RunState
from megatron.checksums import crc32
from megatron.config.run_directory import (
    ARGS,
    FINAL,
    STATE,
    TRACKER,
    entries,
    iteration_directory,
)

_TEMPORARY = re.compile(r"\.(iter_\d{7,}|[a-z_]+\.(txt|jsonl?))\.tmp-[0-9a-f]{8}")
ASIDE = re.compile(r"\.iter_(\d{7,})\.old-[0-9a-f]{8}")

Value = TypeVar("Value")
Fence = Callable[[], None]


class Gather(Protocol):
    """What every rank holds, in rank order; all ranks call it."""

    def __call__(self, value: Value, /) -> Sequence[Value]: ...


def alone(value: Value) -> list[Value]:
    """The gather of a single process."""
    return [value]


def unfenced() -> None:
    """The fence of a directory that nobody else writes into."""


def save(
    root: Path | str,
    iteration: int,
    slices: Sequence[TensorSlice],
    state: RunState,
    args: str,
    *,
    rank: int = 0,
    world_size: int = 1,
    gather: Gather = alone,
    disk: Disk = DISK,
    fence: Fence = unfenced,
) -> Path:
    """Write one checkpoint and make it the latest; every rank calls this with the slices it is to
    write.

    `gather(value)` returns every rank's value in rank order and so also waits for all
    (all_gather_object of the world). `state`, `args` and `fence` are rank 0's; the fence is called
    before the checkpoint is renamed, and raises if another job has acquired the directory
    (lock.py). Returns `root/iter_XXXXXXX` when it is on the disk under its name. When any rank
    fails, every rank raises CheckpointError, the files of this save are removed and the last
    checkpoint stays.
    """
    temporary = begin(root, iteration, rank=rank, gather=gather, disk=disk, fence=fence)
    return commit(
        temporary,
        iteration,
        lambda: write_rank_files(temporary, rank, slices, iteration, disk),
        state,
        args,
        rank=rank,
        world_size=world_size,
        gather=gather,
        disk=disk,
        fence=fence,
    )


def begin(
    root: Path | str,
    iteration: int,
    *,
    rank: int = 0,
    gather: Gather = alone,
    disk: Disk = DISK,
    fence: Fence = unfenced,
) -> Path:
    """The first half of `save`: the temporary directory, in which every rank may write its files
    now."""
    root = Path(root)
    token = secrets.token_hex(4) if rank == 0 else ""
    temporary = root / f".iter_{iteration:07d}.tmp-{gather(token)[0]}"
    with _discarded(temporary, rank, gather, disk):
        together(gather, root, lambda: prepare(root, temporary, disk, fence), rank == 0)
    return temporary


def commit(
    temporary: Path,
    iteration: int,
    write: Callable[[], None],
    state: RunState,
    args: str,
    *,
    rank: int = 0,
    world_size: int = 1,
    gather: Gather = alone,
    disk: Disk = DISK,
    fence: Fence = unfenced,
) -> Path:
    """The second half of `save`: `write` returns when this rank's files are on the disk (or raises
    CheckpointError)."""
    root = temporary.parent
    # Until all ranks' tensors and the manifest are on the disk, any failure leaves the checkpoint
    # before as it was; the rename in `publish` is the moment at which the new one exists.
    with _discarded(temporary, rank, gather, disk):
        together(gather, root, write)
        together(gather, root, lambda: finish(temporary, world_size, state, args, disk), rank == 0)
    together(gather, root, lambda: publish(root, temporary, iteration, disk, fence), rank == 0)
    return iteration_directory(root, iteration)


@contextmanager
def _discarded(temporary: Path, rank: int, gather: Gather, disk: Disk) -> Iterator[None]:
    """If the block, which all ranks are in, raises a CheckpointError, remove the temporary
    directory."""
    try:
        yield
    except CheckpointError:
        if rank == 0:
            discard(temporary, disk)
        gather(None)  # nobody ends the run before that is done
        raise


def together(gather: Gather, root: Path, action: Callable[[], None], acts: bool = True) -> None:
    """Run the action if it is this rank's, and wait for all ranks; if any failed, raise its
    CheckpointError on all."""
    failure = None
    try:
        if acts:
            with explained("save in", root):
                action()
    except CheckpointError as error:
        failure = error
    answers = gather((str(failure), failure.errno) if failure else None)
    if failure:
        raise failure
    for rank, problem in enumerate(answers):
        if problem:
            raise CheckpointError(f"rank {rank}: {problem[0]}", problem[1])


def prepare(root: Path, temporary: Path, disk: Disk = DISK, fence: Fence = unfenced) -> None:
    """First step of a save, on rank 0 alone: create root and temporary directory, remove leftovers
    of killed saves."""
    fence()  # or a directory that was unmounted would be made again in its mount point
    disk.make_root(root)
    clear_leftovers(root, disk)
    disk.make_directory(temporary)


def clear_leftovers(root: Path, disk: Disk = DISK) -> None:
    """Remove what killed saves left, and restore the name of a checkpoint whose replacement was
    interrupted.

    A job that has acquired a directory calls this first: then a former owner that continues finds
    nothing to rename.
    """
    leftovers = [
        path
        for path in entries(root)
        if ASIDE.fullmatch(path.name) or _TEMPORARY.fullmatch(path.name)
    ]
    if leftovers:
        disk.fsync_directory(root)  # whatever replaced them must be durable before they go
    for path in leftovers:
        aside = ASIDE.fullmatch(path.name)
        if aside and not iteration_directory(root, int(aside[1])).exists():
            # killed in the middle of a replacement
            disk.rename(path, iteration_directory(root, int(aside[1])))
        else:
            discard(path, disk)


def write_rank_files(
    temporary: Path, rank: int, slices: Sequence[TensorSlice], iteration: int, disk: Disk = DISK
) -> None:
    """Second step, on every rank, after the first: this rank's tensors and its part of the
    manifest."""
    file = f"weights_{rank:05d}.safetensors"
    rank_manifest = sharded.write(temporary, file, slices, iteration, disk=disk)
    disk.write_file(rank_manifest_file(temporary, rank), rank_manifest.dump())


def finish(
    temporary: Path,
    world_size: int,
    state: RunState,
    args: str,
    disk: Disk = DISK,
    only: int | None = None,
) -> None:
    """Third step, on rank 0 alone, when every rank has done the second: the small files, the
    manifest last. `only`: the directory holds the part of this rank alone."""
    ranks = range(world_size) if only is None else (only,)
    manifests = [manifest.read(rank_manifest_file(temporary, rank)) for rank in ranks]
    small = {STATE: state.dump(), ARGS: args.encode()}
    records = {name: FileRecord(len(data), crc32(data)) for name, data in small.items()}
    assert manifests[0].iteration == state.iteration, (
        f"a state of iteration {state.iteration} in {temporary}"
    )
    source = str(temporary / manifest.FILE_NAME)
    merged = manifest.merge(manifests, records, source, covers=only is None)
    # Whoever sees a manifest may rely on all it lists, so it is written after everything else, and
    # those of the ranks, of which it is made, go before.
    for name, data in small.items():
        disk.write_file(temporary / name, data)
    for rank in ranks:
        disk.remove(rank_manifest_file(temporary, rank))
    disk.write_file(temporary / manifest.FILE_NAME, merged.dump())
    disk.fsync_directory(temporary)


def rank_manifest_file(temporary: Path, rank: int) -> Path:
    """The file of a rank's part of the manifest."""
    return temporary / f"manifest.rank{rank:05d}.json"


def publish(
    root: Path, temporary: Path, iteration: int, disk: Disk = DISK, fence: Fence = unfenced
) -> None:
    """Last step, on rank 0 alone: give the complete temporary directory its final name, then the
    tracker its text.

    A checkpoint of that name is swapped out in a single step where the system can. Elsewhere it is
    renamed first, and until the new one has the name, readers (and the next save) use the renamed
    one. After the fence come renames alone, of names that another job removes when it takes the
    directory over (clear_leftovers).
    """
    final = iteration_directory(root, iteration)
    tracker = root / f".{TRACKER}.tmp-{secrets.token_hex(4)}"
    old: Path | None = None
    try:
        disk.write_file(tracker, str(iteration).encode())
        fence()
        if not final.exists():
            disk.rename(temporary, final)
        elif disk.exchange(temporary, final):
            old = temporary
        else:
            old = final.with_name(f".{final.name}.old-{temporary.name.rpartition('-')[2]}")
            disk.rename(final, old)
            disk.fsync_directory(root)
            disk.rename(temporary, final)
        # The name must be durable before the tracker points to it.
        disk.fsync_directory(root)
        disk.rename(tracker, root / TRACKER)
    except CheckpointError:
        discard(tracker, disk)
        if old is None:
            discard(temporary, disk)
        raise
    disk.fsync_directory(root)
    if old is not None:
        discard(old, disk)


def discard(path: Path, disk: Disk) -> None:
    """Remove a directory or file that nobody needs; a failure is a warning, since the run can
    continue."""
    try:
        # half-removed it must never look like a checkpoint
        if _TEMPORARY.fullmatch(path.name) is None:
            iteration = ASIDE.fullmatch(path.name) or FINAL.fullmatch(path.name)
            assert iteration is not None, f"{path} is not ours"
            hidden = path.with_name(f".iter_{int(iteration[1]):07d}.tmp-{secrets.token_hex(4)}")
            disk.rename(path, hidden)
            disk.fsync_directory(path.parent)
            path = hidden
        if path.is_dir():
            disk.remove_tree(path)
        elif path.exists():
            disk.remove(path)
    except CheckpointError as error:
        log.warn_once(f"{error} (left behind; it takes space and harms nothing)")
