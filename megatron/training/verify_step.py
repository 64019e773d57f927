"""--verify-step-interval: the gradients of an iteration are computed a second time on another
data-parallel rank and compared by hash, so that a processor that computes wrongly is found.

A step repeats bit for bit: for the same samples, seeds and weights two ranks must have the same
local gradients (before they are summed). Where they differ, a third computation decides.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from megatron import log
from megatron.parallel.collectives import gather_objects
from megatron.training.agreement import Requests
from megatron.training.batch import MicroBatch
from megatron.training.launch.process import this_process
from megatron.training.run import Run
from megatron.training.step import (
    ForwardStep,
    StepOutcome,
    forward_backward,
    train_step,
)
from megatron.training.step_sums import StepSums
from megatron.training.weight_check import weight_hashes


class GradientsDiffer(ArithmeticError):
    """Two computations of the same gradients differ; the text names ranks and hosts."""


class Reading(NamedTuple):
    """What a rank computed: hashes of its own local gradients and of those of another replica's
    samples. `replicas` are the ranks of its data-parallel axis."""

    own: str
    other: str
    replicas: tuple[int, ...]
    process: str


class StepVerification:
    """Takes the place of `train_step`, and verifies some iterations."""

    def __init__(self, run: Run, forward_step: ForwardStep):
        training = run.config.training
        self._run = run
        self._forward_step = forward_step
        self._interval = training.verify_step_interval
        self._keeps = training.verify_step_action == "majority"

    def __call__(
        self,
        run: Run,
        forward_step: ForwardStep,
        samples: Iterator[MicroBatch],
        iteration: int,
        requests: Callable[[], Requests] = Requests,
    ) -> StepOutcome:
        """As `training.step.train_step`. Raises GradientsDiffer, on all ranks alike."""
        if iteration % self._interval:
            return train_step(run, forward_step, samples, iteration, requests)
        mine = list(itertools.islice(samples, run.plan.num_microbatches(iteration)))
        ctx = run.runtime.ctx
        replicas = gather_objects((mine, ctx.dp_cp.rank), ctx.dp)
        before = self._pass(iteration, *self._of(replicas, 1))
        try:
            run.buffers.before_reduce = lambda: self._compare(iteration, replicas, before)
            return train_step(run, forward_step, iter(mine), iteration, requests)
        except _Repeat as repeat:
            run.buffers.before_reduce = functools.partial(self._check, repeat)
            return train_step(run, forward_step, iter(mine), iteration, requests)
        finally:
            run.buffers.before_reduce = None

    def _of(
        self, replicas: Sequence[tuple[list[MicroBatch], int]], shift: int
    ) -> tuple[list[MicroBatch], int]:
        return replicas[(self._run.runtime.ctx.dp.rank + shift) % len(replicas)]

    def _pass(self, iteration: int, batches: Sequence[MicroBatch], dp_cp_rank: int) -> str:
        """The hash of the local gradients of these micro-batches; they stay in the buffers."""
        run = self._run
        sums = StepSums(run.runtime.device, routers=run.config.model.router_numbers)
        run.buffers.before_reduce = _nothing  # nothing is summed
        run.buffers.zero(len(batches))
        forward_backward(run, self._forward_step, iter(batches), sums, iteration, dp_cp_rank)
        return self._hash()

    def _hash(self) -> str:
        hashes = weight_hashes(p.main_grad for p in self._run.buffers.params)
        return hashlib.blake2b(repr(hashes).encode(), digest_size=16).hexdigest()

    def _compare(
        self, iteration: int, replicas: Sequence[tuple[list[MicroBatch], int]], before: str
    ) -> None:
        """The local gradients are complete. Raises _Repeat or GradientsDiffer, on all ranks alike,
        where they are not those that another rank has computed."""
        run = self._run
        ctx = run.runtime.ctx
        own = self._hash()
        process = str(this_process())
        found = gather_objects(Reading(own, before, ctx.dp.ranks, process), ctx.world)
        if all(_shifted(found, rank, -1).other == one.own for rank, one in enumerate(found)):
            return
        third = gather_objects(self._pass(iteration, *self._of(replicas, 2)), ctx.world)
        wrong = _wrong(found, third)
        text = (
            f"iteration {iteration}: two computations of the same gradients differ; "
            f"{_named(found, third, wrong)}"
        )
        if run.rows:
            run.rows.close(torch.zeros(run.rows.size, dtype=torch.float64))
        if self._keeps and wrong:
            raise _Repeat(text, _majority(found, third, ctx.world.rank))
        raise _error(text)

    def _check(self, repeat: _Repeat) -> None:
        """The step was repeated: every rank must have the majority's gradients now."""
        again = gather_objects(self._hash() == repeat.right, self._run.runtime.ctx.world)
        if not all(again):
            raise _error(f"{repeat}, also when it repeats them")
        log.print_rank_0(f"WARNING: {repeat}. The majority's gradients are used")


class _Repeat(Exception):
    """The step is to be computed again; `right` is the majority's hash of this rank's gradients."""

    def __init__(self, text: str, right: str | None):
        super().__init__(text)
        self.right = right


def _error(text: str) -> GradientsDiffer:
    return GradientsDiffer(
        f"{text}. Memory or a processor there may be faulty: test it, and resume from the last "
        "checkpoint without this host [gradients-differ]"
    )


def _nothing() -> None:
    """In place of a comparison: the pass only computes."""


def _shifted(found: Sequence[Reading], rank: int, shift: int) -> Reading:
    """What the rank so many replicas after `rank` computed."""
    ranks = found[rank].replicas
    return found[ranks[(ranks.index(rank) + shift) % len(ranks)]]


def _votes(found: Sequence[Reading], third: Sequence[str], rank: int) -> list[tuple[int, str]]:
    """(rank that computed, hash) of the three computations of the samples of `rank`."""
    ranks = found[rank].replicas
    place = ranks.index(rank)
    before = ranks[place - 1]
    twice = ranks[(place - 2) % len(ranks)]
    return [(rank, found[rank].own), (before, found[before].other), (twice, third[twice])]


def _majority(found: Sequence[Reading], third: Sequence[str], rank: int) -> str | None:
    """The hash of the samples of `rank` that two ranks computed (of one replica alone: twice), None
    without one: a rank that repeats its own result proves nothing."""
    votes = _votes(found, third, rank)
    if len(found[rank].replicas) == 1:
        value, count = Counter(value for _, value in votes).most_common(1)[0]
        return value if count > 1 else None
    ranks = {value: {by for by, other in votes if other == value} for _, value in votes}
    agreed = [value for value, by in ranks.items() if len(by) > 1]
    return agreed[0] if agreed else None


def _wrong(found: Sequence[Reading], third: Sequence[str]) -> list[int]:
    """The ranks that are not of a majority; [] where one is missing."""
    wrong = set()
    for rank in range(len(found)):
        usual = _majority(found, third, rank)
        if usual is None:
            return []
        wrong |= {by for by, value in _votes(found, third, rank) if value != usual}
    return sorted(wrong)


def _named(found: Sequence[Reading], third: Sequence[str], wrong: Sequence[int]) -> str:
    if wrong:
        verb = "differs" if len(wrong) == 1 else "differ"
        names = ", ".join(found[rank].process for rank in wrong)
        return f"{names} {verb} from the majority of three"
    undecided = {
        by
        for rank in range(len(found))
        if _majority(found, third, rank) is None
        for by, _ in _votes(found, third, rank)
    }
    names = ", ".join(found[rank].process for rank in sorted(undecided))
    return f"a third computation does not decide which is right; suspected: {names}"
