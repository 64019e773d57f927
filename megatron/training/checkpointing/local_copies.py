"""--non-persistent-ckpt-type local: saves each rank's part of the run on its own node, mirrored by
other ranks (--replication), and loads it."""

import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron import launcher, log
from megatron.checkpoint import file_transfer, local_copies, store
from megatron.checkpoint.file_transfer import Route
from megatron.checkpoint.filesystem import DISK, CheckpointError
from megatron.checkpoint.local_copies import LocalSave, part_folder
from megatron.checkpoint.reading import Candidate
from megatron.checkpoint.sharded import TensorSlice
from megatron.config import run_directory
from megatron.config.checkpoint import CheckpointConfig
from megatron.parallel.collectives import broadcast_object, gather_objects
from megatron.training.checkpointing.one_history import is_same_directory
from megatron.training.checkpointing.save import (
    Constants,
    PendingSave,
    begin_save,
    layout_of,
    own_tensors,
    ranks_text,
    save_directory,
)
from megatron.training.run import Run


def node_directory(c: CheckpointConfig) -> Path:
    """--non-persistent-local-ckpt-dir of this node."""
    info = launcher.info()
    node = info.rank // (info.local_world_size or info.world_size)
    assert c.non_persistent_local_ckpt_dir is not None  # local copies need it
    return Path(c.non_persistent_local_ckpt_dir.replace("%n", str(node)))


def partners(c: CheckpointConfig, rank: int, ranks_of_node: int) -> list[int]:
    """The ranks that hold the part of `rank`, itself included; each of them holds the parts of
    all."""
    if not c.replication:
        return [rank]
    jump = c.replication_jump or ranks_of_node
    block = jump * c.replication_factor
    first = rank // block * block + rank % jump
    return list(range(first, first + block, jump))


class LocalCopies:
    """The copies that a run in training makes: a target of saves."""

    def __init__(self, run: Run):
        self._run = run
        info = launcher.info()
        self._rank = run.runtime.rank
        self._ranks_of_node = info.local_world_size or info.world_size
        c = run.config.checkpoint
        self._root = Path(save_directory(c))
        self._node = node_directory(c)
        self._partners = partners(c, self._rank, self._ranks_of_node)
        self._world = file_transfer.on_cpu(run.runtime.ctx.world)
        self.start_line()

    def _gather(self, value: Any) -> list[Any]:
        return gather_objects(value, self._world)

    def _together(self, action: Callable[[], None], takes_part: bool = True) -> None:
        """Run the action on every rank that takes part; an error of one is raised on all."""
        store.together(self._gather, self._node, action, takes_part)

    def start_line(self) -> None:
        """Training continues from the current iteration: copies of another are no longer used."""
        newest: LocalSave | None = None

        def forget() -> None:
            nonlocal newest
            self._run.services.fence()
            try:
                newest = local_copies.read_newest(self._root)
            except CheckpointError:
                pass  # a new run, which no copy belongs to
            resumed = is_same_directory(self._run.config.checkpoint)
            if newest is None or not resumed or newest.iteration != self._run.progress.iteration:
                newest = LocalSave(newest.run if newest else secrets.token_hex(8))
                local_copies.write_newest(self._root, newest)

        self._together(forget, self._rank == 0)
        newest = broadcast_object(newest, self._world)
        assert newest is not None, "rank 0 has read or made it"
        self._newest = newest
        self._remove_superseded()

    def slices(self) -> list[TensorSlice]:
        """Everything that this rank holds, including what other ranks hold too."""
        return [
            TensorSlice(name, sharding.shape, tensor.dtype, box, tensor)
            for name, sharding, _, own in own_tensors(self._run)
            for box, tensor in own
        ]

    def save(self, constants: Constants) -> PendingSave | None:
        """Write a part on each rank; with --async-save only the copy in memory is made here."""
        iteration = self._run.progress.iteration
        return begin_save(
            self._run,
            constants,
            self,
            self.slices(),
            f" local copies of iteration {iteration} saved to {self._node}"
            if self._run.config.logging.is_short
            else f"  saved local copies at iteration {iteration:7d} to {self._node}",
            is_snapshot=True,
        )

    def begin(self) -> Path:
        self._new = LocalSave(
            self._newest.run,
            broadcast_object(secrets.token_hex(8), self._world),
            self._run.progress.iteration,
            ranks_text(layout_of(self._run.runtime)),
        )
        folder = self._new.folder(self._node)

        def make() -> None:
            for rank in self._partners:
                DISK.make_root(part_folder(folder, rank, self._rank))

        self._or_none(lambda: self._together(make))
        return part_folder(folder, self._rank, self._rank)

    def commit(self, pending: PendingSave, write: Callable[[], None]) -> None:
        self._or_none(lambda: self._write(pending, write))
        self._newest = self._new
        log.print_rank_0(pending.message)
        self._remove_superseded()

    def _write(self, pending: PendingSave, write: Callable[[], None]) -> None:
        """Write the own part, exchange parts with the partners; when all are on the disks, this
        save is the one that counts."""
        world_size = self._run.runtime.world_size
        self._together(write)
        self._together(
            lambda: store.finish(
                pending.temporary, world_size, pending.state, pending.args, only=self._rank
            )
        )
        self._together(lambda: self._mirror(pending.temporary.parent))

        def publish() -> None:
            self._run.services.fence()
            local_copies.write_newest(self._root, self._new)

        self._together(publish, self._rank == 0)

    def _or_none(self, action: Callable[[], None]) -> None:
        """A step of a save; if it fails, nothing of the save stays."""
        try:
            action()
        except CheckpointError:
            # that of another job, which may have taken the run over, stays
            self._remove(lambda: DISK.remove_tree(self._new.folder(self._node)))
            self._gather(None)  # no rank ends the run before this is done
            raise

    def _mirror(self, folder: Path) -> None:
        group = self._world.group
        count = len(self._partners)
        index = self._partners.index(self._rank)
        for step in range(1, count):
            to = self._partners[(index + step) % count]
            source = self._partners[(index - step) % count]
            mirror = part_folder(folder, source, self._rank)
            file_transfer.exchange(
                Route(part_folder(folder, self._rank, self._rank), to, group),
                Route(mirror, source, group),
            )
            DISK.fsync_directory(mirror)

    def _remove_superseded(self) -> None:
        """Remove what this node has of other saves than the newest."""
        run = self._node / self._newest.run
        newest = self._newest.folder(self._node)
        self._remove(lambda: local_copies.remove_superseded(run, newest))

    def _remove(self, action: Callable[[], None]) -> None:
        """On one rank of each node; a failure is a warning."""
        if self._rank % self._ranks_of_node == 0:
            try:
                action()
            except CheckpointError as error:
                log.print_line(f"WARNING: older local copies stay: {error}")

    def remove(self) -> None:
        """Remove this run's copies, since it ends with a checkpoint."""
        self._gather(None)  # all ranks have written the checkpoint
        self._remove(lambda: DISK.remove_tree(self._node / self._newest.run))


# --- loading


@dataclass(frozen=True)
class LocalCandidate(Candidate):
    """A save of which every part exists somewhere, to be tried like a checkpoint. `locations`: for
    each rank (rank that can read the part, path), the best first."""

    step: int
    run: Run
    newest: LocalSave
    locations: dict[int, list[tuple[int, str]]]

    def open(self) -> local_copies.RankCheckpoint:
        """This rank's part, fetched from another rank if it is missing or damaged here; all ranks
        call this. Raises CheckpointError on all ranks if no good copy of some part exists."""
        me = self.run.runtime.rank
        chosen, problems = self._choose()
        lost = sorted(self.locations.keys() - chosen.keys())
        if lost:
            raise CheckpointError(
                f"local copies: no rank has a good copy of the part of rank {_numbers(lost)}: "
                f"{'; '.join(problems[:3])} [local-copies-damaged]"
            )
        for text in problems:
            log.print_rank_0(f"WARNING: a local copy of iteration {self.step} is not used: {text}")
        fetched = {rank: holder for rank, (holder, _) in chosen.items() if holder != rank}
        log.print_rank_0(
            f" loading the local copies of iteration {self.step} from {self.path}"
            + "".join(
                f"; the part of rank {rank} from its mirror on rank {holder}"
                for rank, holder in sorted(fetched.items())
            )
        )
        if fetched:
            self._fetch(chosen, fetched)
        path = self._own() if me in fetched else Path(chosen[me][1])
        return local_copies.open_part(path, self.newest.save)

    def _choose(self) -> tuple[dict[int, tuple[int, str]], list[str]]:
        """For each rank the first place with a good copy of its part, and what is wrong with
        others."""
        me = self.run.runtime.rank
        chosen: dict[int, tuple[int, str]] = {}
        problems: list[str] = []
        for attempt in range(max(map(len, self.locations.values()))):
            picks = {
                rank: locations[attempt]
                for rank, locations in self.locations.items()
                if rank not in chosen and attempt < len(locations)
            }
            own = {
                rank: local_copies.verify(Path(path))
                for rank, (holder, path) in picks.items()
                if holder == me
            }
            for answers in gather_objects(own, self.run.runtime.ctx.world):
                for rank, wrong in answers.items():
                    if wrong:
                        problems.append(f"rank {picks[rank][0]}: {wrong}")
                    else:
                        chosen[rank] = picks[rank]
        return chosen, problems

    def _own(self) -> Path:
        """Where this rank's own part belongs."""
        me = self.run.runtime.rank
        return part_folder(self.newest.folder(node_directory(self.run.config.checkpoint)), me, me)

    def _fetch(self, chosen: dict[int, tuple[int, str]], fetched: dict[int, int]) -> None:
        """Send parts to the ranks that lack them."""
        me = self.run.runtime.rank
        world = file_transfer.on_cpu(self.run.runtime.ctx.world)
        own = self._own()

        def make() -> None:
            DISK.remove_tree(own)
            DISK.make_root(own)

        def bring() -> None:
            failures = []
            for rank, holder in sorted(fetched.items()):
                try:
                    if me == rank:
                        file_transfer.exchange(None, Route(own, holder, world.group))
                    elif me == holder:
                        path = Path(chosen[rank][1])
                        file_transfer.exchange(Route(path, rank, world.group), None)
                except CheckpointError as error:
                    failures.append(error)
            if failures:
                raise failures[0]

        def gather(value: Any) -> list[Any]:
            return gather_objects(value, world)

        store.together(gather, own, make, me in fetched)
        store.together(gather, own, bring)


def with_local_copies(run: Run, tries: list[Candidate], c: CheckpointConfig) -> list[Candidate]:
    """`tries`, and the newest save in local copies of the run in --load, the newest first; all
    ranks call this."""
    assert c.load is not None and c.non_persistent_local_ckpt_dir is not None
    if c.ckpt_step is not None or c.finetune or run_directory.is_checkpoint(Path(c.load)):
        return tries
    world = run.runtime.ctx.world
    newest: LocalSave | None = None
    if run.runtime.rank == 0:
        try:
            newest = local_copies.read_newest(Path(c.load))
        except CheckpointError as error:
            log.warn_once(str(error))
    newest = gather_objects(newest, world)[0]
    if newest is None or not newest.save:
        return tries
    parts: list[tuple[int, int, str]] = []
    problem: str | None = None
    try:
        parts = local_copies.parts_in(newest.folder(node_directory(c)))
    except CheckpointError as error:
        problem = str(error)
    listed = gather_objects((socket.gethostname(), parts, problem), world)
    for text in dict.fromkeys(text for _, _, text in listed if text):
        log.print_rank_0(f"WARNING: local copies are not used: {text}")
    locations = _locations([(host, parts) for host, parts, _ in listed])
    if unusable := _unusable(newest, locations, run):
        if all(from_disk.step is None or from_disk.step < newest.iteration for from_disk in tries):
            log.print_rank_0(
                f" local copies of iteration {newest.iteration} are not used: {unusable}"
            )
        return tries
    path = c.non_persistent_local_ckpt_dir
    copies = LocalCandidate(path, newest.iteration, run, newest, locations)
    # of the same iteration the checkpoint first
    return sorted([*tries, copies], key=lambda candidate: -(candidate.step or 0))


def _locations(
    listed: Sequence[tuple[str, Sequence[tuple[int, int, str]]]],
) -> dict[int, list[tuple[int, str]]]:
    """For each rank's part (rank that can read it, path), its own rank first. A directory that
    several ranks of a host see counts once: as one of the rank whose part it is if that is among
    them, else of the one that wrote it, else of the first."""
    readers: dict[tuple[str, str], tuple[bool, bool, int, int]] = {}
    for reader, (host, parts) in enumerate(listed):
        for rank, holder, path in parts:
            option = reader != rank, reader != holder, reader, rank
            readers[host, path] = min(option, readers.get((host, path), option))
    locations: dict[int, list[tuple[int, str]]] = {}
    for (_, path), (_, _, reader, rank) in sorted(readers.items(), key=lambda item: item[1]):
        locations.setdefault(rank, []).append((reader, path))
    return locations


def _unusable(
    newest: LocalSave, locations: dict[int, list[tuple[int, str]]], run: Run
) -> str | None:
    """Why a save cannot be loaded; None if it can be tried."""
    ranks = ranks_text(layout_of(run.runtime))
    if newest.ranks != ranks:
        return f"they were written by {newest.ranks}, this run has {ranks}"
    missing = sorted(set(range(run.runtime.world_size)) - locations.keys())
    return f"the part of rank {_numbers(missing)} was not found" if missing else None


def _numbers(ranks: Sequence[int]) -> str:
    shown = [*map(str, ranks[:8]), *["..."] * (len(ranks) > 8)]
    return ", ".join(shown)
