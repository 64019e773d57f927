"""The rank runner itself: real collectives, results in rank order, and every way a rank can
fail."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.forkrun import RanksFailed, run_ranks


def add_up(rank: int, world: int, base: torch.Tensor) -> torch.Tensor:
    total = base + rank
    dist.all_reduce(total)
    return total


def rank_one_fails(rank: int, world: int) -> None:
    if rank == 1:
        print("last words of rank one")
        raise ValueError("planted")
    dist.barrier()


def rank_one_dies(rank: int, world: int) -> None:
    if rank == 1:
        os._exit(7)
    dist.barrier()


def rank_one_sleeps(rank: int, world: int, pid_folder: str) -> None:
    with open(os.path.join(pid_folder, str(rank)), "w") as file:
        file.write(str(os.getpid()))
    if rank == 1:
        time.sleep(600)


@pytest.mark.parametrize("world", [2, 4])
def test_all_reduce_over_real_ranks(world):
    base = torch.arange(3, dtype=torch.float64)
    results = run_ranks(world, add_up, base)
    expected = base * world + sum(range(world))
    assert len(results) == world
    for result in results:
        assert torch.equal(result, expected)


def test_the_failing_ranks_traceback_is_shown_once_with_its_output():
    with pytest.raises(RanksFailed) as error:
        run_ranks(3, rank_one_fails)
    text = str(error.value)
    assert text.startswith("rank 1 of 3 failed:")
    assert text.count("ValueError: planted") == 1 and text.count("Traceback") == 1
    assert "last words of rank one" in text


def test_a_rank_that_dies_without_a_word_is_named():
    with pytest.raises(RanksFailed, match=r"\b1 of 2\b.*\b7\b"):
        run_ranks(2, rank_one_dies)


def test_the_time_limit_kills_every_rank(tmp_path):
    began = time.monotonic()
    with pytest.raises(RanksFailed, match=r"rank (0, )?1 of 2 .*\b1 s"):
        run_ranks(2, rank_one_sleeps, str(tmp_path), seconds=1.0, join=False)
    assert time.monotonic() - began < 30
    for file in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)
