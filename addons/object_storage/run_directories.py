"""Run directories in object stores (s3://bucket/path): downloaded before a run, uploaded while it
trains.

A run saves into a directory of a local disk, the staging directory. A process of its own uploads
the checkpoint that the tracker there names: file by file, each read back and compared, the
manifest behind the tensors, the tracker last. So what the tracker in the store names is whole.
`skips.jsonl` goes with them. The two slots of snapshots are run directories of their own.
"""

from __future__ import annotations

import itertools
import re
import secrets
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from megatron import log
from megatron.checkpoint import manifest, retention, skip_log, state_reader, store
from megatron.checkpoint.filesystem import DISK, CheckpointError, explained
from megatron.checkpoint.helper_process import SideProcess
from megatron.config import history, run_directory
from megatron.config.command_line import CommandLine
from megatron.config.history import History
from megatron.config.run_directory import RunDirectory, slots
from megatron.small_files import path_inside, read_bytes

from . import object_stores

TRIES = 5
WAITS = 1.0  # seconds before the second try, twice as long before each further one
LOOKS = 1.0  # seconds between two looks at the staging directory
BLOCK_BYTES = 16 << 20


class Remote:
    """A run directory in a store. Raises ValueError for a URL that cannot be used here."""

    def __init__(self, url: str):
        self.url = url
        self.files, self._root = object_stores.open_store(url)

    def __str__(self) -> str:
        return self.url

    def latest(self) -> int | None:
        """The iteration that the tracker in the store names, None without one. Raises
        CheckpointError."""
        path = f"{self._root}/{store.TRACKER}"
        try:
            text = self._patiently("read", store.TRACKER, lambda: self.files.cat_file(path))
        except FileNotFoundError:
            return None
        if not re.fullmatch(rb"[0-9]{1,18}\s*", text):
            raise CheckpointError(
                f"{self.url}/{store.TRACKER} holds {text[:40]!r}, not an iteration "
                "[checkpoint-tracker-malformed]"
            )
        return int(text)

    def histories(self) -> dict[int, History | None]:
        """Of its complete checkpoints; None where one cannot be read. Raises CheckpointError."""
        found = {}
        for path in self._patiently("list", "it", self._checkpoints):
            iteration = int(path.rpartition("_")[2])
            if self.files.exists(f"{path}/{manifest.FILE_NAME}"):
                found[iteration] = self.history(iteration)
        return found

    def history(self, iteration: int) -> History | None:
        """Of one checkpoint; None where it cannot be read. Raises CheckpointError."""
        name = f"{store.iteration_directory('', iteration)}/{store.STATE}"
        try:
            text = self._patiently(
                "read", name, lambda: self.files.cat_file(f"{self._root}/{name}")
            )
            return History.parse(state_reader.parse(text, name).history)
        except (FileNotFoundError, CheckpointError, TypeError):
            return None

    def newest(self) -> int | None:
        """The iteration of the complete checkpoint that was saved last, whatever the tracker says;
        None without one. Raises CheckpointError."""
        found = self.histories()
        return max(found, key=lambda n: (own.number if (own := found[n]) else 0, n), default=None)

    def set_aside(self, iterations: Sequence[int], suffix: str) -> Iterator[str]:
        """Rename checkpoints, and with them the records of skipped iterations, so that nothing
        loads them; yields each name. Raises CheckpointError."""
        names = [store.iteration_directory("", n).name for n in iterations]
        if names:
            self.delete([store.TRACKER])
            names += [name for name in self.names() if name == skip_log.FILE_NAME]
        for name in names:
            source = f"{self._root}/{name}"
            target = next(
                target
                for n in itertools.count(1)
                if not self.files.exists(target := f"{source}.{suffix}{f'-{n}' if n > 1 else ''}")
            )
            self._patiently(
                "rename",
                name,
                lambda source=source, target=target: self.files.mv(source, target, recursive=True),
            )
            yield name

    def upload(self, staging: Path, iteration: int) -> None:
        """Upload a checkpoint, then the tracker; files that the store already has are only
        compared.

        Raises CheckpointError if the store fails, FileNotFoundError if the checkpoint is removed
        meanwhile.
        """
        directory = store.iteration_directory(staging, iteration)
        names = sorted(
            (path.name for path in directory.iterdir()),
            key=lambda name: (name == manifest.FILE_NAME, name),
        )
        if manifest.FILE_NAME not in names:
            raise FileNotFoundError(f"{directory} is no longer complete")
        for name in names:
            target = f"{directory.name}/{name}"
            self._patiently(
                "upload",
                target,
                lambda name=name, target=target: self.put(directory / name, target),
            )
        self._patiently(
            "write",
            store.TRACKER,
            lambda: self.files.pipe_file(f"{self._root}/{store.TRACKER}", str(iteration).encode()),
        )

    def keep_only(self, iteration: int) -> None:
        """Remove all checkpoints but that of `iteration`. Raises CheckpointError."""
        current = store.iteration_directory(Path(), iteration).name
        for path in self._patiently("list", "the slot", self._checkpoints):
            if path.rpartition("/")[2] != current:
                self._patiently("remove", path, lambda path=path: self._remove(path))

    def _checkpoints(self) -> list[str]:
        self.files.invalidate_cache()
        try:
            listing = self.files.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        paths = [path.rstrip("/") for path in listing]
        return [path for path in paths if re.fullmatch(r"iter_\d+", path.rpartition("/")[2])]

    def _remove(self, path: str) -> None:
        try:
            self.files.rm(path, recursive=True)
        except FileNotFoundError:
            pass

    def bring_skips(self, staging: Path) -> None:
        """Merge the records of skipped iterations of the store and of the staging directory in the
        latter, those of the store first.

        Raises CheckpointError.
        """
        try:
            text = self._patiently(
                "read",
                skip_log.FILE_NAME,
                lambda: self.files.cat_file(f"{self._root}/{skip_log.FILE_NAME}"),
            )
        except FileNotFoundError:
            return
        stored = text.decode(errors="replace").splitlines()
        local = skip_log.read(staging)[0]
        in_store = set(stored)
        # otherwise the store has nothing that is not here
        if local[: len(stored)] != stored:
            skip_log.write(staging, [*stored, *(line for line in local if line not in in_store)])

    def upload_skips(self, staging: Path) -> None:
        """Upload the records of skipped iterations, if there are any. Raises CheckpointError."""
        path = staging / skip_log.FILE_NAME
        if path.exists():
            self.send(path)

    def put(self, path: Path, target: str) -> None:
        if not self._is_same(path, target):
            self.files.put_file(str(path), f"{self._root}/{target}")
            if not self._is_same(path, target):
                raise OSError("what was uploaded is not what the store gives back")

    def _is_same(self, path: Path, target: str) -> bool:
        """Is the file in the store, every byte the same?"""
        self.files.invalidate_cache()
        try:
            if self.files.info(f"{self._root}/{target}")["size"] != path.stat().st_size:
                return False
            with (
                path.open("rb") as local,
                self.files.open(f"{self._root}/{target}", "rb", block_size=BLOCK_BYTES) as remote,
            ):
                while chunk := local.read(BLOCK_BYTES):
                    if remote.read(len(chunk)) != chunk:
                        return False
        except FileNotFoundError:
            if not path.exists():
                raise
            return False
        return True

    def names(self) -> list[str]:
        """Names of the files in it, none where it is missing. Raises CheckpointError."""
        try:
            return self._patiently("list", "it", lambda: self._names_in(self._root))
        except FileNotFoundError:
            return []

    def _names_in(self, path: str) -> list[str]:
        self.files.invalidate_cache()
        listing = self.files.ls(path, detail=True)
        files = (entry["name"].rpartition("/")[2] for entry in listing if entry["type"] == "file")
        return sorted(filter(None, files))  # "" is the folder itself

    def get(self, name: str, folder: Path) -> None:
        """Download one file. Raises CheckpointError, FileNotFoundError."""
        with explained("fetch", f"{self.url}/{name}"):
            path = path_inside(folder, name)
        self._get(name, path)

    def _get(self, source: str, path: Path) -> None:
        self._patiently(
            "fetch", source, lambda: self.files.get_file(f"{self._root}/{source}", str(path))
        )

    def send(self, path: Path) -> None:
        """Upload one file under its name, read it back and compare. Raises CheckpointError."""
        self._patiently("upload", path.name, lambda: self.put(path, path.name))

    def facts(self, name: str) -> dict[str, Any]:
        """Size of a file in the store, and a value that changes with its content. Raises
        CheckpointError, FileNotFoundError."""
        self.files.invalidate_cache()
        info = self._patiently("look at", name, lambda: self.files.info(f"{self._root}/{name}"))
        return object_stores.facts(info)

    def read(self, name: str, start: int, length: int) -> bytes:
        """`length` bytes of a file from byte `start` on. Thread-safe. Raises CheckpointError, also
        for a store that gives more or less; FileNotFoundError."""

        if not length:
            return b""
        path = f"{self._root}/{name}"
        return self._patiently(
            "read", name, lambda: object_stores.read_range(self.files, path, start, length)
        )

    def delete(self, names: Sequence[str]) -> None:
        """Remove files, in this order. Raises CheckpointError."""
        for name in names:
            self._patiently("remove", name, lambda name=name: self._remove(f"{self._root}/{name}"))

    def fetch(self, iteration: int, staging: Path, as_newest: bool) -> None:
        """Download a checkpoint atomically; `as_newest`: the tracker of `staging` then names it.

        Its bytes are checked when it is loaded. Raises CheckpointError.
        """
        final = store.iteration_directory(staging, iteration)
        temporary = final.with_name(f".{final.name}.tmp-{secrets.token_hex(4)}")
        names = self._patiently(
            "list", final.name, lambda: self._names_in(f"{self._root}/{final.name}")
        )
        with explained("fetch", f"{self.url}/{final.name}"):
            paths = {f"{final.name}/{name}": path_inside(temporary, name) for name in names}
        DISK.make_root(temporary)
        for source, path in paths.items():
            self._get(source, path)
        if as_newest:
            store.publish(staging, temporary, iteration)
        else:
            DISK.rename(temporary, final)

    def _patiently(self, verb: str, name: str, action: Any) -> Any:
        """Call it, up to TRIES times if the store fails. Raises CheckpointError then."""
        try:
            return object_stores.patiently(action, [WAITS * 2**n for n in range(TRIES - 1)])
        except object_stores.StoreFailed as error:
            raise CheckpointError(
                f"cannot {verb} {name} in {self.url}, {error} [object-store-failed]"
            ) from error.__cause__


def fetch_for(line: CommandLine) -> None:
    """What --load and --snapshot-dir name in an object store. Raises CheckpointError and
    ValueError."""
    c = line.config.checkpoint
    if line.load_url and c.load:
        fetch(line.load_url, c.load, c.ckpt_step, required=line.load_url != line.save_url)
    if line.snapshot_url and c.snapshot_dir and c.load and c.ckpt_step is None:
        fetch_snapshot(line.snapshot_url, c.snapshot_dir, c.load)


def uploading_for(line: CommandLine) -> AbstractContextManager[None]:
    """Upload what a run saves, if it belongs in an object store."""
    c = line.config.checkpoint
    assert c.save is not None, "the run saves"
    snapshots = c.snapshot_dir if c.snapshot_interval else None
    return uploading(upload_targets(c.save, line.save_url, snapshots, line.snapshot_url))


def foreign(line: CommandLine, own: History | None) -> Iterator[tuple[Remote, Sequence[int]]]:
    """(Run directory in an object store to which a run saves, what that holds of other histories
    than `own`)."""
    places = [(line.save_url, "")] + [(line.snapshot_url, f"/{slot}") for slot in "01"]
    for url, below in places:
        if url:
            remote = Remote(url + below)
            theirs = remote.histories()
            yield remote, history.foreign(own, theirs) if own else [n for n in theirs if n]


def fetch(url: str, staging: str, step: int | None = None, required: bool = False) -> None:
    """Have the newest checkpoint of `url` (or that of iteration `step`) in the staging directory,
    if it is not there, and the records of skipped iterations.

    A newer one there that continues it and is not uploaded yet stays the newest. With none in
    either place a `required` one is missed. Raises CheckpointError and ValueError.
    """
    remote = Remote(url)
    remote.bring_skips(Path(staging))
    iteration = remote.latest() if step is None else step
    if iteration is None:
        iteration = remote.newest()
        if iteration is not None:
            log.warn_once(
                f"{url}/{store.TRACKER} is missing: iteration {iteration}, the checkpoint saved "
                "last, is used [checkpoint-tracker-missing]"
            )
    if iteration is None:
        if required and run_directory.latest(staging) is None:
            raise CheckpointError(
                f"--load {url}: no checkpoint of this suite there ({store.TRACKER} is missing); "
                "give the URL that --save named, give --save the same URL (then a first run "
                "starts from random weights), or omit --load [checkpoint-missing]"
            )
        return
    here = RunDirectory(staging).histories
    local = run_directory.latest(staging)
    newest = max(iteration, local or 0) if step is None and local in here else iteration
    if newest in here:
        own, there = here[newest], remote.history(iteration)
        if not (own and own.branches and there and there.branches):
            return
        if there == own if newest == iteration else there.leads_to(own):
            return
    log.print_rank_0(f" fetching the checkpoint of iteration {iteration} from {url} to {staging}")
    try:
        remote.fetch(iteration, Path(staging), as_newest=step is None)
    except FileNotFoundError:
        raise CheckpointError(
            f"{url} has no checkpoint of iteration {iteration}; choose another one with "
            "--ckpt-step [checkpoint-step-missing]"
        ) from None


def fetch_snapshot(url: str, staging: str, load: str) -> None:
    """Have those of the two snapshots of `url` in their slots of the staging directory that are
    newer than what that and the run directory `load` hold: one of them may be of a branch that was
    left. Raises CheckpointError and ValueError.
    """
    if run_directory.is_checkpoint(Path(load)):
        return
    local = map(retention.newest_in, (Path(load), *slots(staging)))
    last = max((iteration for iteration in local if iteration is not None), default=-1)
    for slot in slots(staging):
        remote = Remote(f"{url}/{slot.name}")
        stored = remote.latest()
        if stored is not None and stored > last:
            log.print_rank_0(
                f" fetching the snapshot of iteration {stored} from {url} to {staging}"
            )
            remote.fetch(stored, slot, as_newest=True)


@dataclass(frozen=True)
class UploadTarget:
    """A run directory that is uploaded: `flag` named its URL. One that `is_slot` has one
    checkpoint, a snapshot."""

    flag: str
    staging: Path
    url: str
    is_slot: bool = False


def upload_targets(
    save: str, save_url: str | None, snapshots: str | None, snapshot_url: str | None
) -> list[UploadTarget]:
    """What is uploaded of a run that saves to `save` and has its snapshots in the directory
    `snapshots`, if it has."""
    targets = [UploadTarget("--save", Path(save), save_url)] if save_url else []
    if snapshots and snapshot_url:
        targets += [
            UploadTarget("--snapshot-dir", slot, f"{snapshot_url}/{slot.name}", is_slot=True)
            for slot in slots(snapshots)
        ]
    return targets


class Uploader:
    """The process that uploads what is saved in `targets`, and the end of it that the run holds."""

    def __init__(self, targets: Sequence[UploadTarget]):
        # ... and says what is wrong before anything is done
        for target in targets:
            remote = Remote(target.url)
            if not target.is_slot:
                remote.bring_skips(target.staging)
        self._name = f"{targets[0].flag} {targets[0].url}"
        self._process = SideProcess(lambda pipe: _serve(pipe, targets))

    def finish(self) -> None:
        """Wait until the newest checkpoint is in the store. Raises CheckpointError if it cannot be
        uploaded."""
        try:
            self._process.pipe.send(None)
            failure = self._process.pipe.recv()
        except (EOFError, OSError):
            self._process.wait()
            failure = (
                f"{self._name}: the process that uploads has died (exit code "
                f"{self._process.exit_code})"
            )
        if failure:
            raise CheckpointError(
                f"{failure}; the checkpoint is safe in the staging directory, and the same "
                "command uploads it"
            )

    def close(self) -> None:
        """End the process; what is not uploaded is uploaded by the next run."""
        self._process.close()


@contextmanager
def uploading(targets: Sequence[UploadTarget]) -> Iterator[None]:
    """During the block, upload what is saved in `targets`, if there are any; wait for it at the
    end."""
    uploader = Uploader(targets) if targets else None
    try:
        yield
        if uploader:
            uploader.finish()
    finally:
        if uploader:
            uploader.close()


def _serve(pipe: Connection, targets: Sequence[UploadTarget]) -> None:
    """The process: upload until the run says that it is over. What remains of a failure to save is
    sent at the end."""
    uploads = [_Upload(target) for target in targets]
    over = False
    while not over:
        over = pipe.poll(LOOKS) and pipe.recv() is None
        for upload in uploads:
            before = upload.failure
            upload.bring()
            if upload.failure and upload.failure != before and (upload.target.is_slot or not over):
                suffix = "" if over else "; it is tried again, training continues"
                print(f"WARNING: {upload.failure}{suffix}", file=sys.stderr, flush=True)
    pipe.send(
        next(
            (upload.failure for upload in uploads if upload.failure and not upload.target.is_slot),
            None,
        )
    )


class _Upload:
    """One place while it is uploaded: what is there, and why the newest is not."""

    def __init__(self, target: UploadTarget):
        self.target = target
        self.failure: str | None = None
        self._remote = Remote(target.url)
        self._records = b""
        try:
            # what its tracker names was compared when it was uploaded
            self._uploaded = self._remote.latest()
        except CheckpointError:
            self._uploaded = None

    def bring(self) -> None:
        """Upload what is new here."""
        self.failure = None
        for action in (self._bring_newest, self._bring_skips):
            try:
                action()
            except (CheckpointError, OSError) as error:
                self.failure = self.failure or f"{self.target.flag} {self.target.url}: {error}"

    def _bring_skips(self) -> None:
        """Upload the records of skipped iterations if they have changed since the last upload.
        Snapshots have none."""
        path = self.target.staging / skip_log.FILE_NAME
        records = read_bytes(path) if path.exists() else b""
        if records != self._records:
            self._remote.upload_skips(self.target.staging)
            self._records = records

    def _bring_newest(self) -> None:
        """Upload the checkpoint that the tracker names, unless it is uploaded already."""
        newest = run_directory.latest(self.target.staging)
        if newest is None or newest == self._uploaded:
            return
        try:
            self._remote.upload(self.target.staging, newest)
        except FileNotFoundError as error:
            directory = store.iteration_directory(self.target.staging, newest)
            if not (directory / manifest.FILE_NAME).exists():
                return  # removed before it was uploaded: a newer one is there
            raise CheckpointError(
                f"cannot upload {directory.name}: the store says that there is no such place "
                f"({error}); make the bucket first [object-store-failed]"
            ) from None
        self._uploaded = newest
        if self.target.is_slot:
            self._remote.keep_only(newest)
