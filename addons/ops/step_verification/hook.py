"""--verify-step-interval: the gradients of an iteration are computed a second time on another
data-parallel rank and compared by hash, so that a processor that computes wrongly is found.

A step repeats bit for bit: for the same samples, seeds and weights two ranks must have the same
local gradients (before they are summed). Where they differ, a third computation decides. The sums
are computed twice, too, so that a wrong message is found; after the update the ranks compare the
loss, the gradient norm and, over replicas, the weights.
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
from megatron.parallel.fsdp import UnitReduction
from megatron.training.batch import MicroBatch
from megatron.training.hook import Hook, Step
from megatron.training.launch.process import this_process
from megatron.training.result import IterationResult, Requests
from megatron.training.run import Run
from megatron.training.step import ForwardStep, forward_backward
from megatron.training.step_sums import StepSums
from megatron.training.weight_check import weight_hashes

from ..weights.hook import compare_weights
from .repeated_sums import RepeatedSum, UnitSums, reduce_twice


class GradientsDiffer(ArithmeticError):
    """Two computations of the same numbers differ; the text names ranks and hosts."""


class Reading(NamedTuple):
    """What a rank computed: hashes of its own local gradients and of those of another replica's
    samples. `replicas` are the ranks of its data-parallel axis."""

    own: str
    of_replica: str
    replicas: tuple[int, ...]
    process: str


class StepVerification(Hook):
    """Takes the place of the training step, and verifies some iterations."""

    before = ("GarbageCollection",)

    def __init__(self, run: Run, forward_step: ForwardStep, interval: int, *, keep_majority: bool):
        self._run = run
        self._forward_step = forward_step
        self._interval = interval
        self._keeps = keep_majority
        self._units: UnitSums | None = None

    def wrap_step(self, step: Step) -> Step:
        """Some iterations are verified."""
        self._step = step
        return self

    def __call__(
        self,
        run: Run,
        forward_step: ForwardStep,
        samples: Iterator[MicroBatch],
        iteration: int,
        requests: Callable[[], Requests] = Requests,
    ) -> IterationResult:
        """As `training.step.train_step`. Raises GradientsDiffer, on all ranks alike."""
        if iteration % self._interval:
            return self._step(run, forward_step, samples, iteration, requests)
        own_batches = list(itertools.islice(samples, run.plan.num_microbatches(iteration)))
        ctx = run.runtime.ctx
        replicas = gather_objects((own_batches, ctx.dp_cp.rank), ctx.dp)
        before = self._pass(iteration, *self._of(replicas, 1))
        try:
            self._watch_units()
            run.buffers.reduction.instead = lambda: self._compare(iteration, replicas, before)
            result = self._step(run, forward_step, iter(own_batches), iteration, requests)
        except _Repeat as repeat:
            self._watch_units()
            run.buffers.reduction.instead = functools.partial(self._check, iteration, repeat)
            result = self._step(run, forward_step, iter(own_batches), iteration, requests)
        finally:
            run.buffers.reduction.instead = None
            vars(run.buffers.reduction).pop("start", None)
        self._compare_results(iteration, result)
        return result

    def _of(
        self, replicas: Sequence[tuple[list[MicroBatch], int]], shift: int
    ) -> tuple[list[MicroBatch], int]:
        return replicas[(self._run.runtime.ctx.dp.rank + shift) % len(replicas)]

    def _pass(self, iteration: int, batches: Sequence[MicroBatch], dp_cp_rank: int) -> str:
        """The hash of the local gradients of these micro-batches; they stay in the buffers."""
        run = self._run
        sums = StepSums(run.runtime.device, routers=run.config.model.router_numbers)
        run.buffers.reduction.instead = _nothing  # what is summed goes nowhere
        self._watch_units()
        run.buffers.zero(len(batches))
        forward_backward(run, self._forward_step, iter(batches), sums, iteration, dp_cp_rank)
        return self._hash()

    def _watch_units(self) -> None:
        """From now on, where ranks share gradients: those of this computation, unit by unit."""
        reduction = self._run.buffers.reduction
        if isinstance(reduction, UnitReduction):
            self._units = UnitSums(reduction, _digest)
            reduction.start = self._units  # type: ignore[method-assign]

    def _hash(self) -> str:
        buffers = self._run.buffers
        buffers.complete()
        if self._units is None:
            hashes = weight_hashes(p.main_grad for p in buffers.params)
        else:  # and those that this rank shares with no other
            alone = [each for each in buffers.buckets if each.replicas.shard.size == 1]
            hashes = self._units.local + weight_hashes(
                p.main_grad for bucket in alone for p in bucket.params
            )
        return hashlib.blake2b(repr(hashes).encode(), digest_size=16).hexdigest()

    def _compare(
        self, iteration: int, replicas: Sequence[tuple[list[MicroBatch], int]], before: str
    ) -> None:
        """The local gradients are complete: sum them. Raises _Repeat or GradientsDiffer, on all
        ranks alike, where they are not those that another rank has computed, or a second sum
        differs."""
        run = self._run
        ctx = run.runtime.ctx
        own = self._hash()
        process = str(this_process())
        readings = gather_objects(Reading(own, before, ctx.dp.ranks, process), ctx.world)
        if all(
            _shifted(readings, rank, -1).of_replica == reading.own
            for rank, reading in enumerate(readings)
        ):
            self._sum_twice(iteration, own)
            return
        third = gather_objects(self._pass(iteration, *self._of(replicas, 2)), ctx.world)
        wrong = _wrong(readings, third)
        text = (
            f"iteration {iteration}: two computations of the same gradients differ; "
            f"{_named(readings, third, wrong)}"
        )
        if wrong:
            raise self._repeated(_Repeat(text, _majority(readings, third, ctx.world.rank)))
        raise _error(text)

    def _repeated(self, repeat: _Repeat) -> Exception:
        """What to raise where a majority can decide."""
        for counter in self._run.counters:
            counter.close(torch.zeros(counter.size, dtype=torch.float64))
        return repeat if self._keeps else _error(str(repeat))

    def _sum_twice(self, iteration: int, own: str, earlier: _Repeat | None = None) -> None:
        """Sum the gradients, whose hash is `own`. Raises _Repeat or GradientsDiffer where the two
        sums differ, or those of replicas; `earlier`: the step is already a repetition, and its sums
        must be among those of before."""
        world = self._run.runtime.ctx.world
        own_sums = reduce_twice(self._run.buffers, _digest)
        if self._units is not None:
            own_sums += self._units.sums
        known = earlier is None or earlier.knows(own_sums)
        gathered = gather_objects((own_sums, known, str(this_process())), world)
        sums = [repeated for repeated, _, _ in gathered]
        twice = [rank for rank, repeated in enumerate(sums) if any(a != b for a, b, _ in repeated)]
        wrong = twice or _odd_replicas(sums)
        unknown = [rank for rank, (_, known, _) in enumerate(gathered) if not known]
        if not wrong and not unknown:
            return
        of_whom = "of the same gradients" if twice else "of replicas"
        text = (
            f"iteration {iteration}: two sums {of_whom} differ; "
            f"{', '.join(gathered[rank][2] for rank in wrong)}, or a rank that sends to it"
        )
        if twice and earlier is None:
            raise self._repeated(_Repeat(text, own, own_sums))
        raise _error(f"{earlier}, also when it is repeated" if earlier else text)

    def _check(self, iteration: int, repeat: _Repeat) -> None:
        """The step was repeated: every rank must have the majority's gradients now, and sums."""
        own = self._hash()
        agreeing = gather_objects(own == repeat.right, self._run.runtime.ctx.world)
        if not all(agreeing):
            raise _error(f"{repeat}, also when it repeats them")
        self._sum_twice(iteration, own, repeat)
        log.print_rank_0(f"WARNING: {repeat}. The majority's gradients are used")

    def _compare_results(self, iteration: int, result: IterationResult) -> None:
        """What all ranks must have alike after the update. Raises GradientsDiffer or
        WeightsDiffer."""
        run = self._run
        run.buffers.gathering.wait()
        own_result = repr((result.loss, result.grad_norm, result.num_zeros))
        results = gather_objects((own_result, str(this_process())), run.runtime.ctx.world)
        odd = _minority([value for value, _ in results])
        if odd:
            names = ", ".join(results[rank][1] for rank in odd)
            raise _error(
                f"iteration {iteration}: loss, gradient norm or zeros are not the same on all "
                f"ranks: {names}"
            )
        compare_weights(run, iteration)


class _Repeat(Exception):
    """The step is to be computed again; `right` is the majority's hash of this rank's gradients,
    `sums` are the two of which one is wrong, if that is why."""

    def __init__(self, text: str, right: str | None, sums: Sequence[RepeatedSum] = ()):
        super().__init__(text)
        self.right = right
        self._sums = sums

    def knows(self, sums: Sequence[RepeatedSum]) -> bool:
        """Are these sums among those of before?"""
        return not self._sums or all(
            repeated.second in before[:2] for repeated, before in zip(sums, self._sums, strict=True)
        )


def _error(text: str) -> GradientsDiffer:
    return GradientsDiffer(
        f"{text}. Memory or a processor there may be faulty: test it, and resume from the last "
        "checkpoint without this host [gradients-differ]"
    )


def _digest(sums: torch.Tensor) -> tuple[int, int]:
    return weight_hashes([sums])[0]


def _minority(values: Sequence[object]) -> list[int]:
    """The indices of those that differ from more than half of all; all of them without such a
    majority; [] if they are equal."""
    usual, count = Counter(values).most_common(1)[0]
    if count == len(values):
        return []
    decided = 2 * count > len(values)
    return [index for index, value in enumerate(values) if value != usual or not decided]


def _odd_replicas(sums: Sequence[Sequence[RepeatedSum]]) -> list[int]:
    """The ranks whose sums are not those of most ranks that must have the same."""
    wrong = set()
    for sums_of_rank in sums:
        for number, (_, _, same) in enumerate(sums_of_rank):
            if same:
                wrong |= {same[n] for n in _minority([sums[r][number].second for r in same])}
    return sorted(wrong)


def _nothing() -> None:
    """In place of a comparison: the pass only computes."""


def _shifted(readings: Sequence[Reading], rank: int, shift: int) -> Reading:
    """What the rank so many replicas after `rank` computed."""
    ranks = readings[rank].replicas
    return readings[ranks[(ranks.index(rank) + shift) % len(ranks)]]


def _votes(readings: Sequence[Reading], third: Sequence[str], rank: int) -> list[tuple[int, str]]:
    """(rank that computed, hash) of the three computations of the samples of `rank`."""
    ranks = readings[rank].replicas
    index = ranks.index(rank)
    before = ranks[index - 1]
    twice = ranks[(index - 2) % len(ranks)]
    return [
        (rank, readings[rank].own),
        (before, readings[before].of_replica),
        (twice, third[twice]),
    ]


def _majority(readings: Sequence[Reading], third: Sequence[str], rank: int) -> str | None:
    """The hash of the samples of `rank` that two ranks computed (of one replica alone: twice), None
    without one: a rank that repeats its own result proves nothing."""
    votes = _votes(readings, third, rank)
    if len(readings[rank].replicas) == 1:
        value, count = Counter(value for _, value in votes).most_common(1)[0]
        return value if count > 1 else None
    ranks = {value: {by for by, vote in votes if vote == value} for _, value in votes}
    agreed = [value for value, by in ranks.items() if len(by) > 1]
    return agreed[0] if agreed else None


def _wrong(readings: Sequence[Reading], third: Sequence[str]) -> list[int]:
    """The ranks that are not of a majority; [] where one is missing."""
    wrong = set()
    for rank in range(len(readings)):
        usual = _majority(readings, third, rank)
        if usual is None:
            return []
        wrong |= {by for by, value in _votes(readings, third, rank) if value != usual}
    return sorted(wrong)


def _named(readings: Sequence[Reading], third: Sequence[str], wrong: Sequence[int]) -> str:
    if wrong:
        verb = "differs" if len(wrong) == 1 else "differ"
        names = ", ".join(readings[rank].process for rank in wrong)
        return f"{names} {verb} from the majority of three"
    undecided = {
        by
        for rank in range(len(readings))
        if _majority(readings, third, rank) is None
        for by, _ in _votes(readings, third, rank)
    }
    names = ", ".join(readings[rank].process for rank in sorted(undecided))
    return f"a third computation does not decide which is right; suspected: {names}"
