"""Rollback within a run: snapshots of it in host memory, and the return to one of them or to a
checkpoint."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megatron import log
from megatron.checkpoint import state_reader
from megatron.checkpoint.filesystem import CheckpointError
from megatron.checkpoint.reading import Candidate
from megatron.config import history, run_directory
from megatron.config.run_directory import RunDirectory
from megatron.config.skip_ranges import SkipRanges
from megatron.features.spikes.actions import EXIT_CODE, SpikeActions
from megatron.features.spikes.policy import NAME, Rollback
from megatron.parallel.collectives import gather_objects
from megatron.training.checkpointing import load, save
from megatron.training.hook import Hook
from megatron.training.launch.process import Refusal
from megatron.training.result import IterationResult
from megatron.training.run import Run
from megatron.training.save_policy import SavePolicy
from megatron.training.skipping import new_record, write_records


@dataclass
class Snapshot:
    """The run after `iteration` iterations on this rank: what a checkpoint has, tensors in the
    order of `own_tensors`."""

    iteration: int
    state: bytes
    tensors: list[torch.Tensor]


class RollbackBuffer(Hook):
    """What a run can roll back to: the last snapshots in memory, and its own checkpoints."""

    after = ("SavePolicy",)
    before = ("ControlFileRequests", "StepVerification", "GarbageCollection")

    def __init__(
        self, run: Run, saving: SavePolicy, policy: SpikeActions, copies: int, interval: int
    ):
        """Keeps `copies` snapshots, `interval` iterations apart."""
        self._run = run
        self._saving = saving
        self._policy = policy
        self._interval = interval
        self._copies = copies
        self._loaded = run.progress.iteration
        self._saved: set[int] = set()
        self.snapshots: list[Snapshot] = []  # oldest first

    def after_save(self, iteration: int) -> None:
        self._saved.add(iteration)

    def on_start(self) -> None:
        self.maybe_snapshot()

    def after_step(self, result: IterationResult) -> None:
        """Roll back if --spike-action requests it now, otherwise take a snapshot if that is due.
        Raises Refusal."""
        run = self._run
        try:
            request = self._policy.due(run.plan.train_iters, run.progress.iteration)
        except Refusal:
            if self._policy.action == "skip-update":  # the weights are good
                self._saving.save()
            raise
        if request is None:
            self.maybe_snapshot()
            return
        self._saving.settle()
        self.roll_back(request)

    def maybe_snapshot(self) -> None:
        """Take a snapshot, over the oldest one, if that is due; never while a spike is open."""
        run = self._run
        newest = self.snapshots[-1].iteration if self.snapshots else -self._interval
        if (
            not self._copies
            or self._policy.spike_open
            or run.progress.iteration < newest + self._interval
        ):
            return
        tensors = _tensors(run)
        if len(self.snapshots) == self._copies:
            memory = self.snapshots.pop(0).tensors
        else:
            memory = [torch.empty_like(tensor, device="cpu") for tensor in tensors]
        for copy, tensor in zip(memory, tensors, strict=True):
            copy.copy_(tensor)
        run.progress.features[NAME] = self._policy.state_dict()
        self.snapshots.append(Snapshot(run.progress.iteration, save.state_of(run).dump(), memory))

    def roll_back(self, request: Rollback) -> None:
        """Return to before `request.start` and skip from there to `request.end`; if nothing so old
        is left, from the oldest there is. Raises Refusal where nothing is older than the spike,
        CheckpointError where a disk refuses."""
        run = self._run
        progress = self._run.progress
        checkpoints = self._checkpoints()
        restorable = [*checkpoints, *(snapshot.iteration for snapshot in self.snapshots)]
        back = max(
            (n for n in restorable if n < request.start),
            default=min(restorable, default=request.first),
        )
        if back >= request.first:
            raise Refusal(
                (
                    f"a spike at iteration {request.first}, and nothing older to roll back to: "
                    "neither a snapshot in memory (--spike-snapshot-interval) nor a checkpoint of "
                    f"this run; start again, with --train-range-to-skip {request.start} "
                    f"{request.end} [rewind-without-snapshot]"
                ),
                EXIT_CODE,
            )
        request = replace(request, start=max(request.start, back + 1))
        newest = progress.iteration
        rewinds = [*self._policy.rewinds, request]
        order = run.progress.data_order
        where = self._take_back(back, checkpoints)
        self._policy.load_state_dict(progress.features.get(NAME, {}))
        self._policy.rewinds = rewinds
        run.progress.data_order = order
        first = progress.iteration + 1
        repeated = (
            f"{first} to {request.start - 1} are trained again, " if first < request.start else ""
        )
        log.print_rank_0(
            f"rewind from iteration {newest} to {progress.iteration} ({where}), attempt "
            f"{request.attempt} for the spike at {request.first}: iterations "
            f"{repeated}{request.start} to {request.end} are skipped"
        )
        _record_skip(
            run,
            request.start,
            request.end,
            "spike",
            f"--spike-action rewind, attempt {request.attempt}",
        )
        self.snapshots = [
            snapshot for snapshot in self.snapshots if snapshot.iteration <= progress.iteration
        ]
        self.maybe_snapshot()

    def _take_back(self, iteration: int, checkpoints: dict[int, list[Candidate]]) -> str:
        """Restore the run as it was after `iteration`; returns the source."""
        run = self._run
        for snapshot in self.snapshots:
            if snapshot.iteration == iteration:
                for tensor, copy in zip(_tensors(run), snapshot.tensors, strict=True):
                    tensor.copy_(copy)
                load.restore_counters(
                    run, state_reader.parse(snapshot.state, "a snapshot in memory")
                )
                if run.fp8:
                    run.fp8.loaded()
                return "a snapshot in memory"
        tries = [
            candidate
            for n in sorted(checkpoints, reverse=True)
            if n <= iteration
            for candidate in checkpoints[n]
        ]
        load.load_own(run, tries)
        return "a checkpoint"

    def _checkpoints(self) -> dict[int, list[Candidate]]:
        """Checkpoints by iteration that are this run's own: it saved them, or they led to what it
        loaded."""
        own: dict[int, list[Candidate]] = {}
        if self._run.runtime.rank == 0:
            try:
                for n, candidate in self._listed():
                    own.setdefault(n, []).append(candidate)
            except CheckpointError as error:
                log.print_rank_0(f"WARNING: {error}")
        return gather_objects(own, self._run.runtime.ctx.world)[0]

    def _listed(self) -> Iterator[tuple[int, Candidate]]:
        c = self._run.config.checkpoint
        if c.save:
            yield from (
                (n, Candidate(c.save, n))
                for n in run_directory.iterations(c.save)
                if n in self._saved
            )
        if c.load and self._loaded and not (c.finetune or c.no_load_optim):
            if run_directory.is_checkpoint(Path(c.load)):
                yield self._loaded, Candidate(c.load, None)
            else:
                stored = RunDirectory(c.load).histories
                own = self._run.progress.history
                for n in history.led_to(own, self._loaded, stored):
                    yield n, Candidate(c.load, n)

    def on_rollback(self) -> None:
        """Checkpoints beyond the iteration rolled back to are of a branch that was left: no resume
        goes back to them."""
        now = self._run.progress.iteration
        self._saved = {n for n in self._saved if n <= now}
        self._loaded = min(self._loaded, now)


def _tensors(run: Run) -> list[torch.Tensor]:
    """All tensors of the run on this rank, not copied."""
    return [tensor for *_, own in save.own_tensors(run) for _, tensor in own]


def _record_skip(run: Run, first: int, last: int, reason: str, source: str) -> None:
    """Skip iterations first to last from now on, and record it in `skips.jsonl` and in checkpoints;
    all ranks call this.

    Samples that are open must be reopened. Raises CheckpointError where it cannot be written.
    """
    from megatron.checkpoint.skip_log import now

    time = run.of_rank_0(now)
    record = new_record(run, SkipRanges([(first, last)]), reason, source, time)
    write_records(run, [record])
    run.progress.skip_records.append(record)
    run.plan = replace(run.plan, skips=run.plan.skips.joined([(first, last)]))
    log.print_rank_0(
        f"iterations {first} to {last} will be skipped ({reason}, {source}): samples {record.s0} "
        f"to {record.s1 - 1}, {record.tokens} tokens"
    )
