"""--non-persistent-ckpt-type local: saves each rank's part of the run on its own node, mirrored by
other ranks (--replication), and loads it."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron import launcher, log
from megatron.checkpoint import file_transfer, local_copies, store
from megatron.checkpoint.candidates import Candidate
from megatron.checkpoint.file_transfer import Route
from megatron.checkpoint.filesystem import DISK, CheckpointError, explained
from megatron.checkpoint.local_copies import Copy, Found, part_root
from megatron.checkpoint.manifest import Manifest
from megatron.checkpoint.sharded import TensorSlice
from megatron.checkpoint.state import RunState
from megatron.config import saved_flags
from megatron.config.checkpoint import CheckpointConfig
from megatron.parallel.collectives import all_reduce_, broadcast_object, gather_objects
from megatron.training.checkpointing.save import (
    PendingSave,
    layout_of,
    own_tensors,
    ranks_text,
    save_directory,
    state_of,
)
from megatron.training.run import Run


def node_directory(c: CheckpointConfig) -> Path:
    """--non-persistent-local-ckpt-dir of this node."""
    here = launcher.info()
    node = here.rank // (here.local_world_size or here.world_size)
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


def all_slices(run: Run) -> list[TensorSlice]:
    """Everything that this rank holds, including what other ranks hold too."""
    return [
        TensorSlice(name, sharding.shape, tensor.dtype, box, tensor)
        for name, sharding, _, own in own_tensors(run)
        for box, tensor in own
    ]


class LocalCopies:
    """The copies that a run in training makes."""

    def __init__(self, run: Run):
        self._run = run
        here = launcher.info()
        self._rank = run.runtime.rank
        self._ranks_of_node = here.local_world_size or here.world_size
        c = run.config.checkpoint
        self._directory = node_directory(c)
        self._partners = partners(c, self._rank, self._ranks_of_node)
        self._world = file_transfer.on_cpu(run.runtime.ctx.world)
        self.start_line()

    def _gather(self, value: Any) -> list[Any]:
        return gather_objects(value, self._world)

    def _together(self, action: Callable[[], None]) -> None:
        """Run the action on every rank; an error of one is raised on all."""
        failure: CheckpointError | None = None
        try:
            with explained("save in", self._directory):
                action()
        except CheckpointError as error:
            failure = error
        failed = torch.tensor(failure is not None, dtype=torch.int32)
        if all_reduce_(failed, self._world, "max"):
            store.together(self._gather, self._directory, lambda: _raise(failure))

    def start_line(self) -> None:
        """Training continues from the current iteration: copies of later iterations are no longer
        used."""
        root = Path(save_directory(self._run.config.checkpoint))

        added: list[local_copies.Line] = []

        def add() -> None:
            if self._rank == 0:
                self._run.services.fence()
                added.append(local_copies.add_line(root, self._run.progress.iteration))

        self._together(add)
        self._line = broadcast_object(added, self._world)[0]
        self._folder = self._directory / self._line.run

    def slices(self) -> list[TensorSlice]:
        """What this rank's part consists of."""
        return all_slices(self._run)

    def save(self) -> PendingSave | None:
        """Write a part on each rank; with --async-save only the copy in memory is made here."""
        run = self._run
        iteration = run.progress.iteration
        state = state_of(run)
        roots = [part_root(self._folder, one, self._rank) for one in self._partners]
        folders: dict[int, Path] = {}

        begun: list[tuple[str, bytes, str]] = []

        def begin() -> None:
            for rank, root in zip(self._partners, roots, strict=True):
                folders[rank] = store.begin(root, iteration)
            if self._rank == 0:
                args = saved_flags.to_text(run.config, leave_out=("local_rank",))
                begun.append((secrets.token_hex(8), state.dump(), args))

        self._together(begin)
        save, dumped, args = broadcast_object(begun, self._world)[0]
        copy = Copy(self._line.line, save, iteration, self._rank, layout_of(run.runtime))
        message = (
            f" local copies of iteration {iteration} saved to {self._directory}"
            if run.config.logging.is_short
            else f"  saved local copies at iteration {iteration:7d} to {self._directory}"
        )
        own = folders[self._rank]
        slices = self.slices()
        writer = run.services.writer

        def finish(write: Callable[[], Manifest]) -> None:
            self._finish(
                folders,
                lambda: local_copies.finish_part(own, write(), dumped, args, copy),
                iteration,
                message,
            )

        if writer is None:
            finish(lambda: store.write_tensors(own, self._rank, slices, iteration))
            return None

        def written() -> Manifest:
            writer.result()
            return local_copies.taken_manifest(own, self._rank)

        writer.start(slices, own, self._rank, iteration, run.runtime.device)
        log.detail(f"  scheduled async local copies at iteration {iteration:7d}")
        state = RunState.parse(dumped, "the run")
        return PendingSave(own, iteration, state, args, message, True, lambda: finish(written))

    def _finish(
        self, folders: dict[int, Path], write: Callable[[], None], iteration: int, message: str
    ) -> None:
        """Write the own part, exchange parts with the partners and give all their final names; then
        remove the older ones."""
        try:
            self._together(write)
            self._together(lambda: self._mirror(folders))
        except CheckpointError:
            for folder in folders.values():
                store.discard(folder, DISK)
            self._gather(None)  # no rank ends the run before this is done
            raise
        self._together(lambda: self._publish(folders.values(), iteration))
        log.print_rank_0(message)
        self._remove_others(iteration)

    def _mirror(self, folders: dict[int, Path]) -> None:
        own = folders[self._rank]
        count = len(self._partners)
        place = self._partners.index(self._rank)
        for step in range(1, count):
            to = self._partners[(place + step) % count]
            source = self._partners[(place - step) % count]
            file_transfer.exchange(
                Route(own, to, self._world.group),
                Route(folders[source], source, self._world.group),
            )
            DISK.fsync_directory(folders[source])
        if self._rank == 0:
            self._run.services.fence()

    def _publish(self, folders: Iterable[Path], iteration: int) -> None:
        for folder in folders:
            store.publish(folder.parent, folder, iteration)

    def _is_mine(self, holder: int) -> bool:
        """Whether this rank removes what `holder` wrote: itself or, on the first rank of a node, a
        rank that no longer exists."""
        first = self._rank // self._ranks_of_node * self._ranks_of_node
        others = range(first, first + self._ranks_of_node)
        return holder == self._rank or self._rank == first and holder not in others

    def _remove_others(self, iteration: int | None) -> None:
        try:
            local_copies.remove_others(self._folder, self._is_mine, iteration)
        except CheckpointError as error:
            log.print_line(f"WARNING: older local copies stay: {error}")

    def remove(self) -> None:
        """Remove this run's copies, since it ends with a checkpoint."""
        self._gather(None)  # all ranks have written the checkpoint
        self._remove_others(None)


def _raise(failure: CheckpointError | None) -> None:
    if failure:
        raise failure


# --- loading


@dataclass(frozen=True)
class LocalCandidate(Candidate):
    """A save of which every part exists somewhere, to be tried like a checkpoint. `places`: for
    each rank (rank that can read the part, path), the best first."""

    step: int
    run: Run
    save: str
    places: dict[int, list[tuple[int, str]]]
    copy: Copy
    run_id: str

    def open(self) -> local_copies.Part:
        """This rank's part, fetched from another rank if it is missing or damaged here; all ranks
        call this. Raises CheckpointError on all ranks if no good copy of some part exists."""
        me = self.run.runtime.rank
        chosen, problems = self._choose()
        lost = sorted(self.places.keys() - chosen.keys())
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
        path = Path(chosen[me][1])
        if fetched:
            path = self._fetch(chosen, fetched)
        return local_copies.open_part(path, self.save)

    def _choose(self) -> tuple[dict[int, tuple[int, str]], list[str]]:
        """For each rank the first place with a good copy of its part, and what is wrong with
        others."""
        me = self.run.runtime.rank
        chosen: dict[int, tuple[int, str]] = {}
        problems: list[str] = []
        for attempt in range(max(map(len, self.places.values()))):
            picks = {
                rank: places[attempt]
                for rank, places in self.places.items()
                if rank not in chosen and attempt < len(places)
            }
            mine = {
                rank: local_copies.verify(Path(path))
                for rank, (holder, path) in picks.items()
                if holder == me
            }
            for answers in gather_objects(mine, self.run.runtime.ctx.world):
                for rank, wrong in answers.items():
                    if wrong:
                        problems.append(f"rank {picks[rank][0]}: {wrong}")
                    else:
                        chosen[rank] = picks[rank]
        return chosen, problems

    def _fetch(self, chosen: dict[int, tuple[int, str]], fetched: dict[int, int]) -> Path:
        """Send parts to the ranks that lack them; returns the path of this rank's."""
        me = self.run.runtime.rank
        world = self.run.runtime.ctx.world
        group = file_transfer.on_cpu(world).group
        directory = node_directory(self.run.config.checkpoint)
        root = part_root(directory / self.run_id, me, me)

        def gather(value: Any) -> list[Any]:
            return gather_objects(value, world)

        def bring() -> None:
            failure = None
            for rank, holder in sorted(fetched.items()):
                try:
                    if me == rank:
                        file_transfer.exchange(None, Route(into[0], holder, group))
                    elif me == holder:
                        path = Path(chosen[rank][1])
                        file_transfer.exchange(Route(path, rank, group), None)
                except CheckpointError as error:
                    failure = failure or error
            if failure:
                raise failure
            if into:
                store.publish(root, into[0], self.step)

        into: list[Path] = []
        if me in fetched:
            store.together(gather, directory, lambda: into.append(store.begin(root, self.step)))
        else:
            store.together(gather, directory, lambda: None)
        store.together(gather, directory, bring)
        return store.iteration_directory(root, self.step) if into else Path(chosen[me][1])


def with_local_copies(run: Run, tries: list[Candidate], c: CheckpointConfig) -> list[Candidate]:
    """`tries`, and the states in local copies of the run in --load, the newest first; all ranks
    call this."""
    assert c.load is not None and c.non_persistent_local_ckpt_dir is not None
    if c.ckpt_step is not None or c.finetune or store.is_checkpoint(Path(c.load)):
        return tries
    rank = run.runtime.rank
    world = run.runtime.ctx.world
    lines: list[local_copies.Line] = []
    if rank == 0:
        try:
            lines = local_copies.read_lines(Path(c.load))
        except CheckpointError as error:
            log.warn_once(str(error))
    lines = gather_objects(lines, world)[0]
    if not lines:
        return tries
    run_id = lines[-1].run
    folder = node_directory(c) / run_id
    found, problems = local_copies.parts_in(folder)
    listed = gather_objects((socket.gethostname(), found, problems), world)
    for problem in dict.fromkeys(one for _, _, problems in listed for one in problems):
        log.print_rank_0(f"WARNING: a local copy is not used: {problem}")
    newest = local_copies.newest_of_lines(lines)
    least = max((one.step for one in tries if one.step is not None), default=-1)
    more: list[Candidate] = []
    for copy, places in _saves([(host, found) for host, found, _ in listed]):
        text = _unusable(copy, places, newest, layout_of(run.runtime))
        if text is None:
            path = c.non_persistent_local_ckpt_dir
            more.append(LocalCandidate(path, copy.iteration, run, copy.save, places, copy, run_id))
        elif copy.iteration > least:
            log.print_rank_0(f" local copies of iteration {copy.iteration} are not used: {text}")
    # of the same iteration the checkpoint first
    return sorted([*tries, *more], key=lambda one: -(one.step or 0))


def _saves(
    listed: Sequence[tuple[str, Sequence[Found]]],
) -> list[tuple[Copy, dict[int, list[tuple[int, str]]]]]:
    """(one of its parts, the places of each rank's part) of every save that any rank sees, the
    newest first. A directory that several ranks of a host see counts once: as one of the rank whose
    part it is if that is among them, else of the one that wrote it."""
    saves: dict[str, tuple[Copy, dict[int, list[tuple[int, str]]]]] = {}
    seen: dict[tuple[str, str], tuple[int, Found]] = {}
    for rank, (host, found) in enumerate(listed):
        for one in found:
            before = seen.get((host, one.path))
            if before is None or (rank == one.holder and before[0] != one.copy.rank):
                seen[host, one.path] = rank, one
            if rank == one.copy.rank:
                seen[host, one.path] = rank, one
    for rank, one in seen.values():
        _, places = saves.setdefault(one.copy.save, (one.copy, {}))
        places.setdefault(one.copy.rank, []).append((rank, one.path))
    for _, places in saves.values():
        for part, options in places.items():
            options.sort(key=lambda option: (option[0] != part, option))
    return sorted(saves.values(), key=lambda one: -one[0].iteration)


def _unusable(
    copy: Copy,
    places: dict[int, list[tuple[int, str]]],
    newest: dict[str, float],
    layout: dict[str, int],
) -> str | None:
    """Why a save cannot be loaded; None if it can be tried."""
    if copy.iteration > newest.get(copy.line, -1):
        return "the run has continued from an earlier iteration since"
    if copy.layout != layout:
        return f"they were written by {ranks_text(copy.layout)}, this run has {ranks_text(layout)}"
    missing = sorted(set(range(layout["world_size"])) - places.keys())
    if missing:
        return f"the part of rank {_numbers(missing)} was not found"
    return None


def _numbers(ranks: Sequence[int]) -> str:
    shown = [*map(str, ranks[:8]), *["..."] * (len(ranks) > 8)]
    return ", ".join(shown)
