"""Finds the checkpoint that a path means, and reads all of it but the tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint import manifest, state_reader
from megatron.checkpoint.filesystem import CheckpointError, explained
from megatron.checkpoint.manifest import Manifest
from megatron.checkpoint.sharded_reader import Reader
from megatron.checkpoint.state import RunState
from megatron.checkpoint.store import ASIDE
from megatron.checksums import crc32
from megatron.config.load_order import tries
from megatron.config.run_directory import (
    ARGS,
    FINAL,
    STATE,
    TRACKER,
    ForeignCheckpoint,
    complete_here,
    entries,
    iteration_directory,
    latest,
    read_small_file,
)
from megatron.small_files import path_inside

_FOREIGN = ("mp_rank_00", "mp_rank_00_000", "metadata.json", ".metadata")


@dataclass(frozen=True)
class Checkpoint:
    """One complete checkpoint: its directory, checked manifest, run state and the text of its args
    file."""

    directory: Path
    manifest: Manifest
    state: RunState
    args: str

    @property
    def iteration(self) -> int:
        """Iterations done when it was saved."""
        return self.manifest.iteration

    def reader(self) -> Reader:
        """A reader of its tensors; use it in a `with`."""
        return Reader(self.directory, self.manifest)


def resolve(path: Path | str, step: int | None = None) -> Path | None:
    """The directory of the checkpoint that `path` means: a run directory, an iter_XXXXXXX in one,
    or a copy of such.

    Without `step` a run directory means what its tracker names, and None where it has no tracker.
    Raises CheckpointError where the checkpoint asked for is not there or not one of ours.
    """
    path = Path(path)
    match = FINAL.fullmatch(path.name)
    if match:
        if step is not None and step != int(match[1]):
            raise CheckpointError(
                f"{path} is iteration {int(match[1])}, but iteration {step} is requested; use "
                f"--load {path.parent} or omit --ckpt-step [checkpoint-step-missing]"
            )
        root = path.parent
        iteration = int(match[1])
    elif (path / manifest.FILE_NAME).is_file():
        if step is not None:
            raise CheckpointError(
                f"{path} is one checkpoint, not a run directory: omit --ckpt-step {step} "
                "[flags-exclude-each-other]"
            )
        return path
    else:
        root = path
        requested = latest(path) if step is None else step
        if requested is None:
            return None
        iteration = requested
    final = iteration_directory(root, iteration)
    if (final / manifest.FILE_NAME).is_file():
        return final
    if not final.exists():
        for aside in entries(root):  # see publish
            renamed = ASIDE.fullmatch(aside.name)
            if renamed and int(renamed[1]) == iteration and (aside / manifest.FILE_NAME).is_file():
                return aside
    raise _why_not(root, final, step is None and not match)


def _why_not(root: Path, final: Path, from_tracker: bool) -> CheckpointError:
    """Why `final` cannot be loaded and what to do."""
    names = [name for name in _FOREIGN if (final / name).exists()]
    if names:
        return ForeignCheckpoint(
            f"{final} holds {names[0]} and no {manifest.FILE_NAME}: it was written by "
            "Megatron-LM, whose pickled checkpoints are not loaded directly; "
            f"{complete_here(root)} [checkpoint-of-another-suite]"
        )
    reason = (
        f"has no {manifest.FILE_NAME}, so it is not complete"
        if final.exists()
        else "does not exist"
    )
    origin = f", though {TRACKER} names it" if from_tracker else ""
    return CheckpointError(
        f"{final} {reason}{origin}; choose another one with --ckpt-step ({complete_here(root)}) "
        "[checkpoint-incomplete]"
    )


def read_metadata(directory: Path | str) -> Checkpoint:
    """Everything but the tensors of the checkpoint in `directory` (as resolve returns it), checked.

    The lengths of all its files are compared with the manifest too. Raises CheckpointError naming
    the file.
    """
    directory = Path(directory)
    table = manifest.read(directory / manifest.FILE_NAME)
    match = FINAL.fullmatch(directory.name) or ASIDE.fullmatch(directory.name)
    if match and int(match[1]) != table.iteration:
        raise CheckpointError(
            f"{table.source} is of iteration {table.iteration}, not of {directory.name}: the "
            "directory was renamed; give it its old name [checkpoint-renamed]"
        )
    for name, record in table.files.items():
        path = directory / name
        with explained("read", path):
            length = path_inside(directory, name).stat().st_size
        if length != record.bytes:
            raise CheckpointError(
                f"{path} has {length} bytes, should have {record.bytes}; the checkpoint is "
                "damaged: use another one [checkpoint-damaged]"
            )
    texts = {}
    for name in (STATE, ARGS):
        if name not in table.files:
            raise CheckpointError(
                f"{table.source} does not list {name}; the checkpoint is damaged: use another one "
                "[checkpoint-damaged]"
            )
        texts[name] = read_small_file(directory / name)
        if crc32(texts[name]) != table.files[name].crc32:
            raise CheckpointError(
                f"{directory / name}: checksum {crc32(texts[name])}, should be "
                f"{table.files[name].crc32}; the checkpoint is damaged: use another one "
                "[checkpoint-damaged]"
            )
    state = state_reader.parse(texts[STATE], str(directory / STATE))
    if state.iteration != table.iteration:
        raise CheckpointError(
            f"{directory / STATE} is of iteration {state.iteration}, the manifest of "
            f"{table.iteration}; the checkpoint is damaged: use another one [checkpoint-damaged]"
        )
    return Checkpoint(directory, table, state, texts[ARGS].decode(errors="replace"))


def load(path: Path | str, step: int | None = None) -> Checkpoint | None:
    """resolve and read_metadata in one: the checkpoint that `path` means, or None where a run
    directory has none."""
    directory = resolve(path, step)
    return None if directory is None else read_metadata(directory)


@dataclass(frozen=True)
class Candidate:
    """A checkpoint to try: iteration `step` of the run directory `path`, or, with None, the one
    directory `path` is."""

    path: str
    step: int | None

    def open(self) -> Checkpoint:
        """Its checked metadata. Raises CheckpointError."""
        checkpoint = load(self.path, self.step)
        assert checkpoint is not None, f"{self.path} is a run directory"
        return checkpoint


def candidates(
    path: Path | str, step: int | None = None, snapshots: Sequence[Path] = ()
) -> tuple[list[Candidate], list[str]]:
    """As `tries`."""
    listed, problems = tries(path, step, snapshots)
    return [Candidate(*each) for each in listed], problems
