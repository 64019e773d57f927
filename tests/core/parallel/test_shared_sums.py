"""Sums through shared memory on real ranks: values and bits, ranks that are late, memory that is
not to be had."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from datetime import timedelta

import pytest
import torch

from megatron.config.parallel import ParallelConfig
from megatron.parallel import collectives, shared_sums
from megatron.parallel.context import Axis, ParallelContext
from megatron.parallel.shared_sums import LEAST_BYTES, SLOT_BYTES, SharedSums, open_shared
from tests.forkrun import run_ranks

SIZES = (LEAST_BYTES // 2, 100_003, SLOT_BYTES // 8)


def shared_axis(rank: int, world: int, timeout: timedelta = timedelta(minutes=1)) -> Axis:
    axis = ParallelContext(ParallelConfig(), world, rank).world
    return replace(axis, shared=open_shared(axis, timeout))


def part(rank: int, turn: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor that every rank can make for every rank."""
    generator = torch.Generator().manual_seed(100 * turn + rank)
    return torch.randn(SIZES[turn % len(SIZES)], generator=generator).to(dtype)


def count(sums: SharedSums) -> list[int]:
    """A list that grows by the size of every sum through shared memory."""
    seen = []
    start = sums.start

    def counted(x: torch.Tensor):
        seen.append(x.numel())
        return start(x)

    sums.start = counted
    return seen


def many(rank: int, world: int, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[int]]:
    """Nine sums one after the other, each rank late at another place: before it begins, and before
    it reads."""
    axis = shared_axis(rank, world)
    totals = []
    seen = count(axis.shared)
    for turn in range(9):
        time.sleep(0.01 * ((rank + turn) % world))
        pending = collectives.start_all_reduce(part(rank, turn, dtype), axis)
        time.sleep(0.01 * ((rank + turn + 1) % world))
        totals.append(pending())
    return totals, seen


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sums_have_the_same_right_bits_on_every_rank(world, dtype):
    found = run_ranks(world, many, dtype)
    for totals, seen in found:
        assert seen == [SIZES[turn % len(SIZES)] for turn in range(9)]
        for turn, total in enumerate(totals):
            expected = part(0, turn, dtype)
            for rank in range(1, world):
                expected += part(rank, turn, dtype)
            assert torch.equal(total, expected)


def late_reader(rank: int, world: int) -> torch.Tensor:
    """Rank 1 reads its first sum only when rank 0 has had all the time to go on to the next."""
    axis = shared_axis(rank, world)
    first = collectives.start_all_reduce(torch.full((LEAST_BYTES,), 1.0 + rank), axis)
    if rank == 1:
        time.sleep(0.3)
    total = first().clone()
    collectives.all_reduce_(torch.full((LEAST_BYTES,), 70.0), axis)
    return total


def test_nothing_is_overwritten_before_all_have_read_it():
    for total in run_ranks(2, late_reader):
        assert torch.equal(total, torch.full((LEAST_BYTES,), 3.0))


def through_gloo(rank: int, world: int) -> tuple[list[torch.Tensor], list[int]]:
    """What is too small, too large, of whole numbers, not contiguous, or begun before the last has
    ended."""
    axis = shared_axis(rank, world)
    seen = count(axis.shared)
    inputs = [
        torch.ones(LEAST_BYTES // 4 - 1),
        torch.ones(SLOT_BYTES // 4 + 1),
        torch.ones(LEAST_BYTES, dtype=torch.int64),
        torch.ones(LEAST_BYTES, 2).t(),
    ]
    totals = [collectives.all_reduce(x, axis) for x in inputs]
    first, second = (
        collectives.start_all_reduce(torch.full((LEAST_BYTES,), value), axis)
        for value in (2.0, 3.0)
    )
    return [
        *totals,
        second(),
        first(),
        collectives.all_reduce(torch.ones(LEAST_BYTES), axis, "max"),
    ], seen


def test_what_does_not_fit_goes_through_gloo():
    for (*totals, second, first, largest), seen in run_ranks(2, through_gloo):
        assert all(torch.equal(total, torch.full_like(total, 2)) for total in totals)
        assert (float(first[-1]), float(second[-1]), float(largest[-1])) == (4, 6, 1)
        assert seen == [LEAST_BYTES]


def opened(rank: int, world: int, fails: str) -> tuple[bool, float]:
    """Whether there is shared memory where something is not as it should be on one rank; a sum all
    the same."""

    def refuse(*_: object) -> None:
        raise OSError("not here")

    if fails == "out of reach" and rank == 1:
        shared_sums._map = lambda *_: None
    if fails == "another file" and rank == 1:
        mapped = shared_sums._map
        shared_sums._map = lambda path, size, token: mapped(path, size, bytes(len(token)))
    if fails == "no memory" and rank == 0:
        os.posix_fallocate = refuse
    if fails == "no such call" and rank == 0:
        del os.memfd_create
    if fails == "another processor":
        shared_sums.platform.machine = lambda: "aarch64"
    if fails == "nccl":
        shared_sums.dist.get_backend = lambda group: "nccl"
    axis = shared_axis(rank, world)
    return axis.shared is not None, float(collectives.all_reduce_(torch.ones(LEAST_BYTES), axis)[0])


@pytest.mark.parametrize(
    "fails",
    ["out of reach", "another file", "no memory", "no such call", "another processor", "nccl", ""],
)
def test_all_ranks_share_memory_or_none(fails):
    assert run_ranks(2, opened, fails) == [(fails == "", 2.0)] * 2


def alone(rank: int, world: int) -> str:
    """What rank 0 hears when rank 1 does not come."""
    axis = shared_axis(rank, world, timedelta(seconds=0.2))
    if rank == 0:
        pending = collectives.start_all_reduce(torch.ones(LEAST_BYTES), axis)
        assert not pending.arrived
        try:
            pending()
        except RuntimeError as error:
            return str(error)
    return ""


def test_a_rank_that_does_not_come():
    message, _ = run_ranks(2, alone)
    assert message.startswith("timed out after 0 s of waiting for rank 1")


def arrivals(rank: int, world: int) -> list[bool]:
    axis = shared_axis(rank, world)
    if rank == 1:
        collectives.barrier(axis)
    pending = collectives.start_all_reduce(torch.ones(LEAST_BYTES), axis)
    before = pending.arrived
    if rank == 0:
        collectives.barrier(axis)
    pending()
    return [before, pending.arrived]


def test_a_sum_has_arrived_when_all_have_begun_it():
    assert run_ranks(2, arrivals) == [[False, True], [True, True]]


def test_one_rank_needs_none():
    assert open_shared(Axis("tp"), timedelta(minutes=1)) is None
